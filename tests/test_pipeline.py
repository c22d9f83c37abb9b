"""Pipeline orders and their simulation: against independent numbers, by hand, and as laws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.errors import InputError
from stepgraph.passes.pipeline.orders import (
    BACKWARD,
    FORWARD,
    RECV_BACKWARD,
    RECV_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    Order,
    call_name,
    one_f_one_b,
)
from stepgraph.passes.pipeline.simulation import PipelineRun, simulate

ROWS = json.loads((Path(__file__).parent / "data" / "schedules_1f1b.json").read_text())["rows"]
Row: TypeAlias = dict[str, Any]


class Case(NamedTuple):
    """A pipeline with its own time for every stage and boundary."""

    microbatches: int
    forward_s: list[float]
    backward_s: list[float]
    down_s: list[float]
    up_s: list[float]

    def run(self, more: int = 0, events: bool = False) -> PipelineRun:
        order = one_f_one_b(len(self.forward_s), self.microbatches + more)
        return simulate(order, self.forward_s, self.backward_s, self.down_s, self.up_s, events=events)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    stages = draw(st.integers(1, 6))
    times = st.floats(0, 10, allow_subnormal=False)

    def many(count: int) -> list[float]:
        return draw(st.lists(times, min_size=count, max_size=count))

    return Case(draw(st.integers(1, 12)), many(stages), many(stages), many(stages - 1), many(stages - 1))


def uniform(stages: int, microbatches: int, forward: float, backward: float, transfer: float = 0.0) -> Case:
    boundaries = [transfer] * (stages - 1)
    return Case(microbatches, [forward] * stages, [backward] * stages, boundaries, boundaries)


def test_there_are_66_rows_to_compare_with() -> None:
    assert len(ROWS) == 66


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"P{row['P']}-n{row['n']}-b{row['tb']}-c{row['p2p']}")
def test_equals_the_independent_simulation(row: Row) -> None:
    stages, microbatches = int(row["P"]), int(row["n"])
    run = uniform(stages, microbatches, row["tf"], row["tb"], row["p2p"]).run()
    assert run.makespan_s == pytest.approx(row["makespan"], rel=1e-9)
    peaks = [rank.peak_microbatches for rank in run.ranks]
    assert [peaks[0], max(peaks), peaks[-1]] == row["peak_acts"]
    if "bubble_over_ideal" in row:
        ideal = microbatches * (row["tf"] + row["tb"])
        assert run.makespan_s / ideal - 1 == pytest.approx(row["bubble_over_ideal"], abs=5.1e-7)  # 6 decimals


def test_unequal_stages_by_hand() -> None:
    """Two stages, two micro-batches. Forward 1 and 3, backward 2 and 4; down 0.5, up 0.25.

    rank 0                                     rank 1
    F0  0 - 1                                  posts recv F0 at 0
    send F0 posted at 1, runs 1 - 1.5          recv F0 0 - 1.5: waits 1, transfers 0.5
    F1  1.5 - 2.5                              F0  1.5 - 4.5;  B0  4.5 - 8.5
    send F1 + recv B0 posted at 2.5            send B0 + recv F1 posted at 8.5
      F1 runs 8.5 - 9, B0 runs 8.5 - 8.75: together 0.5, and F1 ends last
      wait 8.5 - 2.5 = 6 (a send)                wait 0
    B0  9 - 11                                 F1  9 - 12;  B1  12 - 16
    recv B1 posted at 11, runs 16 - 16.25      send B1 16 - 16.25
      wait 5 (a receive)
    B1  16.25 - 18.25
    """
    run = Case(2, [1, 3], [2, 4], [0.5], [0.25]).run(events=True)
    first, last = run.ranks
    assert run.makespan_s == 18.25
    assert first.compute_s == 2 * (1 + 2)
    assert first.transfer_s == 0.5 + 0.5 + 0.25
    assert (first.wait_send_s, first.wait_recv_s, first.longest_wait_s) == (6, 5, 6)
    assert first.end_s == 6 + 1.25 + 11
    assert last.compute_s == 2 * (3 + 4)
    assert last.transfer_s == 0.5 + 0.5 + 0.25
    assert (last.wait_send_s, last.wait_recv_s, last.end_s) == (0, 1, 16.25)
    assert (first.peak_microbatches, last.peak_microbatches) == (2, 1)
    batched = [event for event in run.events if event.name == "send_forward_recv_backward"]
    assert [(e.rank, e.microbatch, e.start_s, e.end_s, e.wait_s) for e in batched] == [(0, 1, 2.5, 9, 6)]


def test_transfers_of_one_call_that_do_not_overlap_leave_a_gap_of_waiting() -> None:
    """Rank 1 batches a receive from rank 0 (posted at 1) with one from rank 2 (posted at 5), each taking 1.

    Spans 1 - 2 and 5 - 6 in a call posted at 0: transfer 1 + 1 = 2, wait 1 + 3 = 4, for the receive that ended last.
    """
    order: Order = (
        (((FORWARD, 0, 0),), ((SEND_FORWARD, 0, 0),)),
        (((RECV_FORWARD, 0, 0), (RECV_BACKWARD, 1, 0)),),
        (((BACKWARD, 2, 0),), ((SEND_BACKWARD, 1, 0),)),
    )
    middle = simulate(order, [1, 0, 0], [0, 0, 5], [1, 1], [1, 1]).ranks[1]
    assert (middle.end_s, middle.transfer_s, middle.wait_s, middle.wait_recv_s) == (6, 2, 4, 4)


def test_the_order_of_a_small_pipeline_reads_as_published() -> None:
    first, last = one_f_one_b(2, 2)
    assert [call_name(call) for call in first] == [
        *("forward", "send_forward"),
        *("forward", "send_forward_recv_backward", "backward"),
        *("recv_backward", "backward"),
    ]
    assert [call_name(call) for call in last] == [
        *("recv_forward", "forward", "backward", "send_backward_recv_forward"),
        *("forward", "backward", "send_backward"),
    ]


def test_one_stage_only_computes() -> None:
    assert [call_name(call) for call in one_f_one_b(1, 2)[0]] == ["forward", "backward"] * 2


@given(stages=st.integers(1, 7), microbatches=st.integers(1, 12))
def test_an_order_does_everything_once_and_nothing_before_its_input(stages: int, microbatches: int) -> None:
    for stage, calls in enumerate(one_f_one_b(stages, microbatches)):
        at = {action: index for index, call in enumerate(calls) for action in call}
        inner, outer = min(stage, 1), min(stages - 1 - stage, 1)  # neighbours before and after
        assert len(at) == sum(len(call) for call in calls) == microbatches * (2 + 2 * inner + 2 * outer)
        for i in range(microbatches):
            forward, backward = at[FORWARD, stage, i], at[BACKWARD, stage, i]
            assert at.get((RECV_FORWARD, stage - 1, i), -1) < forward < backward
            assert backward < at.get((SEND_BACKWARD, stage - 1, i), len(calls))
            assert forward < at.get((SEND_FORWARD, stage, i), len(calls))
            assert at.get((RECV_BACKWARD, stage, i), -1) < backward


@given(cases())
def test_each_rank_accounts_for_all_its_time(case: Case) -> None:
    run = case.run(events=True)
    for index, rank in enumerate(run.ranks):
        busy = case.microbatches * (case.forward_s[index] + case.backward_s[index])
        assert rank.compute_s == pytest.approx(busy, abs=1e-9)
        assert rank.compute_s + rank.transfer_s + rank.wait_s == pytest.approx(rank.end_s, abs=1e-9)
        assert rank.wait_send_s + rank.wait_recv_s == pytest.approx(rank.wait_s, abs=1e-9)
        assert 0 <= rank.longest_wait_s <= rank.wait_s + 1e-9
        events = [event for event in run.events if event.rank == index]
        starts, ends = [event.start_s for event in events], [event.end_s for event in events]
        assert starts == [0, *ends[:-1]]
        assert ends[-1] == rank.end_s
    assert run.makespan_s == max(rank.end_s for rank in run.ranks)


@given(cases())
def test_no_pipeline_is_faster_than_its_busiest_stage_or_its_first_microbatch(case: Case) -> None:
    makespan = case.run().makespan_s
    stages = zip(case.forward_s, case.backward_s, strict=True)
    assert makespan >= max(case.microbatches * (forward + backward) for forward, backward in stages) - 1e-9
    assert makespan >= sum(case.forward_s + case.down_s + case.backward_s + case.up_s) - 1e-9


@given(cases())
def test_one_more_microbatch_never_ends_earlier(case: Case) -> None:
    assert case.run(more=1).makespan_s >= case.run().makespan_s - 1e-9


@given(st.integers(1, 8), st.integers(1, 20), st.floats(0.1, 9), st.floats(0.1, 9))
def test_equal_stages_with_free_transfers_follow_the_closed_form(p: int, n: int, tf: float, tb: float) -> None:
    run = uniform(p, n, tf, tb).run()
    assert run.makespan_s == pytest.approx((n + p - 1) * (tf + tb))
    assert [rank.peak_microbatches for rank in run.ranks] == [min(p - stage, n) for stage in range(p)]
    assert run.events == ()


def test_a_deadlock_names_each_rank_and_what_it_waits_for() -> None:
    order: Order = (
        (((RECV_BACKWARD, 0, 0),), ((SEND_FORWARD, 0, 0),)),
        (((RECV_FORWARD, 0, 0),), ((SEND_BACKWARD, 0, 0),)),
    )
    with pytest.raises(ValueError, match="rank 0, call 0: recv_backward of micro-batch 0 over boundary 0") as caught:
        simulate(order, [1, 1], [1, 1], [0], [0])
    message = str(caught.value)
    assert "waits for rank 1 to post send_backward, but rank 1 is in its call 0" in message
    assert "rank 1, call 0: recv_forward of micro-batch 0 over boundary 0" in message
    assert "waits for rank 0 to post send_forward" in message


def test_a_transfer_without_another_side_is_a_deadlock() -> None:
    order: Order = ((((SEND_FORWARD, 0, 3),),), (((FORWARD, 1, 3),),))
    with pytest.raises(InputError, match="micro-batch 3 over boundary 0 waits for a recv_forward that no rank posts"):
        simulate(order, [1, 1], [1, 1], [0], [0])


def test_all_that_is_wrong_with_the_times_is_said_at_once() -> None:
    with pytest.raises(InputError) as caught:
        simulate(one_f_one_b(2, 1), [1, -1], [1], [0, 0], [float("nan")])
    assert [problem.where for problem in caught.value.problems] == [
        *("forward_s[1]", "backward_s", "transfer_forward_s", "transfer_backward_s[0]")
    ]


@pytest.mark.parametrize("call", [(), ((FORWARD, 2, 0),), ((FORWARD, 0, 0), (BACKWARD, 0, 0)), ((SEND_FORWARD, 1, 0),)])
def test_a_call_that_cannot_run_is_refused(call: tuple[tuple[int, int, int], ...]) -> None:
    with pytest.raises(InputError, match=r"rank 0, call 1: .*one computation or a batch of transfers"):
        simulate(((((FORWARD, 0, 0),), call), ()), [1, 1], [1, 1], [0], [0])


def test_an_order_needs_ranks_that_share_the_stages() -> None:
    with pytest.raises(InputError, match="3 entries; expected a multiple of the 2 ranks"):
        simulate(one_f_one_b(2, 1), [1] * 3, [1] * 3, [0] * 2, [0] * 2)
    with pytest.raises(InputError, match="no ranks"):
        simulate((), [1], [1], [], [])


def test_counts_below_one_are_refused_together() -> None:
    with pytest.raises(InputError) as caught:
        one_f_one_b(0, -1)
    assert [problem.where for problem in caught.value.problems] == ["stages", "microbatches"]
