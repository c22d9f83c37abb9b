"""Orders of the pipeline schedules: equal to torch's, complete, able to run to their end, and periodic."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.errors import InputError
from stepgraph.ir.pipelines import PIPELINES, stages_on_ranks
from stepgraph.passes.pipeline.actions import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Action,
    Order,
    Slot,
    slot_shown,
)
from stepgraph.passes.pipeline.peaks import peak_activations
from stepgraph.passes.pipeline.repeating import shifted
from stepgraph.passes.pipeline.schedules import SCHEDULES, Schedule, schedule_of

DATA: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "orders.json").read_text())
Row: TypeAlias = dict[str, Any]
ALL = (*SCHEDULES.values(), *filter(None, (schedule.combined for schedule in SCHEDULES.values())))
every_schedule = pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.title)


def combined(name: str) -> Schedule:
    form = schedule_of(name).combined
    assert form is not None
    return form


def order_of(row: Row) -> Order:
    return schedule_of(row["schedule"]).order(row["P"], row["V"], row["n"])


def texts(order: Order) -> list[str]:
    return [" ".join(map(slot_shown, slots)) for slots in order.ranks]


def test_every_schedule_is_compared_with_torch() -> None:
    assert {row["schedule"] for row in DATA["orders"]} == {row["schedule"] for row in DATA["peaks"]} == set(SCHEDULES)


@pytest.mark.parametrize("row", DATA["orders"], ids=lambda row: row["schedule"])
def test_orders_are_those_of_torch(row: Row) -> None:
    order = order_of(row)
    assert list(order.stage_rank) == row["stage_rank"]
    assert texts(order) == row["ranks"]


def test_peaks_are_those_of_an_independent_simulation() -> None:
    for row in DATA["peaks"]:
        peaks = peak_activations(order_of(row))
        assert [peaks[0], max(peaks), peaks[-1]] == row["peak_acts"], row


def test_a_weight_gradient_holds_what_its_input_gradient_leaves() -> None:
    # two ranks, three micro-batches. Rank 1: F0 I0, F1 I1 W0, F2 I2 W1, W2. It holds 2 from F1 on; I frees nothing
    order = schedule_of("zb-h1").order(2, 1, 3)
    assert texts(order)[1] == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    assert peak_activations(order) == (2, 2)
    # a chunk is half a micro-batch: 0F0, 1F0 (1.0), then 1B0, 0B0
    assert peak_activations(schedule_of("interleaved").order(1, 2, 1)) == (1,)
    # a pair holds both: F0, then (F1 B0)
    assert peak_activations(combined("1f1b").order(1, 1, 4)) == (2,)
    assert peak_activations(schedule_of("1f1b").order(1, 1, 4)) == (1,)


def test_small_orders_by_hand() -> None:
    assert texts(schedule_of("1f1b").order(2, 1, 3)) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    assert texts(schedule_of("1f1b").order(3, 1, 1)) == ["0F0 0B0", "1F0 1B0", "2F0 2B0"]  # fewer than ranks
    assert texts(schedule_of("gpipe").order(1, 1, 2)) == ["0F0 0F1 0B0 0B1"]
    assert texts(schedule_of("looped-bfs").order(1, 2, 2)) == ["0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0"]
    # one rank, two chunks: groups of one; (V - 1) 1 = 1 warm-up forward
    assert texts(schedule_of("interleaved").order(1, 2, 2)) == ["0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1"]


def test_groups_hold_more_where_pp_does_not_divide() -> None:
    # 10 micro-batches on 4 ranks: 10 // 4 = 2 groups of 5, so chunk 0 takes 0 to 4 before chunk 1 does
    last = texts(schedule_of("interleaved").order(4, 2, 10))[3]
    assert last.startswith("3F0 3F1 3F2 3F3 3F4 7F0 7B0 7F1 7B1")


def test_combined_1f1b_is_the_schedule_without_a_pipeline() -> None:
    pairs = "(0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B (0F3;0B2)OVERLAP_F_B"
    assert texts(combined("1f1b").order(1, 1, 4)) == [f"0F0 {pairs} 0B3"]
    assert texts(combined("1f1b").order(1, 1, 1)) == ["0F0 0B0"]


@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("chunks", range(2, 5))
def test_combined_warms_up_with_one_forward_more(ranks: int, chunks: int) -> None:
    microbatches = 4 * ranks
    plain = schedule_of("interleaved").order(ranks, chunks, microbatches)
    joined = combined("interleaved").order(ranks, chunks, microbatches)
    for rank in range(ranks):
        warm = (chunks - 1) * ranks + 2 * (ranks - 1 - rank)
        assert _singles(joined.ranks[rank]) == warm + 1
        assert _of_kind(plain.ranks[rank], FORWARD) == _of_kind(joined.ranks[rank], FORWARD)
        assert _of_kind(plain.ranks[rank], BACKWARD) == _of_kind(joined.ranks[rank], BACKWARD)


def _singles(slots: tuple[Slot, ...]) -> int:
    """Slots before the first pair."""
    return next(index for index, slot in enumerate(slots) if len(slot) == 2)


def _of_kind(slots: tuple[Slot, ...], kind: int) -> list[Action]:
    return [action for slot in slots for action in slot if action[0] == kind]


@st.composite
def orders(draw: st.DrawFn) -> tuple[Schedule, Order, int]:
    """A schedule with any shape that it takes, its order and its number of micro-batches."""
    schedule = draw(st.sampled_from(ALL))
    ranks = draw(st.integers(1, schedule.most_ranks or 8))
    chunks = schedule.chunks or draw(st.integers(schedule.fewest_chunks, 4))
    microbatches = draw(st.sampled_from([n for n in range(1, 41) if schedule.takes(ranks, chunks, n)]))
    return schedule, schedule.order(ranks, chunks, microbatches), microbatches


@given(orders())
def test_every_stage_takes_every_microbatch_once(made: tuple[Schedule, Order, int]) -> None:
    schedule, order, microbatches = made
    actions = [action for slots in order.ranks for slot in slots for action in slot]
    stages = range(len(order.stage_rank))
    every = [(stage, which) for stage in stages for which in range(microbatches)]
    assert len(actions) == len(set(actions))
    assert sorted(action[1:] for action in actions if action[0] == FORWARD) == every
    assert sorted(action[1:] for action in actions if action[0] in (BACKWARD, INPUT_GRAD)) == every
    parts = [sorted(action[1:] for action in actions if action[0] == kind) for kind in (INPUT_GRAD, WEIGHT_GRAD)]
    assert parts[0] == parts[1]
    assert bool(parts[0]) == schedule.splits_backward


@given(orders())
def test_stages_run_where_their_shape_puts_them(made: tuple[Schedule, Order, int]) -> None:
    schedule, order, _ = made
    ranks = len(order.ranks)
    assert order.stage_rank == stages_on_ranks(ranks, order.chunks, v_shaped=schedule.shape == "v")
    for rank, slots in enumerate(order.ranks):
        assert {order.stage_rank[stage] for slot in slots for _, stage, _ in slot} == {rank}


@given(orders())
def test_every_order_runs_to_its_end(made: tuple[Schedule, Order, int]) -> None:
    assert _left_over(made[1]) == 0


def test_the_walk_finds_an_order_that_waits_for_itself() -> None:
    # rank 0 wants the gradient of micro-batch 0 before it sends micro-batch 0 on
    stuck = Order((0, 1), ((((BACKWARD, 0, 0),), ((FORWARD, 0, 0),)), (((FORWARD, 1, 0),), ((BACKWARD, 1, 0),))))
    assert _left_over(stuck) == 4
    # rank 1 pairs the forward of micro-batch 1 with the backward that rank 0 needs before it sends 1
    down, up = ((FORWARD, 0, 0),), ((BACKWARD, 0, 0),)
    first = (down, up, ((FORWARD, 0, 1),), ((BACKWARD, 0, 1),))
    paired = (((FORWARD, 1, 0),), ((FORWARD, 1, 1), (BACKWARD, 1, 0)), ((BACKWARD, 1, 1),))
    assert _left_over(Order((0, 1), (first, paired))) == 5


def _left_over(order: Order) -> int:
    """Slots that never find their inputs; both actions of a slot need theirs at its start and are done at its end."""
    done: set[Action] = set()
    waiting = [list(reversed(slots)) for slots in order.ranks]
    last = len(order.stage_rank) - 1
    ahead = True
    while ahead:
        ahead = False
        for slots in waiting:
            while slots and all(any(need <= done for need in _needs(action, last)) for action in slots[-1]):
                done.update(slots.pop())
                ahead = True
    return sum(map(len, waiting))


def _needs(action: Action, last: int) -> Iterator[set[Action]]:
    """What an action waits for: any one of these sets."""
    kind, stage, which = action
    if kind == FORWARD:
        yield {(FORWARD, stage - 1, which)} if stage else set()
    elif kind == WEIGHT_GRAD:
        yield {(INPUT_GRAD, stage, which)}
    else:
        own = (FORWARD, stage, which)
        yield from ({own, (above, stage + 1, which)} for above in (BACKWARD, INPUT_GRAD) if stage < last)
        yield from ({own} for _ in range(stage == last))


def shapes(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Up to 8 ranks of up to 4 stages, as far as the schedule takes them."""
    most_chunks = schedule.chunks or 4
    fewest_chunks = schedule.chunks or schedule.fewest_chunks
    for ranks in range(1, (schedule.most_ranks or 8) + 1):
        yield from ((ranks, chunks) for chunks in range(fewest_chunks, most_chunks + 1))


@every_schedule
def test_a_period_more_is_a_period_put_in(schedule: Schedule) -> None:
    """The law of `Repeating`, for three periods from where the order has settled."""
    for ranks, chunks in shapes(schedule) if schedule.repeating else ():
        period, settled = schedule.period(ranks, chunks), schedule.settled(ranks, chunks)
        for microbatches in range(settled, settled + 3 * period, period):
            order = schedule.order(ranks, chunks, microbatches)
            longer = schedule.order(ranks, chunks, microbatches + period)
            turns = schedule.steady(ranks, chunks, microbatches)
            assert schedule.shortest(ranks, chunks, microbatches) == settled
            assert len(turns) == ranks
            for slots, more, (start, length) in zip(order.ranks, longer.ranks, turns, strict=True):
                middle = start + length
                assert shifted(slots[start:middle], period) == list(slots[middle : middle + length])
                assert list(more) == [*slots[:middle], *shifted(slots[start:], period)]


@every_schedule
def test_elsewhere_no_period_is_claimed(schedule: Schedule) -> None:
    for ranks, chunks in shapes(schedule):
        period, settled = schedule.period(ranks, chunks), schedule.settled(ranks, chunks)
        between = [settled - max(period, 1), *range(settled + 1, settled + period)]
        for microbatches in between if schedule.repeating else (8, 64):
            assert schedule.steady(ranks, chunks, microbatches) == ()
            assert schedule.shortest(ranks, chunks, microbatches) == microbatches


def test_orders_settle_early() -> None:
    # 1F1B: P - 1 warm-up forwards and two pairs more
    assert schedule_of("1f1b").settled(8, 1) == 7 + 2
    # interleaved, P = 16, V = 4: 3 x 16 + 2 x 15 = 78 warm-up passes are two periods of 64; two more are 4 x 16
    assert schedule_of("interleaved").settled(16, 4) == 64
    assert schedule_of("interleaved").period(16, 4) == 16
    assert schedule_of("gpipe").period(4, 1) == schedule_of("looped-bfs").settled(4, 2) == 0


def refusal(schedule: Schedule, *shape: int) -> list[str]:
    with pytest.raises(InputError) as refused:
        schedule.order(*shape)
    return [f"{problem.code} {problem.where} {problem.fix}".strip() for problem in refused.value.problems]


def test_shapes_that_a_schedule_does_not_take() -> None:
    assert refusal(schedule_of("1f1b"), 0, 1, -3) == ["pipeline-count pp", "pipeline-count microbatches"]
    assert refusal(schedule_of("gpipe"), 4, 2, 8) == ["pipeline-chunks vpp nearest possible: 1"]
    assert refusal(schedule_of("zbv"), 4, 1, 8) == ["pipeline-chunks vpp nearest possible: 2"]
    assert refusal(combined("interleaved"), 4, 1, 8) == ["pipeline-chunks vpp nearest possible: 2"]
    assert refusal(combined("interleaved"), 4, 2, 10) == [
        "pipeline-microbatches microbatches nearest possible: 8 or 12"
    ]
    assert refusal(combined("1f1b"), 4, 1, 8)[0].startswith("pipeline-ranks pp for a pipeline choose interleaved")
    assert refusal(schedule_of("gpipe"), 1000, 1, 10**6) == [
        "pipeline-size microbatches take fewer ranks or micro-batches"
    ]


@pytest.mark.parametrize(
    ("name", "shape", "near"),
    [
        ("dualpipev", (4, 2, 7), "8"),  # 2 x 4
        ("interleaved", (4, 2, 11), "10 or 12"),  # 11 // 4 = 2 groups: 10 or 12 can be halved
        ("zb-h1", (4, 2, 17), "16 or 20"),  # 17 // 4 = 18 // 4 = 19 // 4 = 4 groups: from 16 on multiples of 4
        ("dualpipev", (4, 3, 7), "8"),  # whatever else is wrong
    ],
)
def test_the_nearest_numbers_of_microbatches_are_said_and_work(
    name: str, shape: tuple[int, int, int], near: str
) -> None:
    ranks, chunks, _ = shape
    fixes = [text for text in refusal(schedule_of(name), *shape) if text.startswith("pipeline-microbatches")]
    assert fixes == [f"pipeline-microbatches microbatches nearest possible: {near}"]
    for number in map(int, re.findall(r"\d+", near)):
        assert schedule_of(name).takes(ranks, chunks, number)


def test_an_unknown_schedule_gets_a_suggestion() -> None:
    assert schedule_of("1F1B").name == "1f1b"
    with pytest.raises(InputError, match=r"unknown schedule 'zb-v'.*Did you mean 'zbv'\? \[pipeline-schedule\]"):
        schedule_of("zb-v")


def test_layouts_and_schedules_agree_on_how_stages_lie() -> None:
    assert PIPELINES.keys() == SCHEDULES.keys()
    for name, schedule in SCHEDULES.items():
        pipeline = PIPELINES[name]
        assert pipeline.v_shaped == (schedule.shape == "v")
        assert pipeline.most_chunks == schedule.chunks
        assert pipeline.least_chunks == schedule.chunks or not schedule.chunks
