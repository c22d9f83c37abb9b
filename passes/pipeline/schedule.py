"""What a schedule is: which shapes it takes, how it writes the order of every rank, and how that order repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, islice
from typing import Final, TypeAlias

import attrs

from stepgraph.errors import InputError, Problem
from stepgraph.ir.pipelines import stages_on_ranks
from stepgraph.passes.pipeline.actions import Order, Slot
from stepgraph.passes.pipeline.repeating import Repeating, Turn

RankSlots: TypeAlias = Callable[[int, int, int, int], Iterable[Slot]]
"""(ranks, chunks, microbatches, rank) -> the slots of that rank."""

MAX_ACTIONS: Final = 3 * 10**6
"""An order of so many takes some ten seconds and a gigabyte to run."""


def _any_number(ranks: int, chunks: int, microbatches: int) -> bool:
    return True


@attrs.frozen
class Schedule:
    """One schedule: a function that writes a rank's slots, and what has to be known to call it.

    shape: how the stages lie on the ranks, "loop" or "v". chunks: stages per rank, 0 where any number from
    `fewest_chunks` on will do. most_ranks: 0 for no limit. splits_backward: whether the gradients of inputs and
    weights are actions of their own. takes: whether (ranks, chunks, microbatches) works; `takes_text` says it in
    words. pairs: whether slots of a forward and a backward occur. combined: the form in which a forward and a backward
    run as one slot, where Megatron-LM has one. blocking: whether its transfers are usually calls that block. aligned:
    whether all ranks begin to reduce the gradients of a chunk together.
    """

    name: str
    title: str
    shape: str
    chunks: int
    splits_backward: bool
    source: str
    rank_slots: RankSlots
    repeating: Repeating | None = None
    fewest_chunks: int = 1
    most_ranks: int = 0
    takes: Callable[[int, int, int], bool] = _any_number
    takes_text: str = "1 or more"
    pairs: bool = False
    combined: Schedule | None = None
    blocking: bool = False
    aligned: bool = False

    def order(self, ranks: int, chunks: int, microbatches: int) -> Order:
        """The order of every rank, for `ranks` ranks of `chunks` stages each and `microbatches` micro-batches.

        Raises: InputError (pipeline-count, pipeline-ranks, pipeline-chunks, pipeline-microbatches, pipeline-size).
        """
        problems = list(self._problems(ranks, chunks, microbatches))
        if problems:
            raise InputError(problems)
        stage_rank = stages_on_ranks(ranks, chunks, v_shaped=self.shape == "v")
        return Order(
            stage_rank, tuple(tuple(self.rank_slots(ranks, chunks, microbatches, rank)) for rank in range(ranks))
        )

    def period(self, ranks: int, chunks: int) -> int:
        """Micro-batches that one period of the steady state takes in; 0 where the order does not repeat itself."""
        return self.repeating.period(ranks, chunks) if self.repeating else 0

    def settled(self, ranks: int, chunks: int) -> int:
        """From how many micro-batches on, in steps of `period`, each step only puts one more period into the order.

        0 where the order does not repeat itself.
        """
        return self.repeating.settled(ranks, chunks) if self.repeating else 0

    def steady(self, ranks: int, chunks: int, microbatches: int) -> tuple[Turn, ...]:
        """Per rank where the steady state of order(microbatches) begins and how many slots one period has.

        Empty unless microbatches = settled + k period, k >= 0. What then holds is said by `Repeating`.
        """
        repeating = self._repeating_at(ranks, chunks, microbatches)
        return tuple(repeating.turn(ranks, chunks, rank) for rank in range(ranks)) if repeating else ()

    def shortest(self, ranks: int, chunks: int, microbatches: int) -> int:
        """The fewest micro-batches whose order becomes that of `microbatches` by putting in whole periods.

        `microbatches` itself where no period can be left out.
        """
        return self.settled(ranks, chunks) if self._repeating_at(ranks, chunks, microbatches) else microbatches

    def _repeating_at(self, ranks: int, chunks: int, microbatches: int) -> Repeating | None:
        """How the order repeats, where microbatches = settled + k period."""
        if self.repeating is None or min(ranks, chunks) < 1:
            return None
        more = microbatches - self.settled(ranks, chunks)
        return self.repeating if more >= 0 and more % self.period(ranks, chunks) == 0 else None

    def _problems(self, ranks: int, chunks: int, microbatches: int) -> Iterator[Problem]:
        counts = (("pp", ranks), ("vpp", chunks), ("microbatches", microbatches))
        low = [Problem("pipeline-count", name, f"{number}", "1 or more") for name, number in counts if number < 1]
        if low:
            yield from low
            return
        yield from self._shape_problems(ranks, chunks)
        yield from self._number_problems(ranks, chunks, microbatches)

    def _shape_problems(self, ranks: int, chunks: int) -> Iterator[Problem]:
        if self.most_ranks and ranks > self.most_ranks:
            what = f"{self.title} runs on {self.most_ranks} rank, not on {ranks}"
            fix = "for a pipeline choose interleaved with 2 or more stages per rank"
            yield Problem("pipeline-ranks", "pp", what, f"{self.most_ranks}", fix)
        fewest = self.chunks or self.fewest_chunks
        if chunks < fewest or (self.chunks and chunks > fewest):
            what = f"{self.title} with {chunks} stage{'s' * (chunks > 1)} per rank"
            expected = f"{fewest}" if self.chunks else f"{fewest} or more"
            yield Problem("pipeline-chunks", "vpp", what, expected, f"nearest possible: {fewest}")

    def _number_problems(self, ranks: int, chunks: int, microbatches: int) -> Iterator[Problem]:
        actions = ranks * chunks * max(microbatches, ranks) * (3 if self.splits_backward else 2)
        if actions > MAX_ACTIONS:
            what, fix = f"an order of {actions:.0e} actions", "take fewer ranks or micro-batches"
            yield Problem("pipeline-size", "microbatches", what, f"at most {MAX_ACTIONS:.0e}", fix)
        elif not self.takes(ranks, chunks, microbatches):
            what = f"{self.title} with pp = {ranks} cannot take {microbatches} micro-batches"
            near = " or ".join(str(number) for number in self.nearest(ranks, chunks, microbatches))
            yield Problem("pipeline-microbatches", "microbatches", what, self.takes_text, f"nearest possible: {near}")

    def nearest(self, ranks: int, chunks: int, microbatches: int) -> Iterator[int]:
        """The next numbers of micro-batches that work: below, where there is one, and above."""
        below = (number for number in range(microbatches - 1, 0, -1) if self.takes(ranks, chunks, number))
        above = (number for number in count(microbatches + 1) if self.takes(ranks, chunks, number))
        return chain(islice(below, 1), islice(above, 1))
