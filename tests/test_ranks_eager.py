"""Decomposed graphs on simulated ranks compute what one rank computes without decomposition: results and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs
import numpy as np
import pytest

from meaning import MEANINGS
from meaning_eager import ADAM_EPS, BETA_1, BETA_2, DECAY, RATE, STEP
from meaning_rank import Array, Where
from ranks import run
from ranks_compared import VOCAB, assert_finite_differences, drawn, gradients_of
from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Phase
from stepgraph.ir.program import Program
from stepgraph.ir.verifier import verify
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import lower
from stepgraph.lowering.model import Attention, Experts, LatentAttention, Layer, Mlp, Model
from stepgraph.passes.rewriting.attention import flash_attention
from stepgraph.passes.rewriting.decomposing import DECOMPOSABLE, decompose

SEQ = 8
GROUPED = Attention(8, 4, 4, qkv_bias=False, out_bias=False, rotary_dim=4)
GATED = Mlp(ffn=8, gated=True, activation="silu", bias=False)
PLAIN = Layer(GROUPED, GATED, "rmsnorm")
BIASED = attrs.evolve(GROUPED, qkv_bias=True, out_bias=True, qk_norm="head", window=3)
CAPPED = attrs.evolve(GROUPED, kv_heads=8, softcap=True, chunk=4)

LAYERS: Mapping[str, Layer] = MappingProxyType(
    {
        "plain": PLAIN,
        "biased-gelu": Layer(BIASED, attrs.evolve(GATED, activation="gelu", bias=True), "rmsnorm"),
        "capped-relu": Layer(CAPPED, attrs.evolve(GATED, activation="relu"), "rmsnorm", norms="sandwich"),
        "both-ways-experts": Layer(attrs.evolve(GROUPED, causal=False), Experts(4, 2, GATED, shared=GATED), "rmsnorm"),
        "latent": Layer(LatentAttention(4, q_rank=6, kv_rank=5, nope_dim=4, rope_dim=2, v_dim=3), GATED, "rmsnorm"),
    }
)

LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "one": Layout(),
        "tp2": Layout(tp=2),
        "dp2-tp2-no-sp": Layout(dp=2, tp=2, sp=False),
        "tp2-full": Layout(tp=2, recompute="full"),
        "tp2-selective": Layout(tp=2, recompute="selective"),
    }
)


def model_of(layer: Layer, dtype: str = "bf16") -> Model:
    return Model("small", "small", 16, VOCAB, (layer,), "rmsnorm", False, 0, dtype, 64)


def decomposed(model: Model, layout: Layout) -> Program:
    """Whatever can be split is; heads that turn in part are left alone."""
    partly = isinstance(model.layers[0].attention, LatentAttention)
    kinds = [kind for kind in DECOMPOSABLE if kind != "rope" or not partly]
    return lower(model, attrs.evolve(layout, seq=SEQ, micro_batch=2), (decompose(*kinds),))


def undecomposed(model: Model, layout: Layout) -> Program:
    return lower(model, Layout(seq=SEQ, micro_batch=2 * layout.dp))


# packed projections: their parts, by name ------------------------------------------------------------------------------


def parts_of(name: str, packed: Array, heads: int) -> dict[str, Array]:
    """Values of the parts of a packed parameter, or the parameter itself. Heads lie group by group."""
    if ".gate_up." in name and not name.startswith("moe.experts."):
        gate, up = np.moveaxis(packed, -2, 0)
        return {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
    if ".qkv." not in name:
        return {name: packed}
    groups = packed.shape[-2] // (heads + 2)
    split = packed.reshape(*packed.shape[:-2], groups, heads + 2, packed.shape[-1])
    query = split[..., :-2, :].reshape(*packed.shape[:-2], -1, packed.shape[-1])
    parts = {"q": query, "k": split[..., -2, :], "v": split[..., -1, :]}
    return {name.replace("qkv", part): value for part, value in parts.items()}


def values_for(graph: Graph, plain: Graph, heads: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """The same random values for both graphs."""
    whole = {tensor.name: drawn(tensor, plain) for tensor in plain.inputs}
    own = {part: value for name, packed in whole.items() for part, value in parts_of(name, packed, heads).items()}
    if graph.ports.grad_enters:  # named after a conversion where there is one
        own[graph.ports.grad_enters] = whole[plain.ports.grad_enters]
    return {tensor.name: own[tensor.name] for tensor in graph.inputs}, whole


def assert_computes(graph: Graph, plain: Graph, heads: int) -> int:
    """Every forward value that both have, and every gradient; returns how many gradients."""
    values, whole = values_for(graph, plain, heads)
    mine, expected = run(graph, values), run(plain, whole)
    common = {t.name for op in plain.phase(Phase.FORWARD) for t in op.outputs} & mine.arrays.keys()
    routed = {t.name for op in plain.ops for t in op.outputs if t.fraction != (1, 1)}
    for name in common - routed:
        np.testing.assert_allclose(mine.value(name), expected.value(name), 1e-9, 1e-9, err_msg=name)
    grads = gradients_of(graph)
    wanted = {
        part: value
        for name, grad in gradients_of(plain).items()
        for part, value in parts_of(name, expected.value(grad), heads).items()
    }
    assert grads.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(mine.value(grads[name]), value, 1e-9, 1e-9, err_msg=name)
    return len(grads)


def assert_layer(layer: Layer, layout: Layout, template: str = "") -> int:
    model = model_of(layer)
    template = template or model.template_names[0]
    graph, plain = decomposed(model, layout)[template], undecomposed(model, layout)[template]
    verify(graph)
    grouped = layer.attention.heads // layer.attention.kv_heads if isinstance(layer.attention, Attention) else 1
    return assert_computes(graph, plain, grouped)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_decomposed_layer_computes_what_the_layer_computes(name: str, layout: str) -> None:
    spread = LAYOUTS[layout]  # experts under TP need sequence parallelism
    assert assert_layer(LAYERS[name], attrs.evolve(spread, sp=None) if "experts" in name else spread) > 0


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_decomposed_head_computes_what_the_head_computes(layout: Layout) -> None:
    assert assert_layer(PLAIN, layout, "head") == 2 + 1  # norm, table, stream


def test_the_number_of_gradients_compared() -> None:
    # 2 norms, q, k, v, out, gate, up, down, the stream; with biases on all but norms, and norms of q and k
    assert assert_layer(LAYERS["plain"], LAYOUTS["tp2"]) == 2 + 4 + 3 + 1
    assert assert_layer(LAYERS["biased-gelu"], LAYOUTS["tp2"]) == 4 + 2 * 4 + 2 * 3 + 1


@pytest.mark.parametrize("name", ["plain", "capped-relu", "latent"])
def test_a_decomposed_layer_agrees_with_finite_differences(name: str) -> None:
    model = model_of(LAYERS[name])
    assert assert_finite_differences(decomposed(model, Layout())[model.template_names[0]]) > 0


def test_a_model_in_fp32_has_nothing_to_cast() -> None:
    program = decomposed(model_of(PLAIN, "fp32"), Layout())
    kinds = {op.kind for graph in program.templates for op in graph.ops}
    assert {"rsqrt", "softmax", "nll"} <= kinds
    assert not kinds & {"cast", "cast_dx", "foreach_copy"}
    plain = undecomposed(model_of(PLAIN, "fp32"), Layout())
    for template in ("dense", "head"):
        assert assert_computes(program[template], plain[template], 2) > 0


@pytest.mark.parametrize("name", LAYERS)
def test_flash_attention_computes_what_eager_attention_computes(name: str) -> None:
    model = model_of(LAYERS[name])
    template = model.template_names[0]
    layout = Layout(tp=2, seq=SEQ, micro_batch=2)
    fused = lower(model, layout, (decompose("sdpa"), flash_attention()))[template]
    plain = undecomposed(model, Layout())[template]
    assert [op.kind for op in fused.ops if op.module == "attn" and "sdpa" in op.kind] == ["sdpa", "sdpa_dx"]
    values = {t.name: drawn(t, plain) for t in plain.inputs}
    mine = run(fused, {t.name: drawn(t, fused) for t in fused.inputs})
    expected = run(plain, values)
    for param, grad in gradients_of(plain).items():
        np.testing.assert_allclose(mine.value(gradients_of(fused)[param]), expected.value(grad), 1e-9, 1e-9)


def test_decomposed_adamw_is_adamw() -> None:
    """m' = b1 m + (1 - b1) g, v' = b2 v + (1 - b2) g^2, p' = p - r w p - r m'/(1 - b1^t) / (sqrt(v'/(1 - b2^t)) + e)."""
    step = decomposed(model_of(PLAIN), Layout())["step"]
    rng = np.random.default_rng(0)
    held = {t.name: np.abs(rng.normal(size=t.shape)) for t in step.inputs}
    g, m, v, p = (held[f"step.{part}"] for part in ("grads", "exp_avg", "exp_avg_sq", "master"))
    for op in step.ops:
        if op.kind != "grad_norm":
            results = MEANINGS[op.kind](op, [held[t.name] for t in op.inputs], Where((), ()))
            held.update({t.name: value for t, value in zip(op.outputs, results, strict=True)})
    m, v = BETA_1 * m + (1 - BETA_1) * g, BETA_2 * v + (1 - BETA_2) * g**2
    m_hat, v_hat = m / (1 - BETA_1**STEP), v / (1 - BETA_2**STEP)
    expected = p - RATE * DECAY * p - RATE * m_hat / (np.sqrt(v_hat) + ADAM_EPS)
    for name, value in (("", m), (".exp_avg_sq", v), (".master", expected), (".params", expected)):
        np.testing.assert_allclose(held[f"step.adamw{name}"], value, 1e-9)
