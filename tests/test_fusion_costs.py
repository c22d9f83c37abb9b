"""What fusion saves: by hand on Llama-3-8B, tensor by tensor on small graphs, rule by rule on carried models."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, misc"

from __future__ import annotations

from functools import cache

import attrs
import pytest

from fusion_samples import MD, Sketch, act, sketched
from stepgraph.hwtargets import load_target
from stepgraph.ir.graph import Graph, Group
from stepgraph.ir.op import Op
from stepgraph.ir.program import Program
from stepgraph.ir.tensor import Kind, Tensor
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import lower
from stepgraph.passes import compare
from stepgraph.passes.base import Setting, setting
from stepgraph.passes.costing import costs
from stepgraph.passes.fusing.pattern import FusionRule, fusion
from stepgraph.passes.fusing.programs import fuse
from stepgraph.passes.fusing.sets import BASIC
from stepgraph.passes.profiles import PROFILES
from stepgraph.passes.traffic import savings

H100 = load_target("h100")
LAWS = {name: setting(H100, name) for name in sorted(PROFILES)}


@fusion(phase="forward")
def add_rmsnorm(op, x, residual, weight):
    total = op.add(x, residual)
    return op.rmsnorm(total, weight)


@cache
def llama(**layout: object) -> Program:
    return lower(load_model("llama-3-8b"), Layout(seq=4096, **layout))  # type: ignore[arg-type]


def saved(before: Program, after: Program, law: Setting, phase: str = "total") -> tuple[int, int, int]:
    """Bytes, kernels and FLOPs that fusion took away, over all stages."""
    found = compare(before, after, law)
    one, other = (s.totals if phase == "total" else s.phases[phase] for s in (found.before, found.after))
    return one.hbm_bytes - other.hbm_bytes, one.kernels - other.kernels, one.flops - other.flops


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_add_and_norm_on_llama_saves_one_read_at_each_of_64_sites(law: Setting) -> None:
    program = llama()
    fused, report = fuse(program, [add_rmsnorm])
    # 32 layers have one inside; 31 seams between layers and the one before the head have one each
    assert {site.op: site.times for site in report.sites} == {
        "mlp.norm": 32,
        "right.attn.norm": 31,
        "right.head.norm": 1,
    }
    assert report.rules[0].fused == 32 + 31 + 1
    # the norm no longer reads the sum; the sum is still written: the next add or backward reads it
    one_pass = 4096 * 4096 * 2
    assert saved(program, fused, law) == (64 * one_pass, 64, 0)
    assert saved(program, fused, law, "backward") == (0, 0, 0)


def test_seconds_saved_are_bytes_over_the_reachable_rate_and_one_gap_per_kernel() -> None:
    program = llama()
    found = compare(program, fuse(program, [add_rmsnorm])[0], H100)
    gone = found.before.totals.time_s - found.after.totals.time_s
    rate = H100.hbm.effective_bytes_per_s
    assert gone == pytest.approx(64 * 4096 * 4096 * 2 / rate + 64 * H100.launch.gap_s, rel=1e-9)


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_under_sequence_parallelism_a_rank_saves_its_share(law: Setting) -> None:
    """After a row-parallel projection the reduce-scatter comes before the add, so add and norm still meet."""
    program = llama(tp=2)
    fused, report = fuse(program, [add_rmsnorm])
    assert (report.rules[0].fused, dict(report.rules[0].rejected)) == (64, {})
    assert saved(program, fused, law) == (64 * (4096 // 2) * 4096 * 2, 64, 0)


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_a_stage_boundary_costs_one_site(law: Setting) -> None:
    program = llama(pp=2, global_batch=8)
    fused, report = fuse(program, [add_rmsnorm])
    assert (report.rules[0].fused, dict(report.rules[0].rejected)) == (63, {"stage": 1})
    assert saved(program, fused, law) == (63 * 4096 * 4096 * 2, 63, 0)


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_recomputed_copies_are_fused_too(law: Setting) -> None:
    """Inside 32 layers, forward and again in backward; not across layers that start again from their own input."""
    program = llama(recompute="full")
    fused, report = fuse(program, [add_rmsnorm])
    assert report.rules[0].fused == 2 * 32
    one_pass = 4096 * 4096 * 2
    assert saved(program, fused, law, "forward") == (32 * one_pass, 32, 0)
    assert saved(program, fused, law, "backward") == (32 * one_pass, 32, 0)


def group_of(graph: Graph, *members: str, kernels: int = 1, efficiency: float = 1.0) -> Graph:
    return attrs.evolve(graph, groups=(Group("k", "by hand", members, kernels, efficiency),))


def moved(graph: Graph, law: str = "exact") -> int:
    return int(costs(graph, LAWS[law]).hbm_bytes.sum())


def test_a_chain_moves_what_enters_and_what_leaves() -> None:
    graph = sketched("a = gelu x", "b = silu a", "c = softcap b")
    assert moved(graph) == 3 * 2 * MD
    assert moved(group_of(graph, "a", "b", "c")) == 2 * MD
    assert moved(group_of(graph, "a", "b")) == 2 * MD + 2 * MD


def test_a_tensor_that_leaves_too_is_still_written() -> None:
    graph = sketched("a = gelu x", "b = silu a", outputs=("a", "b"))
    assert moved(group_of(graph, "a", "b")) == 3 * MD  # R x, W a, W b


def test_a_shared_operand_is_read_once() -> None:
    graph = sketched("a = gelu x", "b = silu x", "c = softcap x", "t = grad_add a b c")
    assert moved(graph) == 3 * 2 * MD + 4 * MD
    assert moved(group_of(graph, "a", "b", "c")) == (1 + 3) * MD + 4 * MD
    assert moved(group_of(graph, "a", "b", "c", "t")) == 2 * MD


def test_an_operand_that_stands_twice_and_an_operand_that_is_swept_twice() -> None:
    """Two sweeps of one op stay two sweeps: only reads of further ops are saved."""
    graph = sketched("a = add x x", "n = rmsnorm x w", "t = add a n")
    assert (
        moved(graph, "reference") == (1 + 1) * MD + (2 + 1) * MD + (1 + 1) * MD
    )  # add reads one operand, from L2 the other
    # one of the reads of x is the other's; t reads a, and n is in L2 as the profile has it
    assert moved(group_of(graph, "a", "n"), "reference") == 7 * MD - MD
    fused = group_of(graph, "a", "n", "t")
    assert moved(fused, "reference") == 7 * MD - MD - MD - 2 * MD  # neither a nor n is written, a is not read
    assert {s.why for s in savings(fused, fused.groups[0], PROFILES["reference"])} == {
        "read inside",
        "read once for all",
        "never written",
    }


def test_a_result_that_nobody_reads_is_still_written() -> None:
    """Statistics for a backward pass that is not in the graph."""
    sketch = Sketch()
    sketch.add("s", "add", "a", "b")
    rstd = Tensor("rstd", "bs", (1, 64), "fp32")
    sketch.ops.append(Op("n", "rmsnorm", (act("s"), Tensor("w", "d", (32,))), (act("n"), rstd)))
    graph = attrs.evolve(sketch.graph(), outputs=(act("n"),))
    weight, statistics = 32 * 2, 64 * 4
    assert moved(graph) == 3 * MD + 2 * MD + weight + statistics
    assert moved(group_of(graph, "s", "n")) == 3 * MD + weight + statistics  # R a, R b, R w, W n, W rstd


def views() -> Graph:
    """A projection, packed and taken apart by views; one part is read as it is."""
    sketch = Sketch()
    sketch.add("p", "bias_add", "x", "b")
    parts = tuple(Tensor(name, "bsd", (1, 64, 16)) for name in ("q", "k"))
    sketch.ops.append(Op("split", "split_latent", (act("p"),), parts))
    sketch.ops.append(Op("r", "rope", parts[:1], (attrs.evolve(parts[0], name="r"),)))
    sketch.ops.append(Op("late", "gelu", parts[1:], (attrs.evolve(parts[1], name="late"),)))
    return sketch.graph("r", "late")


def test_a_view_that_is_read_outside_is_still_written() -> None:
    graph = views()
    half = MD // 2
    # bias_add 3, rope 2 halves, gelu 2 halves
    assert moved(graph) == 3 * MD + 4 * half
    # without the read of q inside, and of what is packed only k is written
    assert moved(group_of(graph, "p", "split", "r")) == 3 * MD + 4 * half - half - half
    assert moved(group_of(graph, "p", "split", "r", "late")) == 3 * MD + 4 * half - 2 * half - MD
    assert moved(group_of(graph, "p", "split")) == moved(graph)


def test_what_views_join_is_written_once() -> None:
    """Gradients are written straight into one buffer, which the GEMM outside reads."""
    sketch = Sketch()
    halves = tuple(Tensor(name, "bsd", (1, 64, 16), kind=Kind.GRAD) for name in ("dq", "dk"))
    made = tuple(attrs.evolve(t, name=f"{t.name}.rope") for t in halves)
    sketch.ops += [Op(out.name, "rope_dx", (t,), (out,)) for t, out in zip(halves, made, strict=True)]
    sketch.ops.append(Op("joined", "join_latent", made, (act("joined"),)))
    graph = sketch.graph("joined")
    assert moved(graph) == 2 * MD  # R and W of both halves
    assert moved(group_of(graph, "dq.rope", "dk.rope", "joined")) == 2 * MD
    assert int(costs(group_of(graph, "dq.rope", "dk.rope", "joined"), LAWS["exact"]).kernels.sum()) == 1


def gemm() -> Graph:
    sketch = Sketch()
    weight = Tensor("w", "df", (32, 32), kind=Kind.PARAM)
    sketch.ops.append(Op("m", "linear", (act("x"), weight), (act("m"),), (("family", "mlp_down"),)))
    sketch.add("p", "bias_add", "m", "b")
    sketch.add("t", "add", "p", "r")
    return sketch.graph("t")


@pytest.mark.parametrize("law", LAWS)
def test_a_gemm_keeps_its_time_and_its_kernel_adds_what_it_moves_besides(law: str) -> None:
    """Epilogue: R X, W, bias, residual, W out. Of these X, W and the output are the GEMM's own."""
    graph, fused = gemm(), group_of(gemm(), "m", "p", "t")
    before, after = costs(graph, LAWS[law]), costs(fused, LAWS[law])
    weight = 32 * 32 * 2
    traffic = MD + weight + MD + {"exact": MD, "reference": 0}[law] + MD  # the reference profile has the branch in L2
    assert after.hbm_bytes.sum() == traffic
    assert (after.compute_s == before.compute_s).all()
    assert after.hbm_s.sum() == pytest.approx((traffic - 2 * MD - weight) / H100.hbm.effective_bytes_per_s)
    assert after.hbm_s.sum() <= before.hbm_s.sum()
    assert (after.kernels.sum(), before.kernels.sum()) == (1, 3)


def test_a_kernel_of_less_efficiency_takes_longer_and_moves_the_same() -> None:
    graph = sketched("a = gelu x", "b = silu a")
    whole, half = (costs(group_of(graph, "a", "b", efficiency=rate), LAWS["exact"]) for rate in (1.0, 0.5))
    assert half.hbm_s.sum() == pytest.approx(2 * whole.hbm_s.sum())
    assert half.hbm_bytes.sum() == whole.hbm_bytes.sum()


def test_launches_are_the_rules_and_never_more_than_before() -> None:
    graph = sketched("a = gelu x", "b = silu a", "c = softcap b")
    for kernels, expected in ((1, 1), (2, 2), (9, 3)):
        fused = group_of(graph, "a", "b", "c", kernels=kernels)
        assert costs(fused, LAWS["exact"]).kernels.sum() == expected


def router() -> Graph:
    """Scores, and the load-balancing loss that hands them on."""
    sketch = Sketch()
    names = ("logits", "scores", "counted")
    logits, scores, counted = (Tensor(name, "bsE", (1, 64, 8), "fp32") for name in names)
    sketch.ops.append(Op("scores", "topk", (logits,), (scores,), (("k", 2),)))
    sketch.ops.append(Op("counted", "aux_loss", (scores,), (counted,)))
    return attrs.evolve(sketch.graph(), outputs=(counted,))


@pytest.mark.parametrize("law", LAWS)
def test_top_k_keeps_its_own_rule(law: str) -> None:
    """m E b / tau covers what top-k moves, also its result; the loss no longer reads the scores."""
    scores = 64 * 8 * 4
    assert moved(router(), law) == 2 * scores
    assert moved(group_of(router(), "scores", "counted"), law) == scores
    before, after = costs(router(), LAWS[law]), costs(group_of(router(), "scores", "counted"), LAWS[law])
    assert (after.compute_s == before.compute_s).all()
    assert after.hbm_s.sum() == 0


MODELS = {
    "rmsnorm_backward_add": "llama-3-8b",
    "layernorm_backward_add": "gpt2-xl",
    "rmsnorm_backward": "deepseek-v3",
    "layernorm_backward": "gpt2-xl",
    "add_rmsnorm": "llama-3-8b",
    "add_layernorm": "gpt2-xl",
    "bias_add_layernorm": "gpt2-xl",
    "qk_norm_rope": "qwen3-30b-a3b",
    "bias_activation": "gpt2-xl",
    "bias_glu": "gpt-oss-20b",
    "activation_bias_backward": "gpt2-xl",
    "bias_add_residual": "gpt-oss-20b",
    "rope_pair": "llama-3-8b",
    "softcap_loss": "gemma-2-9b",
    "softcap_loss_backward": "gemma-2-9b",
    "router": "deepseek-v3",
    "router_backward": "deepseek-v3",
}
"""A carried model in which each rule finds something."""

SHADOWED = {"add_layernorm"}
"""Rules that find nothing in carried models where larger patterns before them have been: for models without biases."""


COUNTED = {"rmsnorm_backward", "layernorm_backward"}
"""Kernels that the exact profile has already: dx leaves the partial sums that the weight gradient needs."""


@cache
def plain(name: str) -> Program:
    return lower(load_model(name), Layout(seq=1024))


@pytest.mark.parametrize("rule", BASIC, ids=lambda rule: rule.name)
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_every_basic_rule_fires_and_saves(rule: FusionRule, law: Setting) -> None:
    program = plain(MODELS[rule.name])
    fused, report = fuse(program, [rule])
    assert report.rules[0].fused > 0
    bytes_saved, kernels_saved, flops_saved = saved(program, fused, law)
    assert bytes_saved >= 0 and kernels_saved >= 0 and flops_saved == 0
    assert (bytes_saved + kernels_saved > 0) == (rule.name not in COUNTED or law is LAWS["reference"])
    among = next(found for found in fuse(program, BASIC)[1].rules if found.name == rule.name)
    assert (among.fused > 0) == (rule.name not in SHADOWED)


def split_rope(op, x):
    return op.rope(op.split_qkv(x))


def join_dx(op, dq, dk, dv, w):
    return op.linear_dx(op.join_qkv(op.rope_dx(dq), dk, dv), w)


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_a_view_inside_a_kernel_makes_nothing(law: Setting) -> None:
    program = lower(load_model("llama-3-8b"), Layout(seq=1024))
    fused, report = fuse(program, [fusion(split_rope)])
    assert report.rules[0].fused == 32
    assert saved(program, fused, law)[:2] == (0, 0)  # q still comes from HBM, where the projection wrote it
    fused, report = fuse(program, [fusion(join_dx)])
    assert report.rules[0].fused == 32
    q = 1024 * 32 * 128 * 2  # made inside by RoPE's backward; k and v come from outside
    bytes_saved, kernels_saved, _ = saved(program, fused, law)
    assert kernels_saved == 32  # RoPE's launch
    assert bytes_saved == 32 * q  # one read; the weight gradient reads it too, so it is still written
