"""Pipeline simulation by hand: what starts when, what is accounted to what, and what is refused."""

from __future__ import annotations

import pytest

from pipelines import order, run_calls
from stepgraph.errors import InputError
from stepgraph.passes.pipeline.accounts import PipelineRun
from stepgraph.passes.pipeline.calls import calls_of
from stepgraph.passes.pipeline.jitter import jittered
from stepgraph.passes.pipeline.modes import ASYNC, BLOCKING, OVERLAP, Mode, joint, parse_mode
from stepgraph.passes.pipeline.schedules import schedule_of
from stepgraph.passes.pipeline.simulation import simulate, simulate_schedule
from stepgraph.passes.pipeline.steps import (
    RECV_BACKWARD,
    RECV_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    Program,
    call_name,
)
from stepgraph.passes.pipeline.timing import Timing, uniform

FORWARD, BACKWARD = 0, 1
UNEQUAL = Timing([1, 3], [2, 4], [0.5], [0.25])
TWO = schedule_of("1f1b").order(2, 1, 2)


def names(name: str, ranks: int, chunks: int, microbatches: int, mode: Mode) -> list[list[str]]:
    """The calls of every rank in words."""
    order = schedule_of(name).order(ranks, chunks, microbatches)
    return [[call_name(call) for call in calls] for calls in calls_of(order, uniform(ranks * chunks, 1, 1), mode)]


def started(run: PipelineRun, rank: int) -> list[tuple[str, float, float]]:
    """The computations of a rank."""
    events = [event for event in run.events if event.rank == rank and event.kind == "compute"]
    return [(f"{event.stage}{event.name[0]}{event.microbatch}", event.start_s, event.end_s) for event in events]


def test_blocking_by_hand() -> None:
    """Two stages, two micro-batches. Forward 1 and 3, backward 2 and 4; down 0.5, up 0.25.

    rank 0                                     rank 1
    F0  0 - 1                                  posts recv F0 at 0
    send F0 posted at 1, runs 1 - 1.5          recv F0 0 - 1.5: waits 1, transfers 0.5
    F1  1.5 - 2.5                              F0  1.5 - 4.5;  B0  4.5 - 8.5
    send F1 + recv B0 posted at 2.5            send B0 + recv F1 posted at 8.5
      F1 runs 8.5 - 9, B0 runs 8.5 - 8.75: together 0.5, and F1 ends last
      wait 8.5 - 2.5 = 6 (a send)                wait 0 (a send too)
    B0  9 - 11                                 F1  9 - 12;  B1  12 - 16
    recv B1 posted at 11, runs 16 - 16.25      send B1 16 - 16.25
      wait 5 (a receive)
    B1  16.25 - 18.25
    """
    run = simulate(TWO, UNEQUAL, BLOCKING, events=True)
    first, last = run.ranks
    assert run.makespan_s == 18.25
    assert first.compute_s == 2 * (1 + 2)
    assert (first.transfer_send_s, first.transfer_recv_s, first.transfer_s) == (0.5 + 0.5, 0.25, 1.25)
    assert (first.wait_send_s, first.wait_recv_s, first.longest_wait_s) == (6, 5, 6)
    assert (first.longest_send_s, first.longest_recv_s) == (6 + 0.5, 5 + 0.25)
    assert (first.send_s, first.recv_s) == (7, 5.25)
    assert (first.end_s, first.idle_s) == (6 + 1.25 + 11, 0)
    assert last.compute_s == 2 * (3 + 4)
    assert (last.transfer_send_s, last.transfer_recv_s) == (0.5 + 0.25, 0.5)
    assert (last.wait_send_s, last.wait_recv_s, last.end_s, last.idle_s) == (0, 1, 16.25, 2)
    assert (first.peak_microbatches, last.peak_microbatches) == (2, 1)
    assert (run.first_forward_s, run.last_backward_s) == ((0, 1.5), (18.25, 16))
    batched = [event for event in run.events if event.name == "send_forward_recv_backward"]
    assert [(e.rank, e.kind, e.microbatch, e.start_s, e.end_s, e.wait_s) for e in batched] == [
        (0, "send", 1, 2.5, 9, 6)
    ]


def test_async_by_hand() -> None:
    """The same pipeline when nothing blocks: sends leave at once, and each input is awaited where it is needed.

    rank 0                                     rank 1
    F0  0 - 1,  F1  1 - 2                      F0 arrives at 1.5: waits 0 - 1, transfer 1 - 1.5
                                               F0  1.5 - 4.5,  B0  4.5 - 8.5
    B0 arrives at 8.75: waits 2 - 8.5          F1 is there since 2.5: F1  8.5 - 11.5,  B1  11.5 - 15.5
    B0  8.75 - 10.75
    B1 arrives at 15.75: waits 10.75 - 15.5
    B1  15.75 - 17.75
    """
    run = simulate(TWO, UNEQUAL, events=True)
    first, last = run.ranks
    assert run.makespan_s == 17.75
    assert started(run, 0) == [("0f0", 0, 1), ("0f1", 1, 2), ("0b0", 8.75, 10.75), ("0b1", 15.75, 17.75)]
    assert started(run, 1) == [("1f0", 1.5, 4.5), ("1b0", 4.5, 8.5), ("1f1", 8.5, 11.5), ("1b1", 11.5, 15.5)]
    assert (first.wait_recv_s, first.transfer_recv_s) == (6.5 + 4.75, 0.25 + 0.25)
    assert (last.wait_recv_s, last.transfer_recv_s) == (1, 0.5)
    assert first.send_s == last.send_s == first.longest_send_s == 0
    assert (first.longest_recv_s, first.longest_wait_s) == (6.75, 6.5)
    assert (first.compute_s, last.compute_s, last.idle_s) == (6, 14, 2.25)
    assert (run.first_forward_s, run.last_backward_s) == ((0, 1.5), (17.75, 15.5))
    waits = [(e.name, e.kind, e.start_s, e.end_s, e.wait_s) for e in run.events if e.rank == 0 and e.kind != "compute"]
    assert waits == [("recv_backward", "recv", 2, 8.75, 6.5), ("recv_backward", "recv", 10.75, 15.75, 4.75)]


def test_a_link_carries_one_tensor_at_a_time() -> None:
    """Forwards end at 1 and 2, a hop takes 3: the first arrives at 4, the second leaves at 4 and arrives at 7."""
    run = simulate(order((0, 1), "0F0 0F1", "1F0 1F1"), Timing([1, 1], [0, 0], [3], [0]), events=True)
    assert started(run, 1) == [("1f0", 4, 5), ("1f1", 7, 8)]
    assert (run.ranks[1].wait_s, run.ranks[1].transfer_s) == (1, 3 + 2)


def test_both_directions_of_a_boundary_run_at_once() -> None:
    """F1 goes down from 2 to 12 while B0 comes up from 3 to 13."""
    both = order((0, 1), "0F0 0F1 0B0", "1F0 1B0 1F1")
    run = simulate(both, Timing([1, 1], [1, 1], [10], [10]), events=True)
    # F0: 0 - 1 on rank 0, arrives at 11; F1 leaves at 11 and arrives at 21; B0 ends at 13 and arrives at 23
    assert started(run, 1) == [("1f0", 11, 12), ("1b0", 12, 13), ("1f1", 21, 22)]
    assert started(run, 0)[-1] == ("0b0", 23, 24)


def test_a_turn_inside_one_rank_costs_nothing() -> None:
    """ZB-V comes back on the rank where it turns: stages 1 and 2 of two ranks are both on rank 1."""
    down_and_up = order((0, 1, 1, 0), "0F0 3F0", "1F0 2F0")
    run = simulate(down_and_up, Timing([1] * 4, [1] * 4, [1, 100, 1], [1, 100, 1]))
    assert run.makespan_s == 1 + 1 + 1 + 1 + 1 + 1  # four forwards, two hops


def test_a_pair_by_hand() -> None:
    """Rank 0 runs F1 and B0 in one slot; forward 1 and 1, backward 2 and 2, hops free.

    In turn: F1 1 - 2 leaves at 2; B0 needs 1B0 (ends at 4): 4 - 6. As one op of 0.5 (1 + 2): 4 - 5.5, and F1 leaves
    then. Given as 5 seconds: 4 - 9.
    """
    pair = order((0, 1), "0F0 0F1+0B0 0B1", "1F0 1B0 1F1 1B1")
    timing = Timing([1, 1], [2, 2], [0], [0])
    in_turn, half = simulate(pair, timing, events=True), simulate(pair, timing, joint(0.5), events=True)
    given = simulate(pair, Timing([1, 1], [2, 2], [0], [0], pair_s={(0, 0): 5}), events=True)
    assert started(in_turn, 0) == [("0f0", 0, 1), ("0f1", 1, 2), ("0b0", 4, 6), ("0b1", 7, 9)]
    assert started(half, 0)[1:] == [("0f1", 4, 5.5), ("0b1", 8.5, 10.5)]
    assert started(given, 0)[1:] == [("0f1", 4, 9), ("0b1", 12, 14)]
    assert [event.name for event in half.events if event.kind == "compute"][1] == "forward_backward"
    assert in_turn.ranks[0].peak_microbatches == half.ranks[0].peak_microbatches == 2


def test_a_pair_in_blocking_calls_receives_before_and_sends_after() -> None:
    """Rank 0: F0 0 - 1, call until 4 (B0 of rank 1), F1 4 - 5, B0 5 - 7, then F1 is sent."""
    pair = order((0, 1), "0F0 0F1+0B0 0B1", "1F0 1B0 1F1 1B1")
    run = simulate(pair, Timing([1, 1], [2, 2], [0], [0]), BLOCKING, events=True)
    assert started(run, 0)[1:3] == [("0f1", 4, 5), ("0b0", 5, 7)]
    assert started(run, 1)[2] == ("1f1", 7, 8)


@pytest.mark.parametrize("mode", [ASYNC, BLOCKING])
def test_parameters_hold_the_first_forward_only(mode: Mode) -> None:
    """Rank 1's first forward takes 0.5 more and cannot start before 4; its input is there at 1."""
    timing = Timing([1, 1], [1, 1], [0], [0], first_extra_s=[0, 0.5], first_not_before_s=[0, 4])
    run = simulate(TWO, timing, mode, events=True)
    assert started(run, 1)[:3] == [("1f0", 4, 5.5), ("1b0", 5.5, 6.5), ("1f1", 6.5, 7.5)]
    assert run.first_forward_s == (0, 4)
    assert (run.ranks[1].wait_recv_s, run.ranks[1].compute_s) == (4, 0.5 + 2 + 2)


def test_transfers_of_one_call_that_do_not_overlap_leave_a_gap_of_waiting() -> None:
    """Rank 1 batches a receive from rank 0 (posted at 1) with one from rank 2 (posted at 5), each taking 1.

    Spans 1 - 2 and 5 - 6 in a call posted at 0: transfer 1 + 1 = 2, wait 1 + 3 = 4, for the receive that ended last.
    """
    programs: list[Program] = [
        (((FORWARD, 0, 0),), ((SEND_FORWARD, 0, 0),)),
        (((RECV_FORWARD, 0, 0), (RECV_BACKWARD, 1, 0)),),
        (((BACKWARD, 2, 0),), ((SEND_BACKWARD, 1, 0),)),
    ]
    middle = run_calls(programs, Timing([1, 0, 0], [0, 0, 5], [1, 1], [1, 1])).ranks[1]
    assert (middle.end_s, middle.transfer_s, middle.wait_s, middle.wait_recv_s) == (6, 2, 4, 4)


def test_one_f_one_b_makes_the_calls_of_megatron() -> None:
    assert names("1f1b", 2, 1, 2, BLOCKING) == [
        [
            *("forward", "send_forward"),
            *("forward", "send_forward_recv_backward", "backward"),
            *("recv_backward", "backward"),
        ],
        [
            *("recv_forward", "forward", "backward", "send_backward_recv_forward"),
            *("forward", "backward", "send_backward"),
        ],
    ]


def test_a_rank_with_warm_up_only_turns_with_two_calls() -> None:
    """Three stages, one micro-batch: only the last rank has a steady turn."""
    first, middle, _ = names("1f1b", 3, 1, 1, BLOCKING)
    assert first == ["forward", "send_forward", "recv_backward", "backward"]
    assert middle[1:-1] == ["forward", "send_forward", "recv_backward", "backward"]


def test_one_stage_only_computes() -> None:
    assert names("1f1b", 1, 1, 2, BLOCKING) == [["forward", "backward"] * 2]


def test_the_interleaved_schedule_makes_one_call_per_turn() -> None:
    """Two ranks of two chunks, four micro-batches: rank 1 warms up with (V - 1) P = 2 forwards, rank 0 with 4."""
    down, both = "send_forward_recv_forward", "send_forward_send_backward_recv_forward_recv_backward"
    rank = names("interleaved", 2, 2, 4, BLOCKING)[1]
    assert rank[:5] == ["recv_forward", "forward", down, "forward", down]
    assert rank[5:8] == ["forward", "backward", "send_backward_recv_forward"]
    assert rank[8:11] == ["forward", "backward", "send_backward_recv_forward_recv_backward"]
    assert rank[11:14] == ["forward", "backward", both]
    assert rank[-3:] == ["send_backward_recv_backward", "backward", "send_backward"]


def test_overlap_posts_and_waits_in_the_steady_state_only() -> None:
    rank = names("interleaved", 2, 2, 8, OVERLAP)[1]
    assert rank[:5] == ["recv_forward", "forward", "send_forward_recv_forward", "forward", "send_forward_recv_forward"]
    turn = ["post_send_forward_post_recv_forward", "wait_send_forward", "wait_recv_backward", "backward"]
    assert " ".join(turn) in " ".join(rank)
    assert rank[-3:] == ["send_backward_recv_backward", "backward", "send_backward"]


@pytest.mark.parametrize("microbatches", [3, 6, 10, 15])
@pytest.mark.parametrize("mode", [BLOCKING, OVERLAP])
def test_groups_larger_and_smaller_than_the_ring_do_not_lock(microbatches: int, mode: Mode) -> None:
    """With 4 ranks, 10 micro-batches go in two groups of 5, 6 in one group, 3 are fewer than ranks."""
    run = simulate_schedule(schedule_of("interleaved"), 4, 2, microbatches, uniform(8, 1, 2, 0.1, chunks=2), mode)
    assert run.makespan_s > microbatches * 3


def test_an_async_deadlock_names_each_rank_and_what_it_waits_for() -> None:
    """Rank 0 wants its gradient before it lets micro-batch 1 go; rank 1 wants micro-batch 1 first."""
    locked = order((0, 1), "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    with pytest.raises(InputError) as caught:
        simulate(locked, UNEQUAL)
    assert [str(problem) for problem in caught.value.problems] == [
        "rank 0, computation 2: 0B0 waits for 1B0, but rank 1 is at its computation 2 [pipeline-deadlock]",
        "rank 1, computation 2: 1F1 waits for 0F1, but rank 0 is at its computation 2 [pipeline-deadlock]",
    ]


def test_an_input_that_nobody_makes_is_a_deadlock() -> None:
    with pytest.raises(InputError, match="1F1 waits for 0F1, which no rank runs"):
        simulate(order((0, 1), "0F0", "1F0 1F1"), UNEQUAL)
    with pytest.raises(InputError, match="1B0 waits for 1F0, which no rank runs"):
        simulate(order((0, 1), "0F0", "1B0"), UNEQUAL)


def test_a_deadlock_of_calls_names_each_rank_and_what_it_waits_for() -> None:
    programs: list[Program] = [
        (((RECV_BACKWARD, 0, 0),), ((SEND_FORWARD, 0, 0),)),
        (((RECV_FORWARD, 0, 0),), ((SEND_BACKWARD, 0, 0),)),
    ]
    with pytest.raises(ValueError, match="rank 0, call 1: recv_backward of micro-batch 0 over boundary 0") as caught:
        run_calls(programs, UNEQUAL)
    message = str(caught.value)
    assert "waits for rank 1 to post send_backward, but rank 1 is in its call 1" in message
    assert "rank 1, call 1: recv_forward of micro-batch 0 over boundary 0" in message
    assert "waits for rank 0 to post send_forward" in message


def test_a_transfer_without_another_side_is_a_deadlock() -> None:
    with pytest.raises(InputError, match="micro-batch 0 over boundary 0 waits for a recv_forward that no rank posts"):
        run_calls([(((SEND_FORWARD, 0, 0),),), (((FORWARD, 1, 0),),)], UNEQUAL)


def test_an_order_that_blocking_calls_lock_says_what_to_do() -> None:
    with pytest.raises(InputError, match="async runs any order whose inputs exist") as caught:
        simulate_schedule(schedule_of("zbv"), 2, 2, 6, uniform(4, 1, 2), BLOCKING)
    assert {problem.code for problem in caught.value.problems} == {"pipeline-deadlock"}


def test_all_that_is_wrong_with_the_times_is_said_at_once() -> None:
    with pytest.raises(InputError) as caught:
        Timing([1, -1], [1], [0, 0], [float("nan")], [2, 2], {(0, 9): -1.0}, first_extra_s=[0])
    assert [problem.where for problem in caught.value.problems] == [
        *("forward_s[1]", "backward_s", "hop_forward_s", "hop_backward_s[0]", "first_extra_s", "weight_s[0]"),
        *("pair_s[(0, 9)]", "pair_s[(0, 9)]"),
    ]
    assert {problem.code for problem in caught.value.problems} == {"pipeline-times"}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("0F0 1F0", "pipeline-slot"),  # another rank's stage
        ("0F0+0F1", "pipeline-slot"),
        ("0F0+0W0", "pipeline-slot"),
        ("0F0 0F0", "pipeline-twice"),
        ("0F0 0B0 0I0", "pipeline-twice"),
        ("0F0 0W0 0I0", "pipeline-twice"),
    ],
)
def test_an_order_that_cannot_run_is_refused(text: str, code: str) -> None:
    with pytest.raises(InputError) as caught:
        simulate(order((0, 1), text, "1F0"), UNEQUAL)
    assert {problem.code for problem in caught.value.problems} == {code}


def test_an_order_needs_ranks_that_share_the_stages() -> None:
    with pytest.raises(InputError, match="times of 3 stages; expected of 2"):
        simulate(TWO, uniform(3, 1, 1))
    with pytest.raises(InputError, match="times of 3 stages; expected of 2"):
        simulate_schedule(schedule_of("1f1b"), 2, 1, 50, uniform(3, 1, 1))
    with pytest.raises(InputError, match="0 ranks that do nothing"):
        simulate(order((0,)), uniform(1, 1, 1))
    with pytest.raises(InputError, match=r"3 stages on the ranks \(0, 1, 0\)"):
        simulate(order((0, 1, 0), "0F0", "1F0"), uniform(3, 1, 1))


def test_a_schedule_refuses_its_shape_before_anything_runs() -> None:
    with pytest.raises(InputError) as caught:
        simulate_schedule(schedule_of("1f1b"), 2, 3, 64, uniform(6, 1, 1))
    assert {problem.code for problem in caught.value.problems} == {"pipeline-chunks"}


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("async", ASYNC),
        ("Blocking", BLOCKING),
        (" overlap ", OVERLAP),
        ("joint:0.8", joint(0.8)),
        ("JOINT:1", joint(1)),
    ],
)
def test_modes_are_read(text: str, mode: Mode) -> None:
    assert parse_mode(text) == mode
    assert parse_mode(str(mode)) == mode


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("blocked", "Did you mean 'blocking'?"),
        ("joint", "Write joint:1 or joint:0.8"),
        ("joint:0", "Write joint:1 or joint:0.8"),
        ("joint:nan", "Write joint:1 or joint:0.8"),
        ("async:2", "Did you mean 'async'?"),
        ("", "Choose one of"),
    ],
)
def test_other_modes_are_refused(text: str, fix: str) -> None:
    with pytest.raises(InputError, match="pipeline-mode") as caught:
        parse_mode(text)
    assert fix in str(caught.value)


def test_overlap_is_refused_where_megatron_has_none() -> None:
    with pytest.raises(InputError, match="the only order whose transfers Megatron-LM overlaps"):
        simulate(TWO, UNEQUAL, OVERLAP)


def test_noise_makes_a_pipeline_slower_and_single_receives_longer() -> None:
    order, timing = schedule_of("1f1b").order(4, 1, 16), uniform(4, 1, 2, 0.01)
    still, noisy = jittered(order, timing, BLOCKING, relative=0, runs=2), jittered(order, timing, BLOCKING)
    exact = simulate(order, timing, BLOCKING)
    assert still.makespan.low_s == still.makespan.high_s == still.makespan.mean_s == pytest.approx(exact.makespan_s)
    assert [rank.mean_s for rank in still.recv] == pytest.approx([rank.recv_s for rank in exact.ranks])
    assert [rank.mean_s for rank in still.send] == pytest.approx([rank.send_s for rank in exact.ranks])
    assert exact.makespan_s < noisy.makespan.low_s < noisy.makespan.mean_s < noisy.makespan.high_s
    assert max(rank.high_s for rank in noisy.longest_recv) > max(rank.longest_recv_s for rank in exact.ranks)
    assert noisy == jittered(order, timing, BLOCKING, seed=0)
    assert noisy != jittered(order, timing, BLOCKING, seed=1)


def test_noise_that_cannot_be_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        jittered(TWO, UNEQUAL, relative=-1, runs=0)
    assert [problem.where for problem in caught.value.problems] == ["relative", "runs"]


@pytest.mark.parametrize("mode", [ASYNC, BLOCKING])
@pytest.mark.parametrize("text", ["1F0 0F0 1B0 0B0", "0F0 1F0 0B0 1B0", "0F0 1B0 1F0 0B0"])
def test_an_action_before_what_it_needs_of_its_own_rank_is_refused(text: str, mode: Mode) -> None:
    with pytest.raises(InputError, match=r"comes before .*, which it needs \[pipeline-turn\]"):
        simulate(order((0, 0), text), UNEQUAL, mode)


@pytest.mark.parametrize(("name", "ranks"), [("dualpipev", 10**12), ("zbv", 3000), ("looped-bfs", 10**6)])
def test_sizes_beyond_reason_are_refused_at_once(name: str, ranks: int) -> None:
    with pytest.raises(InputError, match="pipeline-size"):
        schedule_of(name).order(ranks, 2, 8)
