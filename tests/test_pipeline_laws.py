"""Laws of pipeline simulation, for every schedule and any times; and that its shortcut changes nothing."""

from __future__ import annotations

from itertools import pairwise

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import Case, cases
from stepgraph.errors import InputError
from stepgraph.passes.pipeline import steady
from stepgraph.passes.pipeline.accounts import PipelineRun, RankRun
from stepgraph.passes.pipeline.actions import Order
from stepgraph.passes.pipeline.modes import ASYNC, BLOCKING, OVERLAP, Mode, joint
from stepgraph.passes.pipeline.periods import periods_of
from stepgraph.passes.pipeline.running import trace_of
from stepgraph.passes.pipeline.schedules import SCHEDULES, schedule_of
from stepgraph.passes.pipeline.simulation import simulate, simulate_schedule
from stepgraph.passes.pipeline.timing import Timing, uniform
from stepgraph.passes.pipeline.trace import Trace

REPEATING = tuple(name for name, schedule in SCHEDULES.items() if schedule.repeating)
MODES = st.sampled_from((ASYNC, BLOCKING, OVERLAP, joint(0.8)))
TOO_LITTLE = 1e-9


def run_or_none(case: Case, mode: Mode) -> PipelineRun | None:
    """None where blocking calls lock, or overlap is not for the schedule."""
    try:
        return case.run(mode, events=True)
    except InputError as refused:
        assert {problem.code for problem in refused.problems} <= {"pipeline-deadlock", "pipeline-mode"}
        assert mode in (BLOCKING, OVERLAP)
        return None


@given(cases(), MODES)
def test_each_rank_accounts_for_all_its_time(case: Case, mode: Mode) -> None:
    run = run_or_none(case, mode)
    for index, rank in enumerate(run.ranks if run else ()):
        assert rank.compute_s + rank.transfer_s + rank.wait_s == pytest.approx(rank.end_s, abs=TOO_LITTLE)
        assert rank.end_s + rank.idle_s == pytest.approx(run.makespan_s if run else 0)
        for side, longest in ((rank.send_s, rank.longest_send_s), (rank.recv_s, rank.longest_recv_s)):
            assert 0 <= longest <= side + TOO_LITTLE
        assert 0 <= rank.longest_wait_s <= rank.wait_s + TOO_LITTLE
        if not mode.joint:
            timing = case.timing
            own = [stage for stage, owner in enumerate(case.order().stage_rank) if owner == index]
            busy = case.microbatches * sum(timing.forward_s[stage] + timing.backward_s[stage] for stage in own)
            assert rank.compute_s == pytest.approx(busy, abs=TOO_LITTLE)


@given(cases(), MODES)
def test_events_fill_a_rank_from_start_to_end(case: Case, mode: Mode) -> None:
    run = run_or_none(case, mode)
    for index, rank in enumerate(run.ranks if run else ()):
        events = [event for event in (run.events if run else ()) if event.rank == index]
        starts, ends = [event.start_s for event in events], [event.end_s for event in events]
        assert starts == pytest.approx([0, *ends[:-1]], abs=TOO_LITTLE)
        assert ends[-1] == rank.end_s
        waits = sum(event.wait_s for event in events)
        assert waits == pytest.approx(rank.wait_s, abs=TOO_LITTLE)


@given(cases(), MODES)
def test_no_pipeline_is_faster_than_its_parts(case: Case, mode: Mode) -> None:
    """Than the way of one micro-batch down and up, than its busiest rank, than its busiest link."""
    run, timing = run_or_none(case, mode), case.timing
    if run is None:
        return
    stage_rank = case.order().stage_rank
    crossed = [index for index in range(len(stage_rank) - 1) if stage_rank[index] != stage_rank[index + 1]]
    hops = [(timing.hop_forward_s[index], timing.hop_backward_s[index]) for index in crossed]
    upwards = timing.backward_s
    if case.schedule.splits_backward:
        upwards = tuple(b - w for b, w in zip(timing.backward_s, timing.weight_s, strict=True))
    shortest = 0.8 if mode.joint else 1
    path = sum(timing.forward_s) + sum(upwards)
    assert run.makespan_s >= shortest * path + sum(map(sum, hops)) - TOO_LITTLE
    assert run.makespan_s >= max(rank.compute_s for rank in run.ranks) - TOO_LITTLE
    assert run.makespan_s >= case.microbatches * max((max(pair) for pair in hops), default=0) - TOO_LITTLE


@given(cases(), MODES)
def test_one_more_period_never_ends_earlier(case: Case, mode: Mode) -> None:
    """Whole periods only: with chunks, other numbers change the size of all groups, and 8 may end before 7."""
    period = case.schedule.period(case.ranks, case.chunks) or 1
    case = case._replace(microbatches=case.microbatches * period)
    run, longer = run_or_none(case, mode), run_or_none(case._replace(microbatches=case.microbatches + period), mode)
    if run and longer:
        assert longer.makespan_s >= run.makespan_s - TOO_LITTLE


@given(cases(("1f1b", "gpipe")))
def test_more_microbatches_take_no_longer_each_where_calls_block(case: Case) -> None:
    """Not so in async: there 1F1B has up to P micro-batches under way at no cost, and then waits a whole round trip."""
    run, longer = case.run(BLOCKING), case.run(BLOCKING, more=1)
    each, each_longer = run.makespan_s / case.microbatches, longer.makespan_s / (case.microbatches + 1)
    assert each_longer <= each + TOO_LITTLE


@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 24),
    st.floats(0.1, 9),
    st.floats(0.1, 9),
)
def test_more_microbatches_take_no_longer_each_on_equal_stages(
    name: str, p: int, v: int, n: int, f: float, b: float
) -> None:
    """Every schedule, free transfers, half of backward for weights: from one number that it takes to the next.

    Not so everywhere else: with transfers 1F1B may be 0.1 % off, and interleaved up to 10 % where the size of its groups
    changes, because a hop fits under some groups only; ZBV where nearly all of backward is weight gradients.
    """
    schedule = schedule_of(name)
    chunks = schedule.chunks or v
    timing = uniform(p * chunks, f, b, weight_s=b / 2, chunks=chunks)
    each = []
    for microbatches in range(n, n + 2 * p + 1):
        try:
            order = schedule.order(p, chunks, microbatches)
        except InputError:
            continue
        each.append(simulate(order, timing).makespan_s / microbatches)
    assert all(after <= before + TOO_LITTLE for before, after in pairwise(each))


@given(cases(), MODES)
def test_nothing_is_faster_than_transfers_that_never_block(case: Case, mode: Mode) -> None:
    run = run_or_none(case, mode)
    if run and not mode.joint:
        assert run.makespan_s >= case.run(ASYNC).makespan_s - TOO_LITTLE


@given(cases(("1f1b", "gpipe"), free=True))
def test_free_transfers_block_nobody_for_long(case: Case) -> None:
    """1F1B sends as late as its neighbour can take it: blocking costs it transfers, but no further waiting."""
    assert case.run(BLOCKING).makespan_s == pytest.approx(case.run(ASYNC).makespan_s)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 12), st.floats(0.1, 9), st.floats(0.1, 9))
def test_equal_stages_with_free_transfers_follow_the_closed_forms(p: int, v: int, n: int, f: float, b: float) -> None:
    """(n + P - 1)(f + b); interleaved (n + (P - 1) / V)(f + b); ZB-H1 with f = i = w: n (f + b) + (P - 1) (f + i - w)."""
    for name in ("1f1b", "gpipe"):
        run = simulate_schedule(schedule_of(name), p, 1, n, uniform(p, f, b))
        assert run.makespan_s == pytest.approx((n + p - 1) * (f + b))
        assert run.events == ()
    run = simulate_schedule(schedule_of("interleaved"), p, v, n * p, uniform(p * v, f, b, chunks=v))
    assert run.makespan_s == pytest.approx((n * p + (p - 1) / v) * (f + b))
    run = simulate_schedule(schedule_of("zb-h1"), p, 1, p + n, uniform(p, f, 2 * f, weight_s=f))
    assert run.makespan_s == pytest.approx((p + n) * 3 * f + (p - 1) * f)


@given(cases(REPEATING, periods=40), MODES)
@settings(max_examples=60)
def test_the_shortcut_changes_nothing(case: Case, mode: Mode) -> None:
    full = run_or_none(case, mode)
    if full is not None:
        same(case.run_short(mode), full)


@pytest.mark.parametrize("mode", [ASYNC, BLOCKING])
@given(heavier=st.sampled_from((1.0, 1.1, 1.5)), hop=st.sampled_from((0.0, 0.05, 3.0)), stage=st.integers(0, 3))
@settings(max_examples=20)
def test_the_shortcut_with_one_heavier_stage(mode: Mode, heavier: float, hop: float, stage: int) -> None:
    times = [heavier if index == stage else 1.0 for index in range(4)]
    timing = Timing(times, [2 * each for each in times], [hop] * 3, [hop] * 3, first_extra_s=[3, 2, 1, 0])
    case = Case(schedule_of("1f1b"), 4, 1, 200, timing)
    assert steady.shortened(case.schedule, 4, 1, 200, timing, mode) is not None
    same(case.run_short(mode), case.run(mode))


@pytest.mark.parametrize("name", REPEATING)
def test_a_long_step_costs_no_more_than_one_that_has_settled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def counted(order: Order, timing: Timing, mode: Mode, microbatches: int) -> Trace:
        tried.append(microbatches)
        return trace_of(order, timing, mode, microbatches)

    monkeypatch.setattr(steady, "trace_of", counted)
    schedule = schedule_of(name)
    chunks = schedule.chunks or 2
    period, base = schedule.period(4, chunks), schedule.settled(4, chunks)
    timing = uniform(4 * chunks, 1, 2, 0.05, 1, chunks)
    for microbatches in (base + 100 * period, base + 100_000 * period):
        simulate_schedule(schedule, 4, chunks, microbatches, timing)
    half = len(tried) // 2
    assert tried[:half] == tried[half:]
    assert max(tried) < base + 20 * period


def test_a_step_that_does_not_settle_is_run_in_full() -> None:
    """ZB-V has no bubble in its steady state, so that 1 % more on one stage eats into its slack for very long."""
    times = [1.01, *[1.0] * 7]
    timing = Timing(times, [2 * each for each in times], [0.0] * 7, [0.0] * 7, [1.0] * 8)
    case = Case(schedule_of("zbv"), 4, 2, 159, timing)
    assert steady.shortened(case.schedule, 4, 2, 159, timing, ASYNC) is None
    same(case.run_short(), case.run())


def test_a_link_that_falls_behind_unseen_is_no_steady_state() -> None:
    """A hop of 1.001 to a stage that takes 1 per micro-batch, after a hold in which the link has nothing to do.

    For hundreds of micro-batches the tensor is still there in time, each time 0.001 later: the interleaved schedule
    warms up with twice the forwards of 1F1B, so that one waits while the stage is busy.
    """
    times = [0.1, 0.5]
    timing = Timing(times, times, [1.001], [0], first_not_before_s=[0, 20])
    case = Case(schedule_of("interleaved"), 2, 1, 3000, timing)
    full = case.run()
    assert full.makespan_s > 3000 * 1.001
    same(case.run_short(), full)


def test_how_far_a_steady_state_looks_back() -> None:
    """1F1B: at the cut each rank has begun one forward more than the next, and as many backwards: 1 + 1 periods."""
    schedule, timing = schedule_of("1f1b"), uniform(4, 1, 2)
    order = schedule.order(4, 1, 12)
    periods = periods_of(order, trace_of(order, timing, ASYNC, 12), schedule.steady(4, 1, 12), 1, 5)
    assert periods.begun == (5 + 3, 5 + 2, 5 + 1, 5, 5, 5)  # forwards over three boundaries, backwards over three
    assert periods.reach == 1 + 1
    assert [rank.length for rank in periods.ranks] == [2] * 4


def same(short: PipelineRun, full: PipelineRun) -> None:
    """All figures of two runs, to 1e-9 of the makespan."""
    slack = 1e-9 * max(full.makespan_s, 1)
    assert short.makespan_s == pytest.approx(full.makespan_s, abs=slack)
    assert short.last_backward_s == pytest.approx(full.last_backward_s, abs=slack)
    assert short.first_forward_s == pytest.approx(full.first_forward_s, abs=slack)
    for one, other in zip(short.ranks, full.ranks, strict=True):
        for field in attrs.fields(RankRun):
            assert getattr(one, field.name) == pytest.approx(getattr(other, field.name), abs=slack), field.name
