"""Pipeline orders as data: what each rank does, call by call.

An order is one sequence of calls per rank. A call is a tuple of actions: either one computation, or the transfers
that are issued together as one blocking communication kernel. An action is the plain tuple (kind, place, microbatch):
plain because a long step has 100,000 of them. The place of a computation is its stage; the place of a transfer is
the boundary it crosses, boundary b lying between stages b and b + 1, so that both sides give it the same name.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice, repeat
from typing import Final, TypeAlias

from stepgraph.errors import InputError, Problem

FORWARD: Final = 0
BACKWARD: Final = 1
# The two sides of a transfer differ in the lowest bit, which is set on the receiving side.
SEND_FORWARD: Final = 2
RECV_FORWARD: Final = 3
SEND_BACKWARD: Final = 4
RECV_BACKWARD: Final = 5

KIND_NAMES: Final = ("forward", "backward", "send_forward", "recv_forward", "send_backward", "recv_backward")

Action: TypeAlias = tuple[int, int, int]
Call: TypeAlias = tuple[Action, ...]
Order: TypeAlias = tuple[tuple[Call, ...], ...]


def one_f_one_b(stages: int, microbatches: int) -> Order:
    """Non-interleaved 1F1B: warm-up forwards, one forward and one backward in turn, cool-down backwards.

    Rank p (= stage p) warms up with min(stages - 1 - p, microbatches) forwards. While both directions run, sending
    one way and receiving from the same neighbour is a single batched call; elsewhere each transfer is its own call.

    Raises: InputError when there is no stage or no micro-batch.
    Source: Narayanan et al. 2021 (Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM),
    section 2.2; NVIDIA/Megatron-LM, megatron/core/pipeline_parallel/schedules.py,
    forward_backward_pipelining_without_interleaving.
    """
    _check_counts(stages, microbatches)
    return tuple(_rank_one_f_one_b(stage, stages, microbatches) for stage in range(stages))


def call_name(call: Call) -> str:
    """The kinds of a call joined by underscores, as Megatron-LM names them: `send_forward_recv_backward`."""
    return "_".join(KIND_NAMES[kind] for kind, _, _ in call)


def _rank_one_f_one_b(stage: int, stages: int, microbatches: int) -> tuple[Call, ...]:
    """One rank's calls. What the ends of the pipeline do not transfer are empty calls at first, then dropped."""
    first, last = stage == 0, stage == stages - 1
    forward, backward = _each(FORWARD, stage, microbatches), _each(BACKWARD, stage, microbatches)
    recv = _each(RECV_FORWARD, stage - 1, microbatches, missing=first)
    send = _each(SEND_FORWARD, stage, microbatches, missing=last)
    recv_gradient = _each(RECV_BACKWARD, stage, microbatches, missing=last)
    send_gradient = _each(SEND_BACKWARD, stage - 1, microbatches, missing=first)

    warm = min(stages - 1 - stage, microbatches)  # forwards ahead, and backwards left over
    steady = microbatches - warm
    down = _batch(send[warm:], recv_gradient)
    ahead = max(steady - 1, 0)  # in the last steady turn there is nothing left to receive
    up = chain(islice(_batch(send_gradient, recv[warm + 1 :]), ahead), _batch(send_gradient[ahead:]))
    phases = (
        _turns(_batch(recv), zip(forward[:warm]), _batch(send)),
        (zip(recv[warm : warm + 1]),),
        _turns(zip(forward[warm:]), down, zip(backward), up),
        _turns(_batch(recv_gradient[steady:]), zip(backward[steady:]), _batch(send_gradient[steady:])),
    )
    return tuple(filter(None, chain.from_iterable(chain.from_iterable(phases))))


def _each(kind: int, place: int, microbatches: int, *, missing: bool = False) -> list[Action]:
    """The action of every micro-batch; no actions where there is no such transfer."""
    return [] if missing else [(kind, place, microbatch) for microbatch in range(microbatches)]


def _batch(*columns: list[Action]) -> Iterable[Call]:
    """One call per row, batching the columns that have any action; empty calls without end when none has."""
    present = [column for column in columns if column]
    return zip(*present, strict=False) if present else repeat(())


def _turns(*columns: Iterable[Call]) -> Iterable[tuple[Call, ...]]:
    """Take one call of each column in turn until a column ends."""
    return zip(*columns, strict=False)


def _check_counts(stages: int, microbatches: int) -> None:
    """Raises: InputError naming each count below one."""
    counts = (("stages", stages), ("microbatches", microbatches))
    problems = [Problem("pipeline-count", name, f"{count}", "at least 1") for name, count in counts if count < 1]
    if problems:
        raise InputError(problems)
