"""Pipelines to simulate in tests: orders written as text, and schedules with random times."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st

from stepgraph.passes.pipeline.accounts import PipelineRun, account
from stepgraph.passes.pipeline.actions import LETTERS, Order, Slot
from stepgraph.passes.pipeline.durations import durations
from stepgraph.passes.pipeline.modes import ASYNC, BLOCKING, Mode
from stepgraph.passes.pipeline.running import run
from stepgraph.passes.pipeline.schedule import Schedule
from stepgraph.passes.pipeline.schedules import SCHEDULES
from stepgraph.passes.pipeline.simulation import simulate, simulate_schedule
from stepgraph.passes.pipeline.steps import Program
from stepgraph.passes.pipeline.timing import Timing


def slots(text: str) -> tuple[Slot, ...]:
    """`0F0 0F1+0B0`: two slots, the second of two actions."""
    return tuple(
        tuple((LETTERS.index(each[1]), int(each[0]), int(each[2:])) for each in slot.split("+"))
        for slot in text.split()
    )


def order(stage_rank: tuple[int, ...], *ranks: str) -> Order:
    return Order(stage_rank, tuple(slots(text) for text in ranks))


def run_calls(programs: list[Program], timing: Timing, microbatches: int = 1) -> PipelineRun:
    """Run calls that were written by hand, on one stage per rank."""
    count = len(programs)
    empty = Order(tuple(range(count)), ((),) * count)
    return account(empty, run(programs, durations(empty, timing, BLOCKING, microbatches), BLOCKING, microbatches))


class Case(NamedTuple):
    """A schedule in some shape, with a time for every stage and boundary."""

    schedule: Schedule
    ranks: int
    chunks: int
    microbatches: int
    timing: Timing

    def order(self, more: int = 0) -> Order:
        return self.schedule.order(self.ranks, self.chunks, self.microbatches + more)

    def run(self, mode: Mode = ASYNC, more: int = 0, *, events: bool = False) -> PipelineRun:
        """Action by action."""
        return simulate(self.order(more), self.timing, mode, events=events)

    def run_short(self, mode: Mode = ASYNC) -> PipelineRun:
        """By the steady state, where there is one."""
        return simulate_schedule(self.schedule, self.ranks, self.chunks, self.microbatches, self.timing, mode)


def any_time() -> st.SearchStrategy[float]:
    return st.floats(0, 4, allow_subnormal=False)


@st.composite
def timings(draw: st.DrawFn, stages: int, *, free: bool = False) -> Timing:
    def many(count: int) -> list[float]:
        return draw(st.lists(any_time(), min_size=count, max_size=count))

    backward = many(stages)
    weight = [whole * draw(st.sampled_from((0.0, 0.4, 1.0))) for whole in backward]
    hops = ([0.0] * (stages - 1),) * 2 if free else (many(stages - 1), many(stages - 1))
    return Timing(many(stages), backward, *hops, weight)


@st.composite
def cases(draw: st.DrawFn, names: tuple[str, ...] = tuple(SCHEDULES), *, free: bool = False, periods: int = 0) -> Case:
    """periods: how many more than the fewest that a steady state needs, at most; 0 for any small number."""
    schedule = SCHEDULES[draw(st.sampled_from(names))]
    ranks, chunks = draw(st.integers(1, 4)), schedule.chunks or draw(st.integers(1, 3))
    if periods:
        period = schedule.period(ranks, chunks)
        microbatches = schedule.settled(ranks, chunks) + period * draw(st.integers(0, periods))
    else:
        takes = [n for n in range(1, 10) if schedule.takes(ranks, chunks, n)]
        microbatches = draw(st.sampled_from(takes))
    return Case(schedule, ranks, chunks, microbatches, draw(timings(ranks * chunks, free=free)))
