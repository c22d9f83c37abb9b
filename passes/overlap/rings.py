"""rings: context parallelism by a ring of point-to-point messages beside attention, on numbers alone."""

from __future__ import annotations

from stepgraph.passes.overlap.policies import SMS
from stepgraph.passes.overlap.streams import COMPUTE, Task, schedule

_SMS = SMS["nccl"]


def ring_forward_tasks(ranks: int, attention_s: float, transfer_s: float) -> list[Task]:
    """Forward: in each of `ranks` steps, attention with the keys that are here, beside the transfer of the next ones.

    attention_s: of one step; with zigzag order all steps take as long. transfer_s: keys and values of one rank.
    """
    return _steps(attention_s, [transfer_s] * (ranks - 1))


def ring_forward_exposed_s(ranks: int, attention_s: float, transfer_s: float) -> float:
    """What the ring exposes in forward: (cp - 1) max(0, c - a).

    Source: NVIDIA/TransformerEngine transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py.
    """
    return schedule(ring_forward_tasks(ranks, attention_s, transfer_s)).total_exposed_s


def ring_backward_tasks(ranks: int, attention_s: float, transfer_s: float) -> list[Task]:
    """Backward: the first step sends keys and values, the last their gradients, those in between both in one message.

    attention_s: backward of one step. transfer_s: keys and values of one rank; their gradients are as large.
    """
    if ranks < 2:
        return _steps(attention_s, [])
    messages = [transfer_s, *[2 * transfer_s] * (ranks - 2), transfer_s]
    return _steps(attention_s, messages)[: 2 * ranks]


def ring_backward_exposed_s(ranks: int, attention_s: float, transfer_s: float) -> float:
    """What the ring exposes in backward: (cp - 2) max(0, 2 c - a) + 2 max(0, c - a), for cp of 2 or more.

    Source: NVIDIA/TransformerEngine transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py.
    """
    return schedule(ring_backward_tasks(ranks, attention_s, transfer_s)).total_exposed_s


def _steps(attention_s: float, messages: list[float]) -> list[Task]:
    """Attention steps, each beside one message; a step waits for the message and the step before it."""
    tasks: list[Task] = []
    for message in messages:
        waits_for = tuple(range(max(0, len(tasks) - 2), len(tasks)))
        tasks.append(("cp", message, waits_for, _SMS))
        tasks.append((COMPUTE, attention_s, waits_for, 0))
    return [*tasks, (COMPUTE, attention_s, tuple(range(max(0, len(tasks) - 2), len(tasks))), 0)]
