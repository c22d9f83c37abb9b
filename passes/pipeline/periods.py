"""Where the periods of a steady state lie in the programs of the ranks, and how far back they look."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import attrs

from stepgraph.passes.pipeline.actions import FORWARD, Order, Slot
from stepgraph.passes.pipeline.repeating import Turn
from stepgraph.passes.pipeline.steps import AWAIT, HOLD, Program, is_transfer
from stepgraph.passes.pipeline.trace import Trace


@attrs.frozen
class RankPeriods:
    """The periods of one rank: bounds are the calls of its program at which they begin, the last being the cut."""

    bounds: tuple[int, ...]

    @property
    def length(self) -> int:
        """Calls in the last period before the cut."""
        return self.bounds[-1] - self.bounds[-2]

    def window(self, periods: int) -> range:
        """The calls of the last periods before the cut."""
        return range(self.bounds[-1 - periods], self.bounds[-1])

    def regular(self, periods: int) -> bool:
        """Whether the last periods before the cut all have as many calls."""
        return all(after - before == self.length for before, after in pairwise(self.bounds[-1 - periods :]))


@attrs.frozen
class Periods:
    """The periods of all ranks. microbatches: of one period. whole: periods before the cut on each rank.

    reach: how many periods what follows the cut looks back. begun: micro-batches made before the cut of what each link
    carries, in the order of `Trace.arrivals`.
    """

    ranks: tuple[RankPeriods, ...]
    microbatches: int
    whole: int
    reach: int
    begun: tuple[int, ...]


def periods_of(order: Order, trace: Trace, turns: Sequence[Turn], microbatches: int, whole: int) -> Periods:
    """Find the first `whole` periods of every rank; the cut comes after them.

    microbatches: of one period.
    """
    ranks: list[RankPeriods] = []
    begun: dict[tuple[bool, int], int] = {}
    for slots, rank, (start, length) in zip(order.ranks, trace.ranks, turns, strict=True):
        cut = start + whole * length
        ranks.append(RankPeriods(_bounds(rank.program, slots, range(start, cut + 1, length))))
        begun |= {(kind == FORWARD, stage): 0 for kind, stage, _ in chain.from_iterable(slots[start : start + length])}
        for kind, stage, which in chain.from_iterable(slots[cut - length : cut]):
            begun[kind == FORWARD, stage] = max(begun[kind == FORWARD, stage], which + 1)
    stages = len(order.stage_rank)
    forward, backward = ([begun[way, stage] for stage in range(stages)] for way in (True, False))
    path = [*forward, *reversed(backward)]
    most = max(abs(before - after) for before, after in pairwise(path))
    return Periods(tuple(ranks), microbatches, whole, 1 + -(-most // microbatches), (*forward[:-1], *backward[1:]))


def _bounds(program: Program, slots: Sequence[Slot], starts: range) -> tuple[int, ...]:
    """The calls that begin the slots `starts`. Only computations are in both an order and its program."""
    computed = [index for index, call in enumerate(program) if _computes(call[0][0])]
    before = [0, *accumulate(len(slot) for slot in slots)]  # actions before each slot
    return tuple(computed[before[start]] for start in starts)


def _computes(kind: int) -> bool:
    return not is_transfer(kind) and kind not in (HOLD, AWAIT)
