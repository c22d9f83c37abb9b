"""What an engine runs: one program per rank, made of computations and communication calls under one numbering.

A call is a tuple of steps: one computation, or the transfers that one communication call posts or waits for. A step
is the plain tuple (kind, place, microbatch), as an action is. The place of a computation is its stage; that of a
transfer is the boundary it crosses, boundary b lying between stages b and b + 1, so that both sides name it alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from stepgraph.passes.pipeline.actions import BACKWARD, FORWARD, INPUT_GRAD, Order, Slot
from stepgraph.passes.pipeline.modes import Mode
from stepgraph.passes.pipeline.timing import Timing

# 0 to 3 are the kinds of actions. The two sides of a transfer differ in the lowest bit, set where it is received.
SEND_FORWARD: Final = 4
RECV_FORWARD: Final = 5
SEND_BACKWARD: Final = 6
RECV_BACKWARD: Final = 7
# Added to the kind of a transfer: its call only posts it, or waits for what was posted before. Neither: both.
POSTED: Final = 8
AWAITED: Final = 16
HOLD: Final = 24
"""No work, but not before a stage's parameters are there."""
AWAIT: Final = 25
"""No work, but not before the input of a backward is there."""
PAIRED_BACKWARD: Final = 26
"""The backward of a pair that runs as one op: its time is in the pair's."""
PAIRED_INPUT_GRAD: Final = 27
PAIR: Final = 28
"""A forward and a backward as one op; the stage of the backward is added to the kind."""

KIND_NAMES: Final = (
    *("forward", "backward", "input_grad", "weight_grad"),
    *("send_forward", "recv_forward", "send_backward", "recv_backward"),
)

Step: TypeAlias = tuple[int, int, int]
Call: TypeAlias = tuple[Step, ...]
Program: TypeAlias = Sequence[Call]


def is_transfer(kind: int) -> bool:
    """Whether a step of this kind moves a tensor between ranks."""
    return SEND_FORWARD <= kind < HOLD


def kind_name(kind: int) -> str:
    """A kind in words. `send_forward`; `wait_recv_backward` where the call only waits."""
    if kind >= HOLD:
        return {HOLD: "hold", AWAIT: "await"}.get(kind, "forward_backward")
    if is_transfer(kind):
        prefix = "post_" if kind & POSTED else "wait_" if kind & AWAITED else ""
        return prefix + KIND_NAMES[kind & 7]
    return KIND_NAMES[kind]


def call_name(call: Call) -> str:
    """The kinds of a call joined by underscores, as Megatron-LM names them: `send_forward_recv_backward`."""
    return "_".join(kind_name(kind) for kind, _, _ in call)


def computations(order: Order, timing: Timing, mode: Mode) -> list[Program]:
    """Per rank what it computes, one call per action; the order's own slots where nothing has to be rewritten.

    A pair that runs as one op becomes three calls: wait for the backward's input, the op, and the backward's output,
    which takes no time. The forward of micro-batch 0 has a hold before it on stages that say so.
    """
    return [
        slots if _is_plain(slots, timing) else [call for slot in slots for call in rewritten(slot, timing, mode)]
        for slots in order.ranks
    ]


def rewritten(slot: Slot, timing: Timing, mode: Mode) -> list[Call]:
    """The calls of one slot."""
    holds: list[Call] = [
        ((HOLD, stage, 0),) for kind, stage, which in slot if which == 0 and _held(kind, stage, timing)
    ]
    return [*holds, *(_one_op(slot) if is_one_op(slot, timing, mode) else zip(slot))]


def computed(slots: Sequence[Slot], timing: Timing, mode: Mode) -> list[Sequence[Call]]:
    """The calls of each slot, where inputs have been received before: none is awaited."""
    if not any(timing.first_not_before_s) and not timing.pair_s:
        return [tuple(zip(slot)) for slot in slots]
    return [[call for call in rewritten(slot, timing, mode) if call[0][0] != AWAIT] for slot in slots]


def _is_plain(slots: Sequence[Slot], timing: Timing) -> bool:
    """Whether the slots are calls as they stand."""
    return not any(timing.first_not_before_s) and all(len(slot) == 1 for slot in slots)


def is_one_op(slot: Slot, timing: Timing, mode: Mode) -> bool:
    """Whether a slot of two actions runs as one op."""
    if len(slot) < 2:
        return False
    (_, forward, _), (_, backward, _) = pair_of(slot)
    return mode.joint > 0 or (forward, backward) in timing.pair_s


def pair_of(slot: Slot) -> Slot:
    """The two actions of a slot, the forward first."""
    return slot if slot[0][0] == FORWARD else slot[::-1]


def is_backward(kind: int) -> bool:
    """Whether a computation of this kind makes gradients."""
    return BACKWARD <= kind < SEND_FORWARD or PAIRED_BACKWARD <= kind < PAIR


def _held(kind: int, stage: int, timing: Timing) -> bool:
    return kind == FORWARD and bool(timing.first_not_before_s) and timing.first_not_before_s[stage] > 0


def _one_op(slot: Slot) -> Iterator[Call]:
    (_, forward, first), (kind, backward, second) = pair_of(slot)
    yield ((AWAIT, backward, second),)
    yield ((PAIR + backward, forward, first),)
    yield ((PAIRED_INPUT_GRAD if kind == INPUT_GRAD else PAIRED_BACKWARD, backward, second),)
