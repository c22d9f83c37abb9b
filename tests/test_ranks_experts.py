"""Experts on simulated ranks: whatever ranks they are dealt to, outputs and gradients are those of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs
import numpy as np
import pytest
from pytest import MonkeyPatch

from meaning import MEANINGS
from meaning_rank import Array, Where
from ranks import Ranks, assemble, reduce, run
from ranks_compared import VOCAB, assert_finite_differences, assert_same, entering, gradients_of, placed_on
from stepgraph.ir.gradients import param_gradients
from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op
from stepgraph.ir.placement import dual_place
from stepgraph.ir.rows import Row
from stepgraph.ir.table import row_of
from stepgraph.ir.tensor import Axis, Place, Tensor
from stepgraph.ir.verifier import verify
from stepgraph.lowering.collectives import insert_collectives
from stepgraph.lowering.conversions import PlacementError
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import logical_templates
from stepgraph.lowering.mesh import EXPERT_LETTERS, PARAM_LETTERS, Mesh, mesh_of
from stepgraph.lowering.model import Attention, Experts, Layer, Mlp, Model
from stepgraph.lowering.optimizer import count_stage_params
from stepgraph.lowering.recomputation import recompute

SEQ, MICRO_BATCH, HIDDEN = 8, 2, 16

ATTENTION = Attention(4, 4, 4, qkv_bias=False, out_bias=False, rotary_dim=4)
GATED = Mlp(ffn=8, gated=True, activation="silu", bias=False)
PLAIN = Experts(8, 2, GATED)
MIXTURES: Mapping[str, Experts] = MappingProxyType(
    {
        "plain": PLAIN,
        "shared": attrs.evolve(PLAIN, shared=attrs.evolve(GATED, ffn=12)),
        "gated-shared": attrs.evolve(PLAIN, shared=attrs.evolve(GATED, activation="gelu"), shared_gate=True),
        "router-bias": attrs.evolve(PLAIN, router_bias=True),
        "latent": attrs.evolve(PLAIN, latent=6, top_k=3, expert=Mlp(8, False, "relu", False), shared=GATED),
    }
)
BIASED = attrs.evolve(PLAIN, router_bias=True, expert=attrs.evolve(GATED, bias=True))

LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "tp2-etp2": Layout(tp=2, sp=True, etp=2),
        "tp2": Layout(tp=2, sp=True),  # every rank of tp has all experts, and other tokens
        "dp4": Layout(dp=4),
        "dp4-ep2": Layout(dp=4, ep=2),
        "dp4-ep4": Layout(dp=4, ep=4),
        "dp2-tp2-ep2-etp2": Layout(dp=2, tp=2, sp=True, ep=2, etp=2),
        "ep-over-tp": Layout(tp=4, sp=True, ep=4),
        "ep-over-tp-and-dp": Layout(dp=2, tp=2, sp=True, ep=4),
        "edp2-ep2-tp2": Layout(dp=4, tp=2, sp=True, ep=2, etp=2),
        "ep-over-cp": Layout(dp=2, cp=2, tp=2, sp=True, ep=2, etp=2),
        "ep-over-tp-and-cp": Layout(cp=2, tp=2, sp=True, ep=4),
        "ep-over-tp-cp-and-dp": Layout(dp=2, cp=2, tp=2, sp=True, ep=8),
        "etp-is-half-of-tp": Layout(tp=4, sp=True, ep=2, etp=2),
        "etp-is-half-of-tp-ep-over-dp": Layout(dp=2, tp=4, sp=True, ep=4, etp=2),
        "dp2-tp2-ep2-etp2-full": Layout(dp=2, tp=2, sp=True, ep=2, etp=2, recompute="full"),
        "ep-over-tp-and-dp-full": Layout(dp=2, tp=2, sp=True, ep=4, recompute="full"),
        "ep-over-cp-full": Layout(cp=2, tp=2, sp=True, ep=2, etp=2, recompute="full"),
    }
)


def logical(mixture: Experts, sequences: int, part: int = 1) -> Graph:
    """One layer with these experts, or (part 2) the head behind a module that predicts further ahead with such one."""
    model = Model("m", "m", HIDDEN, VOCAB, (Layer(ATTENTION, mixture, "rmsnorm"),), "rmsnorm", False, 0, "bf16", 64)
    return logical_templates(model, sequences, SEQ, mtp=1)[part]


def pair(mixture: Experts, layout: Layout, part: int = 1) -> tuple[Graph, Graph]:
    """The layer (the head) on its mesh, and on one rank."""
    graph = logical(mixture, MICRO_BATCH * layout.dp, part)
    return recompute(placed_on(mesh_of(layout), graph), layout.recompute), placed_on(mesh_of(Layout()), graph)


# what holds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixture", [*MIXTURES.values(), BIASED], ids=[*MIXTURES, "biased"])
def test_one_rank_agrees_with_finite_differences(mixture: Experts) -> None:
    assert assert_finite_differences(placed_on(mesh_of(Layout()), logical(mixture, MICRO_BATCH))) > 0


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES.keys())
def test_all_ranks_together_compute_what_one_rank_computes(mixture: Experts, layout: Layout) -> None:
    placed, single = pair(mixture, layout)
    verify(placed)
    assert assert_same(placed, single) > 0


@pytest.mark.parametrize("layout", [name for name, layout in LAYOUTS.items() if layout.etp == 1])
def test_biases_of_experts_that_are_whole(layout: str) -> None:
    # 2 norms, qkv, out; weight and bias of the router, gate_up, down; the stream
    assert assert_same(*pair(BIASED, LAYOUTS[layout])) == 2 + 2 + 3 * 2 + 1


@pytest.mark.parametrize("layout", [name for name, layout in LAYOUTS.items() if layout.recompute == "none"])
def test_experts_in_a_module_that_predicts_further_ahead(layout: str) -> None:
    # 2 norms, projection, norm; the layer's 2 norms, qkv, out, router, gate_up, down; norm, table of head and tokens; x
    assert assert_same(*pair(PLAIN, LAYOUTS[layout], 2)) == 4 + 7 + 1 + 2 + 1


def test_the_number_of_gradients_compared() -> None:
    # 2 norms, qkv, out, router, gate_up, down = 7 and the stream
    assert assert_same(*pair(PLAIN, LAYOUTS["dp4-ep2"])) == 7 + 1
    # the shared expert has two weights and a gate
    assert assert_same(*pair(MIXTURES["gated-shared"], LAYOUTS["dp4-ep2"])) == 7 + 3 + 1


@pytest.mark.parametrize("layout", [name for name, layout in LAYOUTS.items() if layout.ep > 1])
def test_the_router_is_no_expert(layout: str) -> None:
    """Every rank has the whole router, and its gradient is summed over all ranks with other tokens."""
    mesh, (placed, _) = mesh_of(LAYOUTS[layout]), pair(BIASED, LAYOUTS[layout])
    routers = {p.name: (p, g) for p, g in param_gradients(placed) if p.name.startswith("moe.router")}
    assert routers.keys() == {"moe.router.weight", "moe.router.bias"}
    for param, grad in routers.values():
        assert not param.place
        assert {p.axis for p in grad.place} == set(mesh.axes)  # under sequence parallelism tp has other tokens too


def test_experts_have_a_gradient_buffer_of_their_own() -> None:
    layout = LAYOUTS["edp2-ep2-tp2"]
    mesh, (placed, _) = mesh_of(layout), pair(PLAIN, layout)
    edp, ep, tp = mesh.axes
    assert [(axis.name, axis.size) for axis in mesh.axes] == [("edp", 2), ("ep", 2), ("tp", 2)]
    dense, experts = count_stage_params([(placed, 1)], mesh).buffers
    assert (dense.of_experts, dense.axes) == (False, (edp, ep))
    assert (experts.of_experts, experts.axes) == (True, (edp,))
    # each rank has 8 / ep experts of d (2 f) + f d, f = 8 over etp
    assert experts.elements == 8 // 2 * (HIDDEN * 2 * 8 + 8 * HIDDEN) // 2
    # 12 packed heads and 4 heads of output over tp; 2 norms and the router whole
    assert dense.elements == (12 + 4) * 4 * HIDDEN // 2 + 2 * HIDDEN + HIDDEN * 8
    assert tp in {p.axis for p in placed["moe.experts.down"].inputs[1].place}


# mutations: what is wrong is seen --------------------------------------------------------------------------------------


def synced(ranks: Ranks, name: str, axes: Sequence[Axis]) -> Array:
    """A gradient after its ranks have summed it over these axes.

    Raises: AssertionError where ranks that hold the same parameters are left with different gradients.
    """
    tensor, array = ranks.tensors[name], ranks.arrays[name]
    for axis in axes:
        array = reduce(array, ranks.axes.index(axis))
    home = attrs.evolve(tensor, place=dual_place(tensor.place))
    for i, axis in enumerate(ranks.axes):
        assert home.on(axis) or np.allclose(array, array.take([0], i)), f"{name} differs between the ranks of {axis}"
    return assemble(home, array, ranks.axes)


def test_experts_are_summed_over_their_own_data_ranks_and_routers_over_all() -> None:
    layout = LAYOUTS["edp2-ep2-tp2"]
    placed, single = pair(PLAIN, layout)
    mine, reference = run(placed, entering(placed)), run(single, entering(single))
    groups, names, expected = mesh_of(layout).groups, gradients_of(placed), gradients_of(single)
    expert, router = "moe.experts.down.weight", "moe.router.weight"
    np.testing.assert_allclose(synced(mine, names[expert], groups["edp"]), reference.value(expected[expert]))
    with pytest.raises(AssertionError, match="Not equal"):
        np.testing.assert_allclose(synced(mine, names[expert], groups["dp"]), reference.value(expected[expert]))
    everywhere = (*groups["dp"], *groups["tp"])
    np.testing.assert_allclose(synced(mine, names[router], everywhere), reference.value(expected[router]))
    with pytest.raises(AssertionError, match="differs between the ranks"):
        synced(mine, names[router], (*groups["edp"], *groups["tp"]))


def only_its_own(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Instead of an all-to-all a slice: the rank keeps the place of its own tokens, and sees its own experts only."""
    before, after = op.inputs[0], op.outputs[0]
    whole = np.zeros(before.shape)
    whole[_slice(before.place, before.shape, where)] = x[0]
    return (whole[_slice(after.place, after.shape, where)],)


def _slice(place: Place, shape: tuple[int, ...], where: Where) -> tuple[slice, ...]:
    cuts = [(0, size) for size in shape]
    for placement in place:
        if placement.dim is not None:
            start, size = cuts[placement.dim]
            size //= placement.axis.size
            index = where.index[[axis.name for axis in where.axes].index(placement.axis.name)]
            cuts[placement.dim] = (start + index * size, size)
    return tuple(slice(start, start + size) for start, size in cuts)


def test_every_single_all_to_all_is_needed() -> None:
    placed, single = pair(PLAIN, LAYOUTS["dp2-tp2-ep2-etp2"])
    meanings = {**MEANINGS, "relu": only_its_own}  # a kind that this layer does not use
    names = [op.name for op in placed.ops if op.kind == "all_to_all"]
    assert len(names) == 2 + 2  # dispatch and combine, forward and backward
    for name in names:
        ops = tuple(attrs.evolve(op, kind="relu", group=()) if op.name == name else op for op in placed.ops)
        with pytest.raises(AssertionError, match="Not equal"):
            assert_same(attrs.evolve(placed, ops=ops), single, meanings)


def like_a_dense_parameter(mesh: Mesh, param: Tensor) -> Place:
    """The wrong home: expert weights are not split over ep."""
    return mesh._split(param.dims, PARAM_LETTERS)


def like_an_expert(mesh: Mesh, param: Tensor) -> Place:
    """The wrong home: whatever has a letter E is dealt to the ranks of ep, the router too."""
    return mesh._split(param.dims, EXPERT_LETTERS if "E" in param.dims else PARAM_LETTERS)


def test_experts_do_not_live_like_dense_parameters(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(Mesh, "home_of_param", like_a_dense_parameter)
    with pytest.raises(PlacementError, match=r"parameter moe.experts.gate_up.weight .* would have to move"):
        insert_collectives(logical(PLAIN, 4), mesh_of(LAYOUTS["dp2-tp2-ep2-etp2"]))


def over_local_experts(kind: str) -> Row:
    """The wrong row: top-k may be taken among the experts of a rank."""
    return attrs.evolve(row_of(kind), whole="") if kind == "topk" else row_of(kind)


def test_a_router_that_is_dealt_to_the_ranks_of_experts_has_to_gather_its_logits(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(Mesh, "home_of_param", like_an_expert)
    assert assert_same(*pair(PLAIN, LAYOUTS["dp2-tp2-ep2-etp2"])) > 0  # a detour, but sound
    monkeypatch.setattr("stepgraph.lowering.collectives.row_of", over_local_experts)
    with pytest.raises(AssertionError, match="Not equal"):
        assert_same(*pair(PLAIN, LAYOUTS["dp2-tp2-ep2-etp2"]))
