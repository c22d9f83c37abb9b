"""Whole steps under schedules and overlap policies: accounts, bounds, and the closed forms they come to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stepgraph
from stepgraph.errors import InputError
from stepgraph.ir.pipelines import PIPELINES
from stepgraph.ir.verifier import verify_program
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import lower
from stepgraph.lowering.model import Model
from stepgraph.passes.base import setting
from stepgraph.passes.buckets import Buckets
from stepgraph.passes.iteration import CostedStep, cost_step, iterate, time_step
from stepgraph.passes.launch import LAUNCHES
from stepgraph.passes.overlap.streams import schedule
from stepgraph.passes.pipeline.schedules import schedule_of
from stepgraph.passes.stepping.gradsync import Piece, Travel
from stepgraph.passes.stepping.pairs import count_pairs, pair_changes, pair_s
from stepgraph.passes.stepping.parts import Part, StageCost
from stepgraph.passes.stepping.pipelining import Pipelining
from stepgraph.passes.stepping.stagecosts import cost_template, weight_positions
from stepgraph.passes.stepping.stepsync import RankSync, arrivals_s, gather_chains, reduced, syncs_of

H100 = stepgraph.load_target("h100")
DENSE = stepgraph.load_model("llama-3-8b", {"num_hidden_layers": 16})
EXPERTS = stepgraph.load_model("qwen3-30b-a3b", {"num_hidden_layers": 16})

SCHEDULED: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "1f1b": {},
    "interleaved": {"vpp": 2},
    "zb-h1": {},
    "zbv": {},
    "dualpipev": {},
    "looped-bfs": {"vpp": 2},
}


def layout(schedule: str, **more: Any) -> Layout:
    sizes: dict[str, Any] = {"tp": 2, "pp": 4, "dp": 2, "global_batch": 16, "seq": 1024} | SCHEDULED[schedule] | more
    return Layout(schedule=schedule, **sizes)


@cache
def costed(schedule: str, overlap: str) -> CostedStep:
    return cost_step(lower(DENSE, layout(schedule)), setting(H100, overlap=overlap))


def test_every_schedule_is_tried() -> None:
    assert SCHEDULED.keys() == PIPELINES.keys()


@pytest.mark.parametrize("schedule", SCHEDULED)
@pytest.mark.parametrize("overlap", ["none", "megatron", "megatron,tp-comm-overlap"])
def test_buckets_of_every_rank_add_up_to_the_step(schedule: str, overlap: str) -> None:
    found = costed(schedule, overlap).at(8)
    assert len(found.buckets) == 4
    for buckets, hidden in zip(found.buckets, found.hidden, strict=True):
        assert buckets.total == pytest.approx(found.step_s, rel=1e-9)
        assert min(attrs.astuple(buckets)) >= -1e-12
        assert min(attrs.astuple(hidden)) >= -1e-12


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(SCHEDULED)),
    st.lists(
        st.sampled_from(["none", "tp-backward", "overlap-grad-reduce", "megatron", "tp-comm-overlap"]), max_size=2
    ),
    st.sampled_from(LAUNCHES),
    st.sampled_from([0, 1]),
    st.sampled_from([1, 2, 4]),
    st.integers(2, 5),
)
def test_any_step_accounts_for_all_its_time(
    schedule: str, words: list[str], launch: str, zero: int, tp: int, rounds: int
) -> None:
    """Buckets add up on every rank, nothing is negative, what is hidden and exposed is what there is without a policy,
    and no step ends before its busiest rank is done."""
    overlap = "none" if "none" in words or not words else ",".join(dict.fromkeys(words))
    sizes = layout(schedule, tp=tp, zero=zero)
    found, plain = (
        cost_step(lower(DENSE, sizes), setting(H100, launch=launch, overlap=policy)).at(4 * rounds)
        for policy in (overlap, "none")
    )
    for rank, (buckets, hidden) in enumerate(zip(found.buckets, found.hidden, strict=True)):
        assert buckets.total == pytest.approx(found.step_s, rel=1e-9)
        assert min(*attrs.astuple(buckets), *attrs.astuple(hidden)) >= -1e-12
        for name in ("tp", "dp"):
            shown = getattr(buckets, name) + getattr(hidden, name)
            assert shown == pytest.approx(getattr(plain.buckets[rank], name), rel=1e-9)
        assert found.step_s >= buckets.total - buckets.idle - buckets.pp_wait - 1e-12


@pytest.mark.parametrize("schedule", SCHEDULED)
def test_a_step_is_never_below_its_busiest_rank(schedule: str) -> None:
    found = costed(schedule, "none").at(8)
    work = max(8 * cost.micro_batch.time_s + cost.step.time_s for cost in found.ranks)
    assert found.step_s >= work * (1 - 1e-12)


@pytest.mark.parametrize("schedule", SCHEDULED)
def test_communication_is_exposed_or_hidden_and_as_much_as_without_overlap(schedule: str) -> None:
    """What is hidden and what is exposed add up to what a step without overlap exposes."""
    plain, hiding = costed(schedule, "none").at(8), costed(schedule, "megatron").at(8)
    for name in ("tp", "dp"):
        for rank in range(4):
            alone = getattr(plain.buckets[rank], name)
            both = getattr(hiding.buckets[rank], name) + getattr(hiding.hidden[rank], name)
            assert both == pytest.approx(alone, rel=1e-9)
            assert getattr(plain.hidden[rank], name) == 0


def test_zero_bubble_schedules_have_smaller_bubbles() -> None:
    bubbles = {name: costed(name, "none").at(8).bubble_simulated for name in SCHEDULED}
    assert bubbles["zb-h1"] < bubbles["1f1b"]
    assert bubbles["zbv"] < bubbles["zb-h1"]
    assert bubbles["interleaved"] < bubbles["1f1b"]


def test_the_default_transfers_are_those_of_the_framework() -> None:
    modes = {name: str(costed(name, "none").at(8).mode) for name in SCHEDULED}
    assert modes["1f1b"] == modes["gpipe"] == "blocking"
    assert {modes[name] for name in ("interleaved", "zb-h1", "zbv", "dualpipev", "looped-bfs")} == {"async"}


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv", "dualpipev"])
def test_parts_of_backward_that_run_apart_hide_nothing_of_each_other(schedule: str) -> None:
    """With TP overlap dgrad's reduce-scatter has no wgrad to hide under: the input's part is longer than without split."""
    split, whole = (
        costed(schedule, "megatron").stages[1],
        costed("1f1b" if schedule == "zb-h1" else "interleaved", "megatron").stages[1],
    )
    assert split.backward.time_s > whole.backward.time_s
    assert split.weight_s < split.backward.time_s
    assert split.backward.buckets.tp > whole.backward.buckets.tp


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_recomputed_ops_are_no_weight_gradients(recompute: str) -> None:
    step = cost_step(lower(DENSE, attrs.evolve(layout("zb-h1"), recompute=recompute)), setting(H100))
    plain = costed("zb-h1", "none")
    assert step.stages[1].weight_s == pytest.approx(plain.stages[1].weight_s, rel=1e-9)


def test_weight_gradients_are_what_the_leaving_gradient_does_not_need() -> None:
    """A linear's backward is a dgrad and a wgrad of equal FLOPs: about half of a dense layer's backward is weights."""
    stage = costed("zb-h1", "none").stages[1]
    assert 0.25 * stage.backward.time_s < stage.weight_s < 0.55 * stage.backward.time_s
    first, last = costed("zb-h1", "none").stages[0], costed("zb-h1", "none").stages[-1]
    assert first.weight_s > stage.weight_s  # the table's gradient is needed by nobody
    assert last.weight_s > stage.weight_s  # the head has weights of its own


@given(
    n=st.integers(1, 12),
    chunks=st.integers(2, 4),
    ranks=st.integers(1, 4),
    forward=st.floats(1e-3, 1.0),
    backward=st.floats(1e-3, 2.0),
)
def test_interleaving_divides_the_bubble(n: int, chunks: int, ranks: int, forward: float, backward: float) -> None:
    """Equal stages, free transfers, n a multiple of P: n V (f + b) + (P - 1)(f + b), f and b those of a chunk."""
    stages = [StageCost(Part(Buckets(gemm=forward)), Part(Buckets(gemm=backward)), Part(), Part())] * (ranks * chunks)
    free = [0.0] * (len(stages) - 1)
    how = Pipelining("interleaved", tuple(range(ranks)) * chunks)
    found = time_step(stages, n * ranks, free, free, how)
    assert found.step_s == pytest.approx((n * ranks * chunks + ranks - 1) * (forward + backward), rel=1e-9)
    assert found.closed_form_s == pytest.approx(found.step_s, rel=1e-9)


@pytest.mark.parametrize("share", [0.7, 1.0, 1.2])
def test_pairs_that_take_a_share_are_booked_as_such(share: float) -> None:
    """DualPipeV, pairs as one op of share x (f + b): what is saved comes off every bucket of the pair alike."""
    step = cost_step(lower(DENSE, layout("dualpipev")), setting(H100, p2p=f"joint:{share}"))
    found = step.at(8)
    for buckets in found.buckets:
        assert buckets.total == pytest.approx(found.step_s, rel=1e-9)
        assert min(attrs.astuple(buckets)) >= -1e-12
    (pairs, *_) = count_pairs(schedule_of("dualpipev"), 4, 2, 8)
    stages = step.stages
    saved = sum((1 - share) * (stages[i].forward.time_s + stages[j].backward.time_s) * k for (i, j), k in pairs.items())
    compute = 8 * found.ranks[0].micro_batch.time_s - saved
    assert found.pipeline.ranks[0].compute_s == pytest.approx(compute, rel=1e-9)
    plain = costed("dualpipev", "none").at(8)
    if share <= 1:  # what a pair does not show of its collectives is hidden
        assert found.buckets[0].tp + found.hidden[0].tp == pytest.approx(plain.buckets[0].tp, rel=1e-9)


def test_a_joint_mode_is_for_schedules_with_pairs() -> None:
    with pytest.raises(InputError, match="1f1b has none"):
        stepgraph.predict(DENSE, layout("1f1b"), H100, p2p="joint:0.8")
    with pytest.raises(InputError, match="Leave out --p2p-mode"):
        experts(EP, "dualpipev", pp=2, vpp=2, p2p="joint:0.8").at(8)


# Gradients and parameters


def alone(overlap: str, model: Model = DENSE, **more: Any) -> CostedStep:
    sizes: dict[str, Any] = {"dp": 8, "global_batch": 32, "seq": 1024} | more
    chosen = setting(H100, overlap=overlap)
    free = attrs.evolve(chosen, overlap=attrs.evolve(chosen.overlap, contention=False))
    return cost_step(lower(model, Layout(**sizes)), free)


def syncs(step: CostedStep) -> tuple[RankSync, ...]:
    return syncs_of(step.program, step.costed, step.stages, step.setting)


def buckets_of(pieces: Sequence[Piece], travel: Travel) -> list[list[Piece]]:
    """Filled from the end of the model, closed as soon as they are full: in the order in which backward makes them."""
    found: list[list[Piece]] = [[]]
    for piece in reversed([own for own in pieces if own.of_experts is travel.of_experts]):
        if sum(own.elements for own in found[-1]) >= travel.bucket_elements:
            found.append([])
        found[-1].append(piece)
    return found


def seconds_of(bucket: Sequence[Piece], pieces: Sequence[Piece], whole_s: float) -> float:
    return whole_s * sum(own.elements for own in bucket) / sum(own.elements for own in pieces)


def test_gradient_buckets_without_a_pipeline_are_the_closed_form() -> None:
    """E = max_k (sum_{i<=k} b_i + sum_{i>=k} c_i) - sum b_i over the buckets that the last backward makes ready."""
    step = alone("overlap-grad-reduce")
    (sync,) = syncs(step)
    ((pieces,), (travel,)) = sync.chunks, sync.travels
    buckets = buckets_of(pieces, travel)
    seconds = [seconds_of(bucket, pieces, travel.reduce_s) for bucket in buckets]
    ready = [max(own.made_s for own in bucket) for bucket in buckets]
    expected = max(at + sum(seconds[k:]) for k, at in enumerate(ready)) - step.stages[0].backward.time_s
    found = step.at(4)
    assert len(buckets) > 20
    assert found.buckets[0].dp == pytest.approx(expected + sync.gather_s, rel=1e-9)
    assert found.hidden[0].dp == pytest.approx(sync.reduce_s - expected, rel=1e-9)
    assert expected < sync.reduce_s


def test_parameter_gathers_look_one_bucket_ahead() -> None:
    """c_0 + sum of max(0, c_(k+1) - f_k), f_k the forward between the first needs of two buckets."""
    step = alone("overlap-grad-reduce,overlap-param-gather")
    (sync,) = syncs(step)
    ((pieces,), (travel,)) = sync.chunks, sync.travels
    buckets = buckets_of(pieces, travel)[::-1]
    needs = [min(own.needed_s for own in bucket) for bucket in buckets]
    seconds = [seconds_of(bucket, pieces, travel.gather_s) for bucket in buckets]
    exposed = seconds[0] + sum(
        max(0.0, own - (at - before)) for own, (before, at) in zip(seconds[1:], pairwise(needs), strict=True)
    )
    assert len({*needs}) > 10
    assert exposed < sync.gather_s
    reduced_s = alone("overlap-grad-reduce").at(4).step_s
    assert step.at(4).step_s == pytest.approx(reduced_s - sync.gather_s + exposed, rel=1e-9)


def test_each_buffer_has_a_chain_of_its_own() -> None:
    """Two chains: the first bucket of each is waited for, the second of the dense one hides under 5 of compute."""
    tasks = gather_chains([[(0.0, 2.0), (5.0, 3.0)], [(1.0, 1.5)]], 9.0)
    line = schedule(tasks)
    # dense 0 - 2; dense.1 issued at 2, 2 - 5; compute 2 - 3; expert issued at 3, 5 - 6.5; compute 6.5 - 10.5, then 4 more
    assert line.makespan_s == 2 + 1 + (6.5 - 3) + 4 + 4
    assert line.total_exposed_s == line.makespan_s - 9.0


def test_needs_and_gradients_spread_over_the_passes() -> None:
    """Parameters are needed from the start of forward to the head, and made from the head to the end of backward."""
    step = alone("megatron")
    (sync,) = syncs(step)
    (pieces,), (stage,) = sync.chunks, step.stages
    head_s, layer_s = (cost_template(step.costed[name], step.setting).forward.part.time_s for name in ("head", "dense"))
    needs = [own.needed_s for own in pieces]
    assert needs == sorted(needs) and needs[0] == 0
    assert stage.forward.time_s - head_s <= needs[-1] < stage.forward.time_s
    assert max(after - before for before, after in pairwise(needs)) < layer_s
    assert max(own.made_s for own in pieces) == pytest.approx(stage.backward.time_s)
    assert sum(own.elements for own in pieces) == stepgraph.predict(DENSE, Layout(seq=1024), H100).params.total


@pytest.mark.parametrize("overlap", ["megatron", "megatron,tp-comm-overlap"])
def test_the_clock_of_gradients_is_that_of_the_policy(overlap: str) -> None:
    """Under TP overlap backward is shorter; the last gradient is made when it ends, not when it would end without."""
    step = alone(overlap, tp=4, dp=4)
    (sync,) = syncs(step)
    assert max(own.made_s for own in sync.chunks[0]) == pytest.approx(step.stages[0].backward.time_s, rel=1e-9)


def test_a_table_of_both_ends_travels_once() -> None:
    """Tied: embedding and head share a table, whose gradient is complete when the embedding has added its part."""
    tied = stepgraph.load_model("llama-3-8b", {"num_hidden_layers": 16, "tie_word_embeddings": True})
    for more in ({}, {"pp": 4, "schedule": "zbv"}):
        (first, *_) = syncs(alone("megatron", tied, **more))
        tables = [own for pieces in first.chunks for own in pieces if own.table]
        assert len(tables) == 1
        assert first.chunks[0][0] is tables[0]
        assert tables[0].made_s == max(own.made_s for own in first.chunks[0])


def test_gathering_ahead_costs_the_first_buckets_once() -> None:
    """Interleaved ranks issue their gathers at the start of the step. Rank 0 is late by what its first buckets take, the
    others by that and no more, unless all of their chunk takes longer."""
    plain, ahead = costed("interleaved", "overlap-grad-reduce").at(8), costed("interleaved", "megatron").at(8)
    late = [b - a for a, b in zip(plain.pipeline.first_forward_s, ahead.pipeline.first_forward_s, strict=True)]
    step = costed("interleaved", "megatron")
    arrivals = [arrivals_s(sync, plain.pipeline, step.stages)[0] for sync in syncs(step)]
    assert late[0] == pytest.approx(arrivals[0])
    begins = [max(0.0, own - plain.pipeline.first_forward_s[rank]) for rank, own in enumerate(arrivals)]
    assert late[3] == pytest.approx(max(begins))
    assert ahead.step_s < plain.step_s


def test_interleaved_ranks_expose_the_first_chunk() -> None:
    """Chunk 1 is reduced under the backward of chunk 0; chunk 0, which comes last, after it: T_RS / V on rank 0."""
    found, step = costed("interleaved", "overlap-grad-reduce").at(8), costed("interleaved", "overlap-grad-reduce")
    (first, *_) = syncs(step)
    exposed = first.reduce_s - found.changes[0].before_norm.hidden.dp
    assert exposed == pytest.approx(sum(travel.reduce_s for travel in first.shares(0)), rel=1e-9)
    assert first.reduce_s / 2 < exposed < first.reduce_s  # half of the layers, and the embedding


@pytest.mark.parametrize("lag", [1, 100])  # so late that the pipeline has ended before
@pytest.mark.parametrize("times", [1, 30])
def test_interleaved_ranks_reduce_the_later_chunk_together(times: int, lag: int) -> None:
    """Rank r issues chunk 1 r backwards of chunk 0 late, chunk 0 at its end; the link takes one after the other."""
    step = costed("interleaved", "overlap-grad-reduce")
    run = step.at(8).pipeline
    stages = [attrs.evolve(stage, backward=stage.backward * lag) for stage in step.stages]
    for sync in syncs(step):
        slow = attrs.evolve(
            sync, travels=tuple(attrs.evolve(own, reduce_s=own.reduce_s * times) for own in sync.travels)
        )
        early_s, late_s = (sum(own.reduce_s for own in slow.shares(chunk)) for chunk in (0, 1))
        first, second = sync.stages
        end_s = run.last_backward_s[first]
        issued_s = min(run.last_backward_s[second] + sync.rank * stages[first].backward.time_s, end_s)
        free = attrs.evolve(step.setting, overlap=attrs.evolve(step.setting.overlap, contention=False))
        found = reduced(slow, run, stages, free, step.how.order_of())
        expected = max(issued_s + late_s, end_s) + early_s - run.ranks[sync.rank].end_s
        assert found.exposed_s == pytest.approx(expected, rel=1e-9)


def test_a_chunk_is_gathered_while_the_one_before_it_computes() -> None:
    """Three chunks of two buckets, 1 s each: chunk 1 right behind chunk 0, chunk 2 when chunk 1 begins at 10, a rank early.

    Rank 0 needs the second bucket of chunk 0 after 5 s, when it is long there, so it waits for the first one only.
    """
    step = costed("interleaved", "megatron")
    run = attrs.evolve(step.at(8).pipeline, first_forward_s=(10.0,) * 8)
    chunk = (Piece(1, False, 0.0, 0.0), Piece(1, False, 5.0, 0.0))
    stages, travels = (1, 3, 5), (Travel(False, gather_s=6.0),)
    forward_s = step.stages[3].forward.time_s
    arrived = (arrivals_s(RankSync(rank, travels, (chunk,) * 3, stages), run, step.stages) for rank in (0, 1, 2))
    assert next(arrived) == pytest.approx((1.0, 2.0 + 2.0, 10.0 + 2.0))
    assert next(arrived) == pytest.approx((2.0, 2.0 + 2.0, 10.0 - forward_s + 2.0))
    assert next(arrived) == pytest.approx((2.0, 2.0 + 2.0, 10.0 - 2 * forward_s + 2.0))


def test_what_a_rank_waits_for_its_parameters_is_no_wait_for_the_pipeline() -> None:
    """Rank 0 receives nothing before its first forward; what it waits there is its first bucket, and counts as dp."""
    step, found = costed("interleaved", "megatron"), costed("interleaved", "megatron").at(8)
    plain = costed("interleaved", "overlap-grad-reduce").at(8)
    (first, *_) = syncs(step)
    (late_s, *_) = arrivals_s(first, plain.pipeline, step.stages)
    inside = found.changes[0].inside.buckets
    assert inside.dp >= late_s > 0
    assert inside == Buckets(dp=inside.dp, pp_wait=-inside.dp)


def test_transfers_are_on_the_link_or_waited_for() -> None:
    """Sends that never block: of n micro-batches x what the links carry, each rank sees a part."""
    step = costed("interleaved", "none")
    found = step.at(8)
    received_s = step.how.received_s(step.timing)
    for buckets, hidden, own_s in zip(found.buckets, found.hidden, received_s, strict=True):
        assert buckets.pp_transfer + hidden.pp_transfer == pytest.approx(8 * own_s, rel=1e-9)
        assert hidden.pp_transfer > 0


def test_of_a_hidden_collective_the_launch_is_hidden_too() -> None:
    plain, found = (alone(name, tp=4, dp=4).stages[0].backward.buckets for name in ("none", "megatron"))
    assert found.tp < plain.tp
    assert found.launch < plain.launch


def test_weight_gradients_wait_for_their_host_too() -> None:
    """Short sequences: the device waits for nearly every kernel, so weight gradients take what issuing them takes."""
    model = stepgraph.load_model("llama-3-8b", {"num_hidden_layers": 16})
    step = cost_step(lower(model, layout("zbv", seq=64)), setting(H100))
    stage, cost = step.program.stages[2], step.stages[2]
    templates = [step.costed[name] for name in stage.instances]
    kernels = sum(int(own.kernels[weight_positions(own.graph)].sum()) for own in templates)
    assert cost.dry_backward_s > 0
    assert cost.weight_s == pytest.approx(kernels * H100.launch.host_issue_s, rel=1e-9)


def test_without_chunks_later_stages_gather_on_the_way_down() -> None:
    """1F1B: rank r > 0 gathers when its first activation is there, so the step is longer by what all of them take."""
    plain, first = costed("1f1b", "overlap-grad-reduce").at(8), costed("1f1b", "megatron").at(8)
    moved = syncs(costed("1f1b", "megatron"))
    serial_s = sum(sync.gather_s for sync in moved[1:])
    late_s = first.pipeline.first_forward_s[-1] - plain.pipeline.first_forward_s[-1]
    assert late_s == pytest.approx(serial_s - moved[-1].gather_s + first.changes[0].inside.time_s, rel=1e-6)
    prediction = stepgraph.predict(DENSE, layout("1f1b"), H100, overlap="megatron")
    assert [text for text in prediction.warnings if "leave overlap-param-gather out, or use --vpp" in text]
    ahead = stepgraph.predict(DENSE, layout("interleaved"), H100, overlap="megatron")
    assert not [text for text in ahead.warnings if text.startswith("overlap")]


@pytest.mark.parametrize(("first", "warned"), [(8, True), (12, False)])
def test_gathers_on_the_way_down_are_warned_of_where_they_cost_more(first: int, warned: bool) -> None:
    """With most layers on stage 0, whose gathers hide, stage 1 adds less than the gathers after the update would."""
    sizes = Layout(pp=2, dp=4, global_batch=32, seq=1024, first_stage_layers=first)
    warnings = stepgraph.predict(DENSE, sizes, H100, overlap="megatron").warnings
    assert any("leave overlap-param-gather out" in text for text in warnings) is warned


def test_a_policy_that_pairs_nothing_says_so() -> None:
    prediction = stepgraph.predict(EXPERTS, Layout(ep=4, dp=4, global_batch=4, seq=1024), H100, overlap=EP)
    assert [text for text in prediction.warnings if "with 1 micro-batch per step no forward finds" in text]


def test_later_stages_reduce_in_their_bubble() -> None:
    """Rank r ends its last backward before rank 0; what it reduces then costs the step nothing if it fits."""
    plain = costed("1f1b", "none").at(8)
    first = plain.pipeline.ranks[0].end_s
    for run, cost in zip(plain.pipeline.ranks, plain.ranks, strict=True):
        assert plain.step_s >= run.end_s + cost.before_norm.time_s
        assert run.end_s <= first


def test_contention_lengthens_the_backward_that_gradients_travel_beside() -> None:
    sizes = Layout(dp=8, global_batch=32, seq=1024)
    program = lower(DENSE, sizes)
    slowed = iterate(program, setting(H100, overlap="overlap-grad-reduce"))
    free = alone("overlap-grad-reduce").at(4)
    assert slowed.buckets[0].gemm > free.buckets[0].gemm
    assert slowed.buckets[0].dp < free.buckets[0].dp  # the collectives end when they did, so less of them is left
    assert slowed.step_s >= free.step_s


# Experts


@cache
def experts(overlap: str, schedule: str = "1f1b", p2p: str = "auto", **more: Any) -> CostedStep:
    sizes: dict[str, Any] = {"ep": 4, "dp": 4, "global_batch": 32, "seq": 1024} | more
    return cost_step(lower(EXPERTS, Layout(schedule=schedule, **sizes)), setting(H100, overlap=overlap, p2p=p2p))


EP = "overlap-moe-expert-parallel-comm"


def test_without_a_pipeline_all_but_one_micro_batch_is_paired() -> None:
    """F0 (F1 B0) ... B7: n - 1 pairs, so the step is n (f + b) + (n - 1) (pair - f - b) + the step's own part."""
    step = experts(EP)
    found = step.at(8)
    (change,) = pair_changes(step.program, step.costed, step.stages, step.setting).values()
    (cost,) = found.ranks
    expected = 8 * cost.micro_batch.time_s + 7 * change.time_s + cost.step.time_s
    assert found.step_s == pytest.approx(expected, rel=1e-9)
    assert change.time_s < 0
    assert found.hidden[0].ep > 0
    assert found.buckets[0].ep < experts("none").at(8).buckets[0].ep


@pytest.mark.parametrize(("schedule", "more"), [("interleaved", {"vpp": 2}), ("dualpipev", {"vpp": 2})])
def test_pairs_in_a_pipeline(schedule: str, more: dict[str, Any]) -> None:
    paired, plain = experts(EP, schedule, pp=2, **more).at(8), experts("none", schedule, pp=2, **more).at(8)
    assert paired.step_s < plain.step_s
    for buckets in paired.buckets:
        assert buckets.total == pytest.approx(paired.step_s, rel=1e-9)
        assert min(attrs.astuple(buckets)) >= -1e-12


def test_only_layers_meet() -> None:
    """The head is no layer: on the last stage as on any other, each layer of experts hides as much."""
    step = experts(EP, "interleaved", pp=2, vpp=2)
    changes = pair_changes(step.program, step.costed, step.stages, step.setting)
    hidden = {round(change.hidden.ep, 12) for change in changes.values()}
    assert len(hidden) == 1  # 4 layers on every stage, the last included


def test_a_pair_is_no_faster_than_its_host() -> None:
    """Short sequences: the host needs longer to issue both than the device to run them."""
    step = cost_step(
        lower(EXPERTS, Layout(ep=4, dp=4, global_batch=32, seq=128)), setting(H100, overlap=EP, launch="both")
    )
    (pair,) = pair_s(pair_changes(step.program, step.costed, step.stages, step.setting), step.stages).values()
    (stage,) = step.stages
    issue_s = (stage.forward.kernels + stage.backward.kernels) * H100.launch.host_issue_s
    assert stage.dry_s > 0
    assert pair == pytest.approx(issue_s, rel=1e-9)


def test_modules_beyond_the_first_are_refused() -> None:
    model = stepgraph.load_model("deepseek-v3", {"num_hidden_layers": 8, "num_nextn_predict_layers": 2})
    with pytest.raises(InputError, match="with 2 MTP modules"):
        stepgraph.predict(model, Layout(ep=4, dp=4, mtp=2, seq=1024), H100, overlap=EP)
    assert stepgraph.predict(model, Layout(ep=4, dp=4, mtp=1, global_batch=16, seq=1024), H100, overlap=EP)


def test_pairs_of_a_long_step_are_counted_without_writing_it_out() -> None:
    schedule = schedule_of("interleaved").combined
    assert schedule is not None
    for n in (32, 48, 64):
        order = schedule.order(4, 2, n)
        for rank, counted in enumerate(count_pairs(schedule, 4, 2, n)):
            pairs = [slot for slot in order.ranks[rank] if len(slot) == 2]
            assert sum(counted.values()) == len(pairs)
            assert counted[pairs[0][0][1], pairs[0][1][1]] > 0


@pytest.mark.parametrize(
    ("overlap", "fields", "code"),
    [
        ("tp-comm-overlap", {}, "overlap-tp-comm"),
        (EP, {}, "overlap-expert-comm"),
        ("moe-shared-expert-overlap", {}, "overlap-shared-expert"),
        ("overlap-param-gather", {}, "overlap-param-gather"),
        ("megatrn", {}, "overlap"),
    ],
)
def test_policies_that_do_not_fit_are_refused(overlap: str, fields: dict[str, Any], code: str) -> None:
    with pytest.raises(InputError) as refused:
        stepgraph.predict(DENSE, Layout(seq=1024, **fields), H100, overlap=overlap)
    assert {problem.code for problem in refused.value.problems} == {code}


def test_a_schedule_that_pairs_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="schedule interleaved or dualpipev"):
        experts(EP, "looped-bfs", pp=2, vpp=2).at(8)


@pytest.mark.parametrize("mode", ["async", "blocking", "overlap"])
@pytest.mark.parametrize("ranks", [3, 5])
def test_the_fewest_micro_batches_pair_in_every_mode(ranks: int, mode: str) -> None:
    """n = P: some ranks pair nothing, others one; transfers of either are issued."""
    model = stepgraph.load_model("qwen3-30b-a3b", {"num_hidden_layers": 4 * ranks})
    sizes = Layout(ep=2, dp=2, pp=ranks, vpp=2, global_batch=2 * ranks, seq=1024)
    found = cost_step(lower(model, sizes), setting(H100, overlap=EP, p2p=mode)).at(ranks)
    assert [buckets.total for buckets in found.buckets] == pytest.approx([found.step_s] * ranks)


def test_pairs_hide_no_less_than_nothing_where_weight_gradients_run_apart() -> None:
    step = experts(EP, "dualpipev", pp=2, vpp=2, tp=2)
    for hidden in step.at(8).hidden:
        assert min(attrs.astuple(hidden)) >= 0


def test_a_rank_hands_nothing_to_itself() -> None:
    """In a V the last rank has the two middle stages: no send, no recv and no kernels for them in between."""
    program = lower(DENSE, layout("zbv"))
    middle = [[run.template for run in stage.runs] for stage in program.stages[3:5]]
    assert middle == [["recv", "dense"], ["dense", "send"]]
    verify_program(program)


def test_micro_batches_that_a_schedule_does_not_take_are_said_as_a_global_batch() -> None:
    """DualPipeV needs n of 2 P: with dp 2 and micro-batch 1 a global batch of 2 x 2 x 4."""
    with pytest.raises(InputError, match=r"cannot take n = 6 .* Nearest: 16"):
        stepgraph.predict(DENSE, layout("dualpipev", global_batch=12), H100)
    with pytest.raises(InputError, match=r"lock under schedule zbv.*Leave --p2p-mode out"):
        stepgraph.predict(DENSE, layout("zbv"), H100, p2p="blocking")
