"""The pipeline schedules by name: which shapes each takes, the order that it makes, and how that order repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, islice
from types import MappingProxyType
from typing import Final, TypeAlias

import attrs

from stepgraph.errors import InputError, Problem, did_you_mean, refuse
from stepgraph.passes.pipeline.actions import Order, Slot, looped, v_shaped
from stepgraph.passes.pipeline.breadthfirst import gpipe, looped_bfs
from stepgraph.passes.pipeline.onefoneb import (
    COMBINED_REPEATS,
    INTERLEAVED_REPEATS,
    ONE_F_ONE_B_REPEATS,
    combined_interleaved,
    combined_one_f_one_b,
    group_size,
    interleaved,
    one_f_one_b,
)
from stepgraph.passes.pipeline.repeating import Repeating, Turn
from stepgraph.passes.pipeline.vshaped import DUALPIPEV_REPEATS, ZBV_REPEATS, dualpipev, zbv
from stepgraph.passes.pipeline.zerobubble import ZB_H1_REPEATS, zb_h1

RankSlots: TypeAlias = Callable[[int, int, int, int], Iterable[Slot]]
"""(ranks, chunks, microbatches, rank) -> the slots of that rank."""


def _any_number(ranks: int, chunks: int, microbatches: int) -> bool:
    return True


def _equal_groups(ranks: int, chunks: int, microbatches: int) -> bool:
    return group_size(ranks, chunks, microbatches) > 0


def _two_per_rank(ranks: int, chunks: int, microbatches: int) -> bool:
    return microbatches >= 2 * ranks


@attrs.frozen
class Schedule:
    """One schedule: a function that writes a rank's slots, and what has to be known to call it.

    shape: how the stages lie on the ranks, "loop" or "v". chunks: stages per rank, 0 where any number from
    `fewest_chunks` on will do. most_ranks: 0 for no limit. splits_backward: whether the gradients of inputs and
    weights are actions of their own. takes: whether (ranks, chunks, microbatches) works; `takes_text` says it in
    words. combined: the form in which a forward and a backward run as one slot, where Megatron-LM has one.
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
    combined: Schedule | None = None

    def order(self, ranks: int, chunks: int, microbatches: int) -> Order:
        """The order of every rank, for `ranks` ranks of `chunks` stages each and `microbatches` micro-batches.

        Raises: InputError (pipeline-count, pipeline-ranks, pipeline-chunks, pipeline-microbatches).
        """
        problems = list(self._problems(ranks, chunks, microbatches))
        if problems:
            raise InputError(problems)
        stage_rank = v_shaped(ranks) if self.shape == "v" else looped(ranks, chunks)
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
        if not self._repeats(ranks, chunks, microbatches):
            return ()
        assert self.repeating
        return tuple(self.repeating.turn(ranks, chunks, rank) for rank in range(ranks))

    def shortest(self, ranks: int, chunks: int, microbatches: int) -> int:
        """The fewest micro-batches whose order becomes that of `microbatches` by putting in whole periods.

        `microbatches` itself where no period can be left out.
        """
        return self.settled(ranks, chunks) if self._repeats(ranks, chunks, microbatches) else microbatches

    def _repeats(self, ranks: int, chunks: int, microbatches: int) -> bool:
        more = microbatches - self.settled(ranks, chunks)
        return self.repeating is not None and more >= 0 and more % self.period(ranks, chunks) == 0

    def _problems(self, ranks: int, chunks: int, microbatches: int) -> Iterator[Problem]:
        counts = (("pp", ranks), ("vpp", chunks), ("microbatches", microbatches))
        low = [Problem("pipeline-count", name, f"{number}", "1 or more") for name, number in counts if number < 1]
        if low:
            yield from low
            return
        yield from self._shape_problems(ranks, chunks)
        if not self.takes(ranks, chunks, microbatches):
            what = f"{self.name} with pp = {ranks} cannot share out {microbatches} micro-batches"
            near = " or ".join(str(number) for number in self._nearest(ranks, chunks, microbatches))
            yield Problem("pipeline-microbatches", "microbatches", what, self.takes_text, f"nearest possible: {near}")

    def _shape_problems(self, ranks: int, chunks: int) -> Iterator[Problem]:
        if self.most_ranks and ranks > self.most_ranks:
            what = f"{self.title} is defined for {self.most_ranks} rank, not {ranks}"
            yield Problem("pipeline-ranks", "pp", what, f"{self.most_ranks}", "choose interleaved for a pipeline")
        fewest = self.chunks or self.fewest_chunks
        if chunks < fewest or (self.chunks and chunks > fewest):
            what = f"{self.title} with {chunks} stage{'s' * (chunks > 1)} per rank"
            expected = f"{fewest}" if self.chunks else f"{fewest} or more"
            yield Problem("pipeline-chunks", "vpp", what, expected, f"nearest possible: {fewest}")

    def _nearest(self, ranks: int, chunks: int, microbatches: int) -> Iterator[int]:
        """The next numbers of micro-batches that work: below, where there is one, and above."""
        below = (number for number in range(microbatches - 1, 0, -1) if self.takes(ranks, chunks, number))
        above = (number for number in count(microbatches + 1) if self.takes(ranks, chunks, number))
        return chain(islice(below, 1), islice(above, 1))


_TORCH = "pytorch/pytorch torch/distributed/pipelining/schedules.py"
_MEGATRON = "NVIDIA/Megatron-LM megatron/core/pipeline_parallel"
_ZERO_BUBBLE = "Qi et al. 2023, Zero Bubble Pipeline Parallelism"
_GROUPS = "a multiple of pp, fewer than pp, or max(1, n // pp) equal groups"

_ALL: Final = (
    Schedule(
        "gpipe",
        "GPipe",
        "loop",
        chunks=1,
        splits_backward=False,
        source="Huang et al. 2019, GPipe",
        rank_slots=gpipe,
    ),
    Schedule(
        "1f1b",
        "1F1B",
        "loop",
        chunks=1,
        splits_backward=False,
        source=f"Narayanan et al. 2021, section 2.2; {_MEGATRON}/schedules.py",
        rank_slots=one_f_one_b,
        repeating=ONE_F_ONE_B_REPEATS,
        combined=Schedule(
            "1f1b",
            "combined 1F1B",
            "loop",
            chunks=1,
            splits_backward=False,
            source=f"{_MEGATRON}/combined_1f1b.py",
            rank_slots=combined_one_f_one_b,
            repeating=COMBINED_REPEATS,
            most_ranks=1,
        ),
    ),
    Schedule(
        "interleaved",
        "interleaved 1F1B",
        "loop",
        chunks=0,
        splits_backward=False,
        source=f"Narayanan et al. 2021, section 2.2; {_MEGATRON}/schedules.py; {_TORCH} (ScheduleInterleaved1F1B)",
        rank_slots=interleaved,
        repeating=INTERLEAVED_REPEATS,
        takes=_equal_groups,
        takes_text=_GROUPS,
        combined=Schedule(
            "interleaved",
            "combined interleaved 1F1B",
            "loop",
            chunks=0,
            splits_backward=False,
            source=f"{_MEGATRON}/combined_1f1b.py",
            rank_slots=combined_interleaved,
            repeating=COMBINED_REPEATS,
            fewest_chunks=2,
            takes=_equal_groups,
            takes_text=_GROUPS,
        ),
    ),
    Schedule(
        "zb-h1",
        "ZB-H1",
        "loop",
        chunks=0,
        splits_backward=True,
        source=f"{_ZERO_BUBBLE}, section 2.3; {_TORCH} (ScheduleInterleavedZeroBubble)",
        rank_slots=zb_h1,
        repeating=ZB_H1_REPEATS,
        takes=_equal_groups,
        takes_text=_GROUPS,
    ),
    Schedule(
        "zbv",
        "ZB-V",
        "v",
        chunks=2,
        splits_backward=True,
        source=f"{_ZERO_BUBBLE}, section 6; {_TORCH} (ScheduleZBVZeroBubble)",
        rank_slots=zbv,
        repeating=ZBV_REPEATS,
    ),
    Schedule(
        "dualpipev",
        "DualPipeV",
        "v",
        chunks=2,
        splits_backward=True,
        source=f"deepseek-ai/DualPipe dualpipe/dualpipev.py; {_TORCH} (ScheduleDualPipeV)",
        rank_slots=dualpipev,
        repeating=DUALPIPEV_REPEATS,
        takes=_two_per_rank,
        takes_text="2 pp or more",
    ),
    Schedule(
        "looped-bfs",
        "looped breadth-first",
        "loop",
        chunks=0,
        splits_backward=False,
        source=f"Lamy-Poirier 2023, Breadth-First Pipeline Parallelism; {_TORCH} (ScheduleLoopedBFS)",
        rank_slots=looped_bfs,
    ),
)

SCHEDULES: Final = MappingProxyType({schedule.name: schedule for schedule in _ALL})
"""Every schedule by its name."""


def schedule_of(name: str) -> Schedule:
    """The schedule of that name, in any case.

    Raises: InputError (pipeline-schedule) with a suggestion.
    """
    schedule = SCHEDULES.get(name.lower())
    if schedule is None:
        fix = did_you_mean(name.lower(), SCHEDULES)
        raise refuse("pipeline-schedule", "schedule", f"unknown schedule {name[:40]!r}", " or ".join(SCHEDULES), fix)
    return schedule
