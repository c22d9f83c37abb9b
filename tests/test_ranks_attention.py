"""Kinds of attention, layers and heads on simulated ranks: latents, norms of queries and keys, masks, sinks, MTP."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs
import pytest

from meaning import MEANINGS
from meaning_rank import Meaning
from ranks_compared import VOCAB, assert_finite_differences, assert_same, placed_on
from stepgraph.ir.graph import Graph
from stepgraph.ir.rows import Row
from stepgraph.ir.table import row_of
from stepgraph.ir.verifier import verify
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import logical_templates
from stepgraph.lowering.mesh import mesh_of
from stepgraph.lowering.model import Attention, Experts, LatentAttention, Layer, Mlp, Model
from stepgraph.lowering.recomputation import recompute

SEQ, MICRO_BATCH = 8, 2

GROUPED = Attention(8, 4, 4, qkv_bias=False, out_bias=False, rotary_dim=4)
LATENT = LatentAttention(heads=4, q_rank=6, kv_rank=5, nope_dim=4, rope_dim=2, v_dim=3)
GATED = Mlp(ffn=8, gated=True, activation="silu", bias=False)
BIASED = Mlp(ffn=8, gated=False, activation="gelu", bias=True)
PARALLEL = Layer(GROUPED, GATED, "layernorm", parallel=True)
BIASED_ATTENTION = attrs.evolve(GROUPED, qkv_bias=True, out_bias=True)

LAYERS: Mapping[str, Layer] = MappingProxyType(
    {
        "latent": Layer(LATENT, GATED, "rmsnorm"),
        "latent-whole-queries": Layer(attrs.evolve(LATENT, q_rank=0), GATED, "rmsnorm"),
        "latent-biased": Layer(attrs.evolve(LATENT, bias=True), GATED, "rmsnorm"),
        "head-norm": Layer(attrs.evolve(GROUPED, qk_norm="head"), GATED, "rmsnorm"),
        "full-norm": Layer(attrs.evolve(GROUPED, qk_norm="full"), GATED, "rmsnorm"),
        "window": Layer(attrs.evolve(GROUPED, window=3), GATED, "rmsnorm"),
        "chunks": Layer(attrs.evolve(GROUPED, chunk=4), GATED, "rmsnorm"),
        "sinks": Layer(attrs.evolve(BIASED_ATTENTION, sinks=True, window=5), GATED, "rmsnorm"),
        "capped-scores": Layer(attrs.evolve(GROUPED, softcap=True), attrs.evolve(GATED, activation="gelu"), "rmsnorm"),
        "both-ways": Layer(attrs.evolve(GROUPED, causal=False), attrs.evolve(GATED, activation="relu"), "rmsnorm"),
        "partial-rope": Layer(attrs.evolve(GROUPED, rotary_dim=2), Mlp(8, False, "silu", False), "layernorm"),
        "post-norm": Layer(attrs.evolve(GROUPED, qk_norm="full"), GATED, "rmsnorm", norms="post"),
        "sandwich": Layer(BIASED_ATTENTION, attrs.evolve(GATED, activation="gelu"), "rmsnorm", norms="sandwich"),
        "parallel": PARALLEL,
        "parallel-biased": attrs.evolve(PARALLEL, attention=BIASED_ATTENTION, mlp=BIASED),
        "parallel-biased-attention": attrs.evolve(PARALLEL, attention=BIASED_ATTENTION),
        "parallel-biased-mlp": attrs.evolve(PARALLEL, mlp=BIASED),
        "parallel-experts": attrs.evolve(PARALLEL, mlp=Experts(4, 2, GATED, shared=GATED)),
        "latent-experts": Layer(LATENT, Experts(4, 2, GATED), "rmsnorm"),
    }
)

LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "tp2": Layout(tp=2, sp=True),
        "tp2-no-sp": Layout(tp=2, sp=False),
        "tp4": Layout(tp=4, sp=True),
        "tp4-no-sp": Layout(tp=4, sp=False),
        "dp2-tp2": Layout(dp=2, tp=2, sp=True),
        "cp2": Layout(cp=2),
        "cp2-tp2": Layout(cp=2, tp=2, sp=True),
        "tp2-full": Layout(tp=2, sp=True, recompute="full"),
        "dp2-tp2-no-sp-full": Layout(dp=2, tp=2, sp=False, recompute="full"),
        "tp2-selective": Layout(tp=2, sp=True, recompute="selective"),
    }
)


def body(layer: Layer, sequences: int) -> Graph:
    """One such layer."""
    return _templates(layer, sequences, 0)[1]


def head(layer: Layer, sequences: int, modules: int = 0) -> Graph:
    """The head of a model of one such layer, which is capped and biased, behind modules that predict further ahead."""
    return _templates(layer, sequences, modules)[2]


def _templates(layer: Layer, sequences: int, modules: int) -> tuple[Graph, ...]:
    model = Model("m", "m", 16, VOCAB, (layer,), layer.norm, True, 0, "bf16", 64, final_softcap=True, head_bias=True)
    return logical_templates(model, sequences, SEQ, mtp=modules)


def on_ranks(graph: Graph, layout: Layout) -> tuple[Graph, Graph]:
    """The graph on its mesh, and on one rank."""
    return recompute(placed_on(mesh_of(layout), graph), layout.recompute), placed_on(mesh_of(Layout()), graph)


def pair(layer: Layer, layout: Layout) -> tuple[Graph, Graph]:
    """The layer on its mesh, and on one rank."""
    return on_ranks(body(layer, MICRO_BATCH * layout.dp), layout)


# what holds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_one_rank_agrees_with_finite_differences(layer: Layer) -> None:
    assert assert_finite_differences(placed_on(mesh_of(Layout()), body(layer, MICRO_BATCH))) > 0


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_all_ranks_together_compute_what_one_rank_computes(layer: Layer, layout: Layout) -> None:
    placed, single = pair(layer, layout)
    verify(placed)
    assert assert_same(placed, single) > 0


@pytest.mark.parametrize("name", ["window", "sinks", "latent"])
def test_selective_recomputation_repeats_attention(name: str) -> None:
    placed, _ = pair(LAYERS[name], LAYOUTS["tp2-selective"])
    assert [op.name for op in placed.ops if op.role == "recompute"] == ["attn.sdpa.again"]


HEADS: Mapping[str, tuple[str, int, int]] = MappingProxyType(
    {
        # norm, table and bias, the stream
        "rmsnorm": ("window", 0, 1 + 2 + 1),
        "layernorm": ("parallel", 0, 2 + 2 + 1),
        # each module: 2 norms and a projection, a layer (2 norms, attention, MLP) and a norm; the table is everyone's
        "one-module": ("head-norm", 1, 3 + (2 + 4 + 2) + 1 + 1 + 2 + 1),
        "two-modules": ("latent", 2, 2 * (3 + (2 + 7 + 2) + 1) + 1 + 2 + 1),
    }
)


@pytest.mark.parametrize(("name", "modules", "gradients"), HEADS.values(), ids=HEADS.keys())
def test_a_capped_head_with_a_bias_agrees_with_finite_differences(name: str, modules: int, gradients: int) -> None:
    graph = head(LAYERS[name], MICRO_BATCH, modules)
    assert assert_finite_differences(placed_on(mesh_of(Layout()), graph)) == gradients


@pytest.mark.parametrize("layout", ["tp2", "tp4-no-sp", "dp2-tp2", "cp2-tp2"])
@pytest.mark.parametrize(("name", "modules", "gradients"), HEADS.values(), ids=HEADS.keys())
def test_all_ranks_of_a_head_compute_what_one_rank_computes(
    name: str, modules: int, gradients: int, layout: str
) -> None:
    graph = head(LAYERS[name], MICRO_BATCH * LAYOUTS[layout].dp, modules)
    assert assert_same(*on_ranks(graph, LAYOUTS[layout])) == gradients


def test_the_number_of_gradients_compared() -> None:
    # 2 norms; down, norm and up of queries; down, norm and up of keys and values; out, gate_up, down; the stream
    assert assert_same(*pair(LAYERS["latent"], LAYOUTS["tp2"])) == 2 + 3 + 3 + 3 + 1
    # both down projections and out have a bias
    assert assert_same(*pair(LAYERS["latent-biased"], LAYOUTS["tp2"])) == 2 + 3 + 3 + 3 + 3 + 1
    # 2 norms; weight and bias of qkv and of out, sinks; gate_up, down; the stream
    assert assert_same(*pair(LAYERS["sinks"], LAYOUTS["tp2"])) == 2 + 2 * 2 + 1 + 2 + 1


# mutations: what is wrong is seen --------------------------------------------------------------------------------------


def without_reductions(kind: str) -> Row:
    """The wrong row: a norm over all heads looks at the heads of its own rank."""
    return attrs.evolve(row_of(kind), reductions=()) if kind.startswith("rmsnorm_heads") else row_of(kind)


@pytest.mark.parametrize("layout", ["tp2", "tp4-no-sp"])
def test_a_norm_over_all_heads_reduces_over_the_ranks(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranks.row_of", without_reductions)
    with pytest.raises(AssertionError, match=r"attn.q_norm.rstd .* differs between the ranks of tp"):
        assert_same(*pair(LAYERS["full-norm"], LAYOUTS[layout]))


def test_its_gradient_does_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(kind: str) -> Row:
        return without_reductions(kind) if kind == "rmsnorm_heads_dx" else row_of(kind)

    monkeypatch.setattr("ranks.row_of", wrong)
    with pytest.raises(AssertionError, match="Not equal"):
        assert_same(*pair(LAYERS["full-norm"], LAYOUTS["tp2"]))


@pytest.mark.parametrize("layout", [LAYOUTS["tp2"], Layout(tp=4, sp=True, ep=2, etp=2)], ids=["tp2", "tp4-in-two"])
def test_its_reductions_are_in_the_graph(layout: Layout) -> None:
    """What the norm does itself when it runs is an op of its own, so that it costs: queries and keys, both ways."""
    layer = Layer(attrs.evolve(GROUPED, qk_norm="full"), Experts(4, 2, GATED), "rmsnorm")
    placed, single = pair(layer, layout)
    assert assert_same(placed, single) > 0
    inner = [op for op in placed.ops if op.role == "inner"]
    assert [(op.kind, op.group_name) for op in inner] == [("all_reduce", "tp")] * (2 + 2)
    assert not [op for op in single.ops if op.role == "inner"]


def only_its_heads(kind: str) -> Row:
    """The wrong row: every rank takes its share of the shared rotary key's gradient for the whole."""
    return attrs.evolve(row_of(kind), inner="h") if kind == "latent_keys_dx" else row_of(kind)


@pytest.mark.parametrize("layout", ["tp2", "tp2-no-sp"])
def test_the_shared_rotary_key_sums_over_the_ranks_of_heads(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepgraph.lowering.backward.row_of", only_its_heads)
    with pytest.raises(AssertionError, match="differs between the ranks of tp"):
        assert_same(*pair(LAYERS["latent"], LAYOUTS[layout]))


@pytest.mark.parametrize("name", ["window", "chunks"])
def test_masks_count_from_the_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of a split sequence begins at its own position."""
    everywhere: dict[str, Meaning] = dict(MEANINGS)
    assert assert_same(*pair(LAYERS[name], LAYOUTS["cp2"]), everywhere) > 0
    monkeypatch.setattr("meaning_rank.Where.start", lambda *_: 0)
    with pytest.raises(AssertionError, match="Not equal"):
        assert_same(*pair(LAYERS[name], LAYOUTS["cp2"]), everywhere)
