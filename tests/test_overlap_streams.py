"""The stream scheduler: order, waiting, contention, and an account that closes."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from stepgraph.passes.overlap.streams import COMMUNICATORS, COMPUTE, Task, Timeline, schedule

TIMES = st.integers(0, 60).map(lambda n: n / 8)  # eighths: sums are exact


@st.composite
def task_lists(draw: DrawFn) -> list[Task]:
    """Up to 14 tasks on all streams, waiting for any earlier ones."""
    tasks: list[Task] = []
    for index in range(draw(st.integers(0, 14))):
        stream = draw(st.sampled_from((COMPUTE, COMPUTE, "tp", "ep", "dp")))
        waits_for = draw(st.lists(st.integers(0, index - 1), max_size=3, unique=True)) if index else []
        n_sm = 0 if stream == COMPUTE else draw(st.sampled_from((0, 16, 33)))
        tasks.append((stream, draw(TIMES), tuple(waits_for), n_sm))
    return tasks


def busy(timeline: Timeline, tasks: list[Task], stream: str) -> list[tuple[float, float]]:
    return [(timeline.start_s[i], timeline.end_s[i]) for i, task in enumerate(tasks) if task[0] == stream]


@given(task_lists())
def test_without_contention_every_task_starts_as_soon_as_it_can(tasks: list[Task]) -> None:
    timeline = schedule(tasks)
    free: dict[str, float] = {}
    for i, (stream, seconds, waits_for, _) in enumerate(tasks):
        start = max([free.get(stream, 0.0), *(timeline.end_s[j] for j in waits_for)])
        assert (timeline.start_s[i], timeline.end_s[i]) == (start, start + seconds)
        free[stream] = start + seconds
    assert timeline.slowdown_s == 0 and timeline.makespan_s == max(free.values(), default=0)


@given(task_lists(), st.sampled_from((None, 132)))
def test_the_account_closes_and_no_stream_is_faster_than_its_work(tasks: list[Task], sms: int | None) -> None:
    timeline = schedule(tasks, sms)
    parts = timeline.compute_s + timeline.slowdown_s + timeline.total_exposed_s
    assert timeline.makespan_s == pytest.approx(parts, abs=1e-9)
    for stream in (COMPUTE, *COMMUNICATORS):
        assert timeline.makespan_s >= sum(task[1] for task in tasks if task[0] == stream) - 1e-9
    for found in timeline.communicators:
        assert -1e-9 <= found.exposed_s <= found.total_s + 1e-9
        assert found.exposed_s + found.hidden_s == pytest.approx(found.total_s, abs=1e-12)


@given(task_lists())
def test_contention_lengthens_compute_by_what_ran_beside_it_and_nothing_else(tasks: list[Task]) -> None:
    timeline = schedule(tasks, 132)
    for i, (stream, seconds, _, _) in enumerate(tasks):
        took = timeline.end_s[i] - timeline.start_s[i]
        if stream != COMPUTE:
            assert took == pytest.approx(seconds, abs=1e-9)
            continue
        # work done = sum of pieces x rate, the rate being (132 - the largest n_sm beside the piece) / 132
        cuts = sorted({timeline.start_s[i], timeline.end_s[i], *inside(timeline, i)})
        work = sum((b - a) * (132 - taken(timeline, tasks, a, b)) / 132 for a, b in pairwise(cuts))
        assert work == pytest.approx(seconds, abs=1e-9)
        assert timeline.lengthened_s[i] == pytest.approx(took - seconds, abs=1e-9)


def inside(timeline: Timeline, index: int) -> list[float]:
    begin, end = timeline.start_s[index], timeline.end_s[index]
    return [t for t in (*timeline.start_s, *timeline.end_s) if begin < t < end]


def taken(timeline: Timeline, tasks: list[Task], begin: float, end: float) -> int:
    middle = (begin + end) / 2
    beside = (i for i, task in enumerate(tasks) if task[0] != COMPUTE)
    return max((tasks[i][3] for i in beside if timeline.start_s[i] <= middle < timeline.end_s[i]), default=0)


@given(st.lists(st.tuples(st.sampled_from((COMPUTE, *COMMUNICATORS)), st.floats(0, 1)), max_size=30))
def test_when_everything_waits_the_makespan_is_the_plain_sum_to_the_last_bit(ops: list[tuple[str, float]]) -> None:
    tasks: list[Task] = [(stream, seconds, (i - 1,) if i else (), 16) for i, (stream, seconds) in enumerate(ops)]
    timeline = schedule(tasks, 132)
    assert timeline.makespan_s == list(accumulate((seconds for _, seconds in ops), initial=0.0))[-1]
    assert timeline.slowdown_s == 0
    assert all(found.hidden_s == pytest.approx(0, abs=1e-12) for found in timeline.communicators)


@given(st.floats(0.1, 9), st.floats(0.1, 9))
def test_contention_of_one_collective_beside_one_matmul(b: float, c: float) -> None:
    """b of compute beside c of a collective on 16 of 132 SMs: kappa = 132 / 116.

    If c < kappa b: during c, compute does c / kappa; the rest b - c / kappa follows: total c + b - c / kappa
    = b + c (1 - 1 / kappa). Else compute ends first, after kappa b, and c - kappa b is exposed: total c.
    """
    kappa = 132 / 116
    timeline = schedule([("dp", c, (), 16), (COMPUTE, b, (), 0)], 132)
    total = b + c * (1 - 1 / kappa) if c < kappa * b else c
    assert timeline.makespan_s == pytest.approx(total)
    assert timeline.total_exposed_s == pytest.approx(max(0, c - kappa * b), abs=1e-12)
    assert timeline.slowdown_s == pytest.approx(min(c * (1 - 1 / kappa), (kappa - 1) * b))


def test_of_several_collectives_the_one_with_most_multiprocessors_counts() -> None:
    # tp on 16 SMs until 2, dp on 66 until 1: rates 1/2 until 1, 116/132 until 2, then 1
    tasks: list[Task] = [("tp", 2.0, (), 16), ("dp", 1.0, (), 66), (COMPUTE, 2.0, (), 0)]
    timeline = schedule(tasks, 132)
    assert timeline.makespan_s == pytest.approx(2 + (2.0 - 1 / 2 - 116 / 132))
    assert schedule([("tp", 2.0, (), 0), (COMPUTE, 2.0, (), 0)], 132).makespan_s == 2.0  # a copy engine takes none


def test_idle_time_belongs_to_the_collective_on_the_critical_path() -> None:
    # compute waits from 1 to 6: ep runs 1 to 3, then tp (which waits for it) 3 to 6; dp runs beside and holds up nobody
    tasks: list[Task] = [
        (COMPUTE, 1.0, (), 0),
        ("ep", 2.0, (0,), 0),
        ("dp", 4.5, (0,), 0),
        ("tp", 3.0, (1,), 0),
        (COMPUTE, 1.0, (3,), 0),
    ]
    timeline = schedule(tasks)
    assert timeline.exposed_s == (0, 2.0, 0, 3.0, 0)
    assert [(found.name, found.total_s, found.exposed_s) for found in timeline.communicators] == [
        ("tp", 3.0, 3.0),
        ("ep", 2.0, 2.0),
        ("dp", 4.5, 0.0),
    ]


def test_what_runs_after_the_last_computation_is_exposed() -> None:
    timeline = schedule([(COMPUTE, 1.0, (), 0), ("dp", 3.0, (), 0)])
    assert timeline.makespan_s == 3.0 and timeline.total_exposed_s == 2.0


@pytest.mark.parametrize(
    "task",
    [
        (COMPUTE, 1.0, (0,), 0),
        ("tp", -1.0, (), 0),
        ("tp", float("nan"), (), 0),
        ("nvlink", 1.0, (), 0),
        ("tp", 1.0, (), 132),
    ],
)
def test_tasks_that_make_no_sense_are_bugs_of_the_caller(task: Task) -> None:
    with pytest.raises(ValueError, match="task 0"):
        schedule([task], 132)
