"""Policies: what they are called, what contradicts what, and what each exposes in lowered layers, by the closed forms."""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from stepgraph.errors import InputError
from stepgraph.hwtargets import load_target
from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Phase
from stepgraph.ir.program import Program
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import lower
from stepgraph.passes.base import setting
from stepgraph.passes.costing import costs
from stepgraph.passes.overlap.merging import merge_layers
from stepgraph.passes.overlap.plan import steps_of, tasks_of
from stepgraph.passes.overlap.policies import NONE, WORDS, Policy, parse_policy
from stepgraph.passes.overlap.policychecks import check_policy
from stepgraph.passes.overlap.streams import schedule
from stepgraph.passes.overlap.templates import Scheduled, partners_of, schedule_phase
from stepgraph.passes.overlap.work import stream_of, work_of

H100 = setting(load_target("h100"))
MEGATRON, TP_COMM = parse_policy("megatron"), parse_policy("megatron,tp-comm-overlap")
SHARED = parse_policy("moe-shared-expert-overlap")
MERGED = parse_policy("overlap-moe-expert-parallel-comm")


@cache
def program(name: str, layout: Layout) -> Program:
    layers = {"num_hidden_layers": 4} if name == "deepseek-v3" else {}
    return lower(load_model(name, layers), layout)


def llama(layout: Layout = Layout(tp=8)) -> Graph:  # noqa: B008 - frozen
    return program("llama-3-8b", layout)["dense"]


def moe(name: str = "deepseek-v3", tp: int = 1, recompute: str = "none") -> Graph:
    layout = Layout(tp=tp, dp=8, ep=8, global_batch=8, recompute=recompute)
    return program(name, layout)["moe"]


def exposed(graph: Graph, phase: Phase, seconds: dict[str, float], policy: Policy) -> dict[str, float]:
    run = without_contention(graph, phase, seconds, policy)
    return {found.name: found.exposed_s for found in run.communicators}


def without_contention(graph: Graph, phase: Phase, seconds: dict[str, float], policy: Policy) -> Scheduled:
    alone = attrs.evolve(policy, contention=False)
    return schedule_phase(graph, phase, [seconds[op.name] for op in graph.ops], alone, H100)


def some_seconds(data: DataObject, graph: Graph) -> dict[str, float]:
    """Random times of every op, from nothing to a millisecond."""
    count = len(graph.ops)
    times = data.draw(st.lists(st.floats(0, 1e-3), min_size=count, max_size=count))
    return {op.name: time for op, time in zip(graph.ops, times, strict=True)}


def cost_seconds(graph: Graph) -> list[float]:
    found = costs(graph, H100)
    return [float(s) for s in found.time_s + found.kernels * H100.target.launch.gap_s]


# Words


def test_words_become_flags() -> None:
    assert parse_policy("none") == NONE and not NONE.overlaps and NONE.words == ()
    assert MEGATRON.words == ("tp-backward", "overlap-grad-reduce", "overlap-param-gather") and MEGATRON.asked == ()
    assert TP_COMM.words == (*MEGATRON.words, "tp-comm-overlap") and TP_COMM.asked == ("tp-comm-overlap",)
    two = parse_policy(" overlap-grad-reduce, TP-comm-overlap ")
    assert two.words == ("tp-backward", "overlap-grad-reduce", "tp-comm-overlap")  # tp-backward has no flag
    assert two.name == "overlap-grad-reduce,tp-comm-overlap"
    for word in WORDS:
        assert getattr(parse_policy(word.word), word.field) and word.source.count("/") > 2


def test_words_that_do_not_exist_are_refused_together() -> None:
    with pytest.raises(InputError) as refused:
        parse_policy("overlap-grad-reduction,none,megatrom")
    texts = [str(problem) for problem in refused.value.problems]
    assert [problem.code for problem in refused.value.problems] == ["overlap"] * 3
    assert "Did you mean 'overlap-grad-reduce'?" in texts[0] and "Did you mean 'megatron'?" in texts[1]
    assert "'none' beside" in texts[2]
    with pytest.raises(InputError, match="no policy ''"):
        parse_policy("")


def problems(text: str, **changes: object) -> list[str]:
    fitting: dict[str, object] = {
        "tp": 2, "sp": True, "ep": 8, "pp": 4, "schedule": "interleaved", "recompute": "selective", "has_shared_expert": True, "zero": 1
    }  # fmt: skip
    return [problem.code for problem in check_policy(parse_policy(text), **{**fitting, **changes})]  # type: ignore[arg-type]


def test_contradictions_are_refused() -> None:
    later = ("fsdp-prefetch", "cp-ring")
    for word in WORDS:
        fits = word.word not in later
        assert (problems(f"megatron,{word.word}") == []) is fits  # each by itself
    assert problems(",".join(later)) == ["overlap-fsdp", "overlap-ring"]
    assert problems("none", tp=1, sp=False, ep=1, zero=0) == []
    assert problems("megatron", tp=1, sp=False, ep=1, zero=0, has_shared_expert=False) == []  # a set always does
    assert problems("overlap-param-gather") == ["overlap-param-gather"]
    assert problems("overlap-param-gather", zero=0) == ["overlap-param-gather"] * 2
    assert problems("tp-comm-overlap", tp=1, sp=False) == ["overlap-tp-comm"]
    assert problems("tp-comm-overlap", sp=False) == ["overlap-tp-comm"]
    expert = "overlap-moe-expert-parallel-comm"
    assert (
        problems(expert, ep=1)
        == problems(expert, recompute="full")
        == problems(expert, schedule="1f1b")
        == ["overlap-expert-comm"]
    )
    assert problems(expert, pp=1, schedule="1f1b") == problems(expert, schedule="dualpipev") == []
    assert problems(f"{expert},moe-shared-expert-overlap") == ["overlap-expert-comm"]
    assert problems("moe-shared-expert-overlap", has_shared_expert=False) == ["overlap-shared-expert"]
    assert problems("moe-shared-expert-overlap", ep=1) == ["overlap-shared-expert"]
    everything = f"{expert},moe-shared-expert-overlap,tp-comm-overlap,overlap-param-gather"
    bad = {"tp": 1, "ep": 1, "recompute": "full", "schedule": "1f1b", "has_shared_expert": False, "zero": 0}
    assert len(problems(everything, **bad)) == 2 + 1 + 4 + 2


# Without overlap, and what holds for every policy

LAYERS = [
    llama(),
    llama(Layout(tp=8, sp=False)),
    llama(Layout(tp=8, tp_regather=False)),
    llama(Layout(tp=8, recompute="full")),
    llama(Layout(tp=8, recompute="selective")),
    program("llama-3-8b", Layout(tp=8))["head"],
    program("llama-3-8b", Layout(tp=8))["embedding"],
    moe(),
    moe(tp=2),
    moe(tp=2, recompute="full"),
    moe("qwen3-30b-a3b"),
    program("mixtral-8x7b", Layout(tp=4, dp=4, ep=2, etp=4, global_batch=4))["moe"],
    program("deepseek-v3", Layout(tp=2, dp=8, ep=8, global_batch=8, mtp=1))["head"],
]
PHASES = (Phase.FORWARD, Phase.BACKWARD)
IDS = [f"{i}-{graph.name}" for i, graph in enumerate(LAYERS)]


@pytest.mark.parametrize("graph", LAYERS, ids=IDS)
@pytest.mark.parametrize("phase", PHASES)
def test_without_overlap_a_phase_is_the_plain_sum_to_the_last_bit(graph: Graph, phase: Phase) -> None:
    seconds = cost_seconds(graph)
    run = schedule_phase(graph, phase, seconds, NONE, H100)
    own = [s for s, op in zip(seconds, graph.ops, strict=True) if op.phase is phase]
    assert run.seconds == list(accumulate(own, initial=0.0))[-1]
    assert run.slowdown_s == 0 and all(abs(found.hidden_s) < 1e-15 for found in run.communicators)
    for time, op, spent in zip(seconds, graph.ops, run.op_s.tolist(), strict=True):
        assert spent == pytest.approx(time if op.phase is phase else 0, abs=1e-15)


@pytest.mark.parametrize("graph", LAYERS, ids=IDS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    "policy", [MEGATRON, TP_COMM, SHARED, parse_policy("moe-shared-expert-overlap,tp-comm-overlap")]
)
def test_every_policy_runs_every_op_once_after_what_it_reads(graph: Graph, phase: Phase, policy: Policy) -> None:
    seconds = cost_seconds(graph)
    work = work_of(graph, seconds, phase)
    partners = partners_of(graph, work, policy)
    tasks, owners = tasks_of(work, steps_of(work, partners))
    timeline = schedule(tasks, 132)
    took: dict[int, float] = {}
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for i, owner in enumerate(owners):
        took[owner] = took.get(owner, 0.0) + tasks[i][1]
        starts.setdefault(owner, timeline.start_s[i])
        ends[owner] = timeline.end_s[i]
    assert took == pytest.approx({i: seconds[i] for i in work.chosen}, abs=1e-15)
    together = {*partners.rings.items(), *((scatter, matmul) for matmul, scatter in partners.pipelines.items())}
    for i in work.chosen:
        for source in work.sources[i]:
            assert ends[source] <= starts[i] or (i, source) in together
    run = schedule_phase(graph, phase, seconds, policy, H100)
    assert run.op_s.sum() == pytest.approx(run.seconds, rel=1e-12)
    assert run.seconds <= sum(took.values()) * (1 + 16 / 116) + 1e-12


# Tensor parallelism


def column_backward(t: dict[str, float]) -> float:
    """max(0, AG - dgrad) + max(0, RS - wgrad) for qkv and for gate and up, and two all-gathers of row-parallel linears."""
    parts = (
        max(0, t["attn.norm.regather"] - t["attn.qkv.dx"]),
        max(0, t["attn.qkv.dx.reduce_scatter"] - t["attn.qkv.dw"]),
        max(0, t["mlp.norm.regather"] - t["mlp.gate_up.dx"]),
        max(0, t["mlp.gate_up.dx.reduce_scatter"] - t["mlp.gate_up.dw"]),
    )
    return sum(parts)


@given(st.data())
@settings(max_examples=60)
def test_megatron_backward_of_tensor_parallel_linears(data: DataObject) -> None:
    t = some_seconds(data, llama())
    row = t["mlp.residual.grad.all_gather"] + t["attn.residual.grad.all_gather"]
    assert exposed(llama(), Phase.BACKWARD, t, MEGATRON)["tp"] == pytest.approx(row + column_backward(t), abs=1e-12)
    forward = ("attn.norm.all_gather", "attn.out.reduce_scatter", "mlp.norm.all_gather", "mlp.down.reduce_scatter")
    assert exposed(llama(), Phase.FORWARD, t, MEGATRON)["tp"] == pytest.approx(sum(t[name] for name in forward))


def latent_backward(t: dict[str, float], linears: tuple[str, ...]) -> float:
    """A layer of latent attention and experts: what is exposed when these column-parallel linears hide theirs."""
    total = sum(time for name, time in t.items() if is_tp_backward(name))
    for linear, norm in (
        ("attn.q_up", "attn.q_norm"),
        ("attn.kv_up", "attn.kv_norm"),
        ("moe.shared.gate_up", "moe.norm"),
    ):
        if linear in linears:
            total -= min(t[f"{norm}.regather"], t[f"{linear}.dx"])
            total -= min(t[f"{linear}.dx.reduce_scatter"], t[f"{linear}.dw"])
    return total


def is_tp_backward(name: str) -> bool:
    op = moe(tp=2)[name]
    return op.phase is Phase.BACKWARD and op.group_name == "tp"


@given(st.data())
@settings(max_examples=40)
def test_linears_of_latent_attention_and_shared_experts(data: DataObject) -> None:
    """Each hides its own, whatever comes next; with shared-expert overlap the shared expert awaits its collectives."""
    t = some_seconds(data, moe(tp=2))
    linears = ("attn.q_up", "attn.kv_up", "moe.shared.gate_up")
    form = latent_backward(t, linears)
    assert exposed(moe(tp=2), Phase.BACKWARD, t, MEGATRON)["tp"] == pytest.approx(form, abs=1e-12)
    t |= {name: 0.0 for name in t if name.endswith("all_to_all")}
    form = latent_backward(t, linears[:2])
    assert exposed(moe(tp=2), Phase.BACKWARD, t, SHARED)["tp"] == pytest.approx(form, abs=1e-12)


def test_collectives_of_experts_with_tensor_parallelism_are_exposed() -> None:
    graph = program("mixtral-8x7b", Layout(tp=4, dp=4, ep=2, etp=4, global_batch=4))["moe"]
    t = dict(zip([op.name for op in graph.ops], cost_seconds(graph), strict=True))
    of_tp = sum(
        time
        for op, time in zip(graph.ops, t.values(), strict=True)
        if op.phase is Phase.BACKWARD and stream_of(op) == "tp"
    )
    hidden = min(t["attn.norm.regather"], t["attn.qkv.dx"]) + min(t["attn.qkv.dx.reduce_scatter"], t["attn.qkv.dw"])
    assert exposed(graph, Phase.BACKWARD, t, MEGATRON)["tp"] == pytest.approx(of_tp - hidden)


@given(st.data())
@settings(max_examples=60)
def test_tp_comm_overlap(data: DataObject) -> None:
    """Rings max(0, c - g (1 - 1/tp)), pipelines of four c/4 + 3/4 max(0, c - g), bulk as without the flag."""
    t = some_seconds(data, llama())

    def ring(gather: str, matmul: str) -> float:
        return max(0, t[gather] - t[matmul] * (1 - 1 / 8))

    def pipeline(matmul: str, scatter: str) -> float:
        return t[scatter] / 4 + 3 / 4 * max(0, t[scatter] - t[matmul])

    forward = ring("attn.norm.all_gather", "attn.qkv") + ring("mlp.norm.all_gather", "mlp.gate_up")
    forward += pipeline("attn.out", "attn.out.reduce_scatter") + pipeline("mlp.down", "mlp.down.reduce_scatter")
    assert exposed(llama(), Phase.FORWARD, t, TP_COMM)["tp"] == pytest.approx(forward, abs=1e-12)
    backward = ring("mlp.residual.grad.all_gather", "mlp.down.dx")
    backward += ring("attn.residual.grad.all_gather", "attn.out.dx") + column_backward(t)
    assert exposed(llama(), Phase.BACKWARD, t, TP_COMM)["tp"] == pytest.approx(backward, abs=1e-12)


def test_what_tp_comm_overlap_does_not_cover() -> None:
    """The head, the embedding, experts and their groups, and the latents of latent attention."""
    for graph in (program("llama-3-8b", Layout(tp=8))["head"], program("llama-3-8b", Layout(tp=8))["embedding"]):
        t = {op.name: 1e-3 for op in graph.ops}
        for phase in PHASES:
            assert exposed(graph, phase, t, TP_COMM) == exposed(graph, phase, t, MEGATRON)
    etp = program("mixtral-8x7b", Layout(tp=4, dp=4, ep=2, etp=4, global_batch=4))["moe"]
    assert covered(etp, Phase.FORWARD) == {"attn.qkv", "attn.out"}
    assert covered(moe(tp=2), Phase.FORWARD) == {"attn.out", "moe.shared.gate_up", "moe.shared.down"}
    assert covered(moe(tp=2), Phase.BACKWARD) == {"attn.out.dx", "moe.shared.down.dx"}


def covered(graph: Graph, phase: Phase) -> set[str]:
    """Matmuls that run part by part."""
    work = work_of(graph, [0.0] * len(graph.ops), phase)
    partners = partners_of(graph, work, TP_COMM)
    return {graph.ops[i].name for i in (*partners.rings, *partners.pipelines)}


def test_without_sequence_parallelism_the_all_reduce_of_dgrad_hides_under_wgrad() -> None:
    graph = llama(Layout(tp=8, sp=False))
    t = dict(zip([op.name for op in graph.ops], cost_seconds(graph), strict=True))
    hidden = sum(max(0, t[f"{name}.dx.all_reduce"] - t[f"{name}.dw"]) for name in ("attn.qkv", "mlp.gate_up"))
    assert exposed(graph, Phase.BACKWARD, t, MEGATRON)["tp"] == pytest.approx(hidden)


def test_llama_8b_on_8_gpus_with_contention() -> None:
    """gate and up: the all-gather (c = 115.8 us) ends inside dgrad (b = 160.6 us), so c (1 - 1/kappa) = c 16/132 is lost.

    The same for the reduce-scatter inside wgrad; beside qkv's matmuls (35 us) the collectives are longer, and compute's
    lengthening is not felt.
    """
    graph, seconds = llama(), cost_seconds(llama())
    t = dict(zip([op.name for op in graph.ops], seconds, strict=True))
    assert t["mlp.norm.regather"] < t["mlp.gate_up.dx"] and t["attn.norm.regather"] > t["attn.qkv.dx"] * 132 / 116
    contended = schedule_phase(graph, Phase.BACKWARD, seconds, MEGATRON, H100)
    alone = without_contention(graph, Phase.BACKWARD, t, MEGATRON)
    lost = (t["mlp.norm.regather"] + t["mlp.gate_up.dx.reduce_scatter"]) * 16 / 132
    assert contended.seconds - alone.seconds == pytest.approx(lost)
    one = contended.op_s[graph.positions["mlp.gate_up.dx"]]
    assert one == pytest.approx(t["mlp.gate_up.dx"] + t["mlp.norm.regather"] * 16 / 132)
    assert contended.op_s[graph.positions["mlp.norm.regather"]] == 0


# Experts


@given(st.data())
@settings(max_examples=40)
def test_shared_expert_overlap(data: DataObject) -> None:
    """max(0, dispatch - fc1) + max(0, combine - fc2); in backward the same ops' gradients beside the same all-to-alls."""
    t = some_seconds(data, moe())
    fc1, fc2 = t["moe.shared.gate_up"] + t["moe.shared.act"], t["moe.shared.down"]
    forward = max(0, t["moe.permute.all_to_all"] - fc1) + max(0, t["moe.experts.down.all_to_all"] - fc2)
    assert exposed(moe(), Phase.FORWARD, t, SHARED)["ep"] == pytest.approx(forward, abs=1e-12)
    fc2 = t["moe.shared.down.dx"] + t["moe.shared.down.dw"]
    fc1 = t["moe.shared.act.dx"] + t["moe.shared.gate_up.dx"] + t["moe.shared.gate_up.dw"]
    dispatch, combine = t["moe.experts.gate_up.dx.all_to_all"], t["moe.unpermute.dx.1.all_to_all"]
    backward = max(0, combine - fc2) + max(0, dispatch - fc1)
    assert exposed(moe(), Phase.BACKWARD, t, SHARED)["ep"] == pytest.approx(backward, abs=1e-12)


def test_without_overlap_words_for_experts_all_to_alls_are_exposed() -> None:
    seconds = cost_seconds(moe())
    t = dict(zip([op.name for op in moe().ops], seconds, strict=True))
    both = t["moe.permute.all_to_all"] + t["moe.experts.down.all_to_all"]
    assert exposed(moe(), Phase.FORWARD, t, MEGATRON)["ep"] == pytest.approx(both)
    assert exposed(moe(), Phase.FORWARD, t, MERGED)["ep"] == pytest.approx(both)  # it hides them in pairs only


ALL_TO_ALLS = ("moe.unpermute.dx.1.all_to_all", "moe.permute.all_to_all", "moe.experts.gate_up.dx.all_to_all",
               "moe.experts.down.all_to_all")  # fmt: skip


def pair_times(graph: Graph, t: dict[str, float]) -> dict[str, float]:
    """What each box of the pair takes: cb, df, db, cf on the communicator; af, mb, dw, mf, ab on compute."""
    times = dict(zip(("cb", "df", "db", "cf"), (t.get(name, 0.0) for name in ALL_TO_ALLS), strict=True))
    times |= dict.fromkeys(("af", "mb", "dw", "mf", "ab"), 0.0)
    for op in graph.ops:
        inner = op.name.startswith(("moe.experts", "moe.shared.", "mlp."))
        forward = op.phase is Phase.FORWARD
        box = ("mf" if forward else "dw" if op.role == "dw" else "mb") if inner else ("af" if forward else "ab")
        if op.name not in ALL_TO_ALLS:
            times[box] += t[op.name]
    return times


def run_pair(ahead: dict[str, float], back: dict[str, float]) -> float:
    """The pair by hand: each box starts when its stream is free and what it needs is there."""
    combine_back = back["cb"]
    attention = ahead["af"]
    dispatch = max(combine_back, attention) + ahead["df"]
    experts_back = max(attention, combine_back) + back["mb"]
    dispatch_back = max(dispatch, experts_back) + back["db"]
    experts = max(experts_back + back["dw"], dispatch) + ahead["mf"]
    combine = max(dispatch_back, experts) + ahead["cf"]
    return max(combine, max(experts, dispatch_back) + back["ab"])


@given(st.data(), st.sampled_from([moe(), moe("qwen3-30b-a3b")]))
@settings(max_examples=60)
def test_a_layer_forward_merged_with_a_layer_backward(data: DataObject, graph: Graph) -> None:
    t = some_seconds(data, graph)
    # the communicator gets long enough to matter
    t |= {name: t[name] * data.draw(st.sampled_from((0, 1, 8))) for name in ALL_TO_ALLS}
    seconds = [t[op.name] for op in graph.ops]
    alone = attrs.evolve(MERGED, contention=False)
    run = merge_layers(graph, seconds, graph, seconds, alone, H100)
    times = pair_times(graph, t)
    assert run.seconds == pytest.approx(run_pair(times, times), abs=1e-12)
    compute = sum(times[box] for box in ("af", "mb", "dw", "mf", "ab"))
    assert run.communicators[0].exposed_s == pytest.approx(run.seconds - compute, abs=1e-12)
    assert run.forward_op_s.sum() + run.backward_op_s.sum() == pytest.approx(run.seconds)
    # to first order: each all-to-all beside its own box
    first = max(0, times["cb"] - times["af"]) + max(0, times["df"] - times["mb"])
    first += max(0, times["db"] - times["dw"] - times["mf"]) + max(0, times["cf"] - times["ab"])
    if all(times[c] <= times[b] for c, b in (("cb", "af"), ("df", "mb"), ("db", "mf"), ("cf", "ab"))):
        assert run.communicators[0].exposed_s == pytest.approx(first, abs=1e-12) == 0


@given(st.data())
@settings(max_examples=30)
def test_in_a_pair_weight_gradients_come_too_late_to_hide_reductions(data: DataObject) -> None:
    """Without all-to-alls a pair is a sequence: only inputs gathered again hide, beside dgrad."""
    graph = moe(tp=2)
    t = some_seconds(data, graph)
    t |= {name: 0.0 for name in t if name.endswith("all_to_all")}
    seconds = [t[op.name] for op in graph.ops]
    run = merge_layers(graph, seconds, graph, seconds, attrs.evolve(MERGED, contention=False), H100)
    hidden = min(t["attn.q_norm.regather"], t["attn.q_up.dx"]) + min(t["attn.kv_norm.regather"], t["attn.kv_up.dx"])
    hidden += min(t["moe.norm.regather"], t["moe.shared.gate_up.dx"])
    assert run.seconds == pytest.approx(sum(seconds) - hidden, abs=1e-12)


@pytest.mark.parametrize(("ahead", "back"), [("dense", "moe"), ("moe", "dense"), ("dense", "dense")])
def test_dense_layers_merge_too(ahead: str, back: str) -> None:
    layers = program("deepseek-v3", Layout(dp=8, ep=8, global_batch=8))
    one, other = layers[ahead], layers[back]
    first, second = ({op.name: s for op, s in zip(g.ops, cost_seconds(g), strict=True)} for g in (one, other))
    run = merge_layers(
        one, list(first.values()), other, list(second.values()), attrs.evolve(MERGED, contention=False), H100
    )
    assert run.seconds == pytest.approx(run_pair(pair_times(one, first), pair_times(other, second)))


def test_merged_layers_hide_more_than_they_lose_to_contention() -> None:
    graph, seconds = moe(tp=2), cost_seconds(moe(tp=2))
    pair = merge_layers(graph, seconds, graph, seconds, MERGED, H100)
    plain = sum(schedule_phase(graph, phase, seconds, NONE, H100).seconds for phase in PHASES)
    ep = next(found for found in pair.communicators if found.name == "ep")
    assert ep.exposed_s == 0  # compute of either micro-batch is longer than every all-to-all
    assert pair.slowdown_s < ep.total_s * 16 / 116 + 1e-3 and pair.seconds < plain - ep.total_s + pair.slowdown_s


def test_a_graph_with_two_layers_of_experts_is_no_layer() -> None:
    graph = program("qwen3-30b-a3b", Layout(dp=8, ep=8, global_batch=8)).unroll()
    with pytest.raises(ValueError, match="more all-to-alls"):
        merge_layers(graph, [0.0] * len(graph.ops), graph, [0.0] * len(graph.ops), MERGED, H100)
    with pytest.raises(ValueError, match=r"1 times for \d+ ops"):
        schedule_phase(graph, Phase.FORWARD, [0.0], NONE, H100)
