"""Whole steps under schedules and overlap policies: accounts, bounds, and the closed forms they come to."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepgraph
from stepgraph.errors import InputError
from stepgraph.ir.pipelines import PIPELINES
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import lower
from stepgraph.passes.base import setting
from stepgraph.passes.buckets import Buckets
from stepgraph.passes.gradsync import gathers, reductions
from stepgraph.passes.iteration import CostedStep, cost_step, iterate, time_step
from stepgraph.passes.pairs import count_pairs, pair_changes
from stepgraph.passes.parts import Part, StageCost
from stepgraph.passes.pipeline.schedules import schedule_of
from stepgraph.passes.pipelining import Pipelining
from stepgraph.passes.stagecosts import cost_template
from stepgraph.passes.stepsync import syncs_of

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


def test_a_joint_mode_is_for_schedules_with_pairs() -> None:
    with pytest.raises(InputError, match="1f1b has none"):
        stepgraph.predict(DENSE, layout("1f1b"), H100, p2p="joint:0.8")
    with pytest.raises(InputError, match="Leave out --p2p-mode"):
        experts(EP, "dualpipev", pp=2, vpp=2, p2p="joint:0.8").at(8)


# Gradients and parameters


def alone(overlap: str, **more: Any) -> CostedStep:
    sizes: dict[str, Any] = {"dp": 8, "global_batch": 32, "seq": 1024} | more
    chosen = setting(H100, overlap=overlap)
    free = attrs.evolve(chosen, overlap=attrs.evolve(chosen.overlap, contention=False))
    return cost_step(lower(DENSE, Layout(**sizes)), free)


def test_gradient_buckets_without_a_pipeline_are_the_closed_form() -> None:
    """E = max_k (sum_{i<=k} b_i + sum_{i>=k} c_i) - sum b_i over the buckets that the last backward makes ready."""
    step = alone("overlap-grad-reduce")
    (sync,) = syncs_of(step.program, step.costed, step.setting)
    calls = [call for travel in sync.travels for call in reductions(sync.chunks[0], travel)]
    backward_s = step.stages[0].backward.time_s
    seconds = [own for _, own in calls]
    expected = max(ready + sum(seconds[k:]) for k, (ready, _) in enumerate(calls)) - backward_s
    found = step.at(4)
    gathered = sync.gather_s
    assert found.buckets[0].dp == pytest.approx(expected + gathered, rel=1e-9)
    assert found.hidden[0].dp == pytest.approx(sync.reduce_s - expected, rel=1e-9)
    assert expected < sync.reduce_s


def test_parameter_gathers_look_one_bucket_ahead() -> None:
    """c_0 + sum of max(0, c_(k+1) - f_k), f_k the forward between the first needs of two buckets."""
    step = alone("overlap-grad-reduce,overlap-param-gather")
    (sync,) = syncs_of(step.program, step.costed, step.setting)
    needs = sorted(call for travel in sync.travels for call in gathers(sync.chunks[0], travel))
    exposed = needs[0][1] + sum(max(0.0, own - (at - before)) for (before, _), (at, own) in pairwise(needs))
    reduced = alone("overlap-grad-reduce").at(4)
    both = step.at(4)
    assert both.step_s == pytest.approx(reduced.step_s - sync.gather_s + exposed, rel=1e-9)


def test_gathers_are_needed_from_the_first_layer_to_the_last() -> None:
    """Needs spread over the forward pass: the first at its start, the last in the head, as many as there are buckets."""
    step = alone("megatron")
    (sync,) = syncs_of(step.program, step.costed, step.setting)
    needs = [at for at, _ in gathers(sync.chunks[0], sync.travels[0])]
    forward_s = step.stages[0].forward.time_s
    head_s = cost_template(step.costed["head"], step.setting).forward.part.time_s
    assert needs == sorted(needs)
    assert needs[0] == 0
    assert forward_s - head_s <= needs[-1] < forward_s
    assert len(needs) == len(list(reductions(sync.chunks[0], sync.travels[0])))
    layers_s = cost_template(step.costed["dense"], step.setting).forward.part.time_s
    assert max(after - before for before, after in pairwise(needs)) <= 2 * layers_s  # no gap of several layers


def test_gathering_ahead_hides_more_and_never_less_than_nothing() -> None:
    """Interleaved ranks issue their gathers at the start of the step: later ranks have arrived when the stream does."""
    plain, ahead = costed("interleaved", "overlap-grad-reduce").at(8), costed("interleaved", "megatron").at(8)
    assert ahead.step_s < plain.step_s
    assert ahead.buckets[-1].dp < plain.buckets[-1].dp


def test_without_chunks_later_stages_gather_on_the_way_down() -> None:
    """1F1B: rank r > 0 gathers when its first activation is there, so the step is longer by what all of them take."""
    plain, first = costed("1f1b", "overlap-grad-reduce").at(8), costed("1f1b", "megatron").at(8)
    syncs = syncs_of(costed("1f1b", "megatron").program, costed("1f1b", "megatron").costed, setting(H100))
    serial_s = sum(sync.gather_s for sync in syncs[1:])
    late_s = first.pipeline.first_forward_s[-1] - plain.pipeline.first_forward_s[-1]
    assert late_s == pytest.approx(serial_s - syncs[-1].gather_s + first.changes[0].inside.time_s, rel=1e-6)
    prediction = stepgraph.predict(DENSE, layout("1f1b"), H100, overlap="megatron")
    assert [text for text in prediction.warnings if "leave overlap-param-gather out, or use --vpp" in text]
    assert not [
        text
        for text in stepgraph.predict(DENSE, layout("interleaved"), H100, overlap="megatron").warnings
        if text.startswith("overlap")
    ]


def test_a_policy_that_pairs_nothing_says_so() -> None:
    prediction = stepgraph.predict(EXPERTS, Layout(ep=4, dp=4, global_batch=4, seq=1024), H100, overlap=EP)
    assert [text for text in prediction.warnings if "with 1 micro-batch per step no forward finds" in text]


def test_buckets_and_elements_are_those_of_the_step_template() -> None:
    step = alone("megatron")
    (sync,) = syncs_of(step.program, step.costed, step.setting)
    params = sum(count for count, _, _ in sync.chunks[0].dense)
    assert params == stepgraph.predict(DENSE, Layout(seq=1024), H100).params.total
    calls = list(reductions(sync.chunks[0], sync.travels[0]))
    assert sum(own for _, own in calls) == pytest.approx(sync.reduce_s)
    assert len(calls) <= sync.travels[0].calls
    assert calls == sorted(calls)
    assert calls[-1][0] <= step.stages[0].backward.time_s * (1 + 1e-12)


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
    (change,) = pair_changes(step.program, step.costed, step.setting).values()
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
