"""Which transfers a computation needs before it and leads to after it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import attrs

from stepgraph.passes.pipeline.actions import BACKWARD, FORWARD, INPUT_GRAD, Order, Slot
from stepgraph.passes.pipeline.steps import RECV_BACKWARD, RECV_FORWARD, SEND_BACKWARD, SEND_FORWARD, Step

_NONE = -1


Steps: TypeAlias = tuple[Step, ...]
_Row: TypeAlias = tuple[tuple[int, int], ...]


@attrs.frozen
class Transfers:
    """The transfers around every computation of an order, looked up by kind and stage.

    before and after: by kind of action (weight gradients have none), then by stage: (kind, boundary) of the transfer,
    with kind -1 for none.
    """

    before: tuple[_Row, ...]
    after: tuple[_Row, ...]

    def received(self, slots: Iterable[Slot]) -> list[Steps]:
        """Of each slot, the receives that must have ended before it."""
        return [_steps(self.before, slot) for slot in slots]

    def sent(self, slots: Iterable[Slot]) -> list[Steps]:
        """Of each slot, the sends that it leads to."""
        return [_steps(self.after, slot) for slot in slots]


def transfers(order: Order) -> Transfers:
    """The transfers of an order: over each boundary between two ranks, forwards one way and gradients the other."""
    ranks = order.stage_rank
    stages = len(ranks)
    crosses = [ranks[stage] != ranks[stage + 1] for stage in range(stages - 1)]
    first, last = (_NONE, _NONE), (_NONE, _NONE)

    def over(kind: int) -> list[tuple[int, int]]:
        return [(kind, boundary) if there else (_NONE, _NONE) for boundary, there in enumerate(crosses)]

    none = ((_NONE, _NONE),) * stages
    gradients_in, gradients_out = (*over(RECV_BACKWARD), last), (first, *over(SEND_BACKWARD))
    before, after = [none] * 4, [none] * 4
    before[FORWARD], after[FORWARD] = (first, *over(RECV_FORWARD)), (*over(SEND_FORWARD), last)
    for kind in (BACKWARD, INPUT_GRAD):
        before[kind], after[kind] = gradients_in, gradients_out
    return Transfers(tuple(before), tuple(after))


def _steps(table: tuple[_Row, ...], slot: Slot) -> Steps:
    if len(slot) > 1:
        return sum((_steps(table, (action,)) for action in slot), ())
    ((kind, stage, microbatch),) = slot
    transfer, boundary = table[kind][stage]
    return () if transfer < 0 else ((transfer, boundary, microbatch),)
