"""The proof of the placement algebra: a placed graph, run on simulated ranks, computes what one rank computes.

One rank is held against finite differences first, so that what the others are compared with is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs
import numpy as np
import pytest

from meaning import MEANINGS
from meaning_rank import Array, Meaning, Where
from ranks import assemble, run, scatter
from ranks_compared import VOCAB, assert_finite_differences, assert_same, placed_on
from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.program import Program
from stepgraph.ir.rows import Row
from stepgraph.ir.table import CONVERSIONS, TABLE, row_of
from stepgraph.ir.tensor import Axis, Place, Placement, Tensor
from stepgraph.lowering.conversions import PlacementError, Writer
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import logical_templates, lower
from stepgraph.lowering.mesh import mesh_of
from stepgraph.lowering.model import Attention, Layer, Mlp, Model
from stepgraph.lowering.placement import At, result_place

SEQ, MICRO_BATCH = 8, 2
TEMPLATES = ("embedding", "dense", "head")
PARTS = (*TEMPLATES, "whole")
"""The templates by themselves, and a stage of two layers written out."""


def small(name: str, attention: Attention, mlp: Mlp, norm: str, *, tied: bool = False, positions: int = 0) -> Model:
    layer = Layer(attention, mlp, norm)
    return Model(name, name, 16, VOCAB, (layer, layer), norm, tied, positions, "bf16", 64)


def attending(kv_heads: int, *, qkv_bias: bool, out_bias: bool, rotary_dim: int) -> Attention:
    return Attention(8, kv_heads, 4, qkv_bias, out_bias, rotary_dim)


GATED = Mlp(ffn=16, gated=True, activation="silu", bias=False)
PLAIN = attending(8, qkv_bias=True, out_bias=True, rotary_dim=0)
LLAMA = small("llama", attending(4, qkv_bias=False, out_bias=False, rotary_dim=4), GATED, "rmsnorm")
QWEN2 = small("qwen2", attending(4, qkv_bias=True, out_bias=False, rotary_dim=4), GATED, "rmsnorm", tied=True)
BIASED = small(  # a llama with attention_bias and mlp_bias
    "biased", attending(2, qkv_bias=True, out_bias=True, rotary_dim=4), attrs.evolve(GATED, bias=True), "rmsnorm"
)
GPT2 = small("gpt2", PLAIN, Mlp(16, False, "gelu", True), "layernorm", tied=True, positions=12)
OPT = small("opt", PLAIN, Mlp(16, False, "relu", True), "layernorm", positions=10)
MODELS = (LLAMA, QWEN2, GPT2, OPT)


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "tp2": Layout(tp=2),
        "tp4": Layout(tp=4),
        "tp4-no-sp": Layout(tp=4, sp=False),
        "dp4": Layout(dp=4),
        "dp2-tp2": Layout(dp=2, tp=2),
        "dp2-tp2-no-sp": Layout(dp=2, tp=2, sp=False),
        "tp2-keep": Layout(tp=2, tp_regather=False),
        "tp2-selective": Layout(tp=2, recompute="selective"),
        "dp2-tp2-full": Layout(dp=2, tp=2, recompute="full"),
        "tp2-no-sp-full": Layout(tp=2, sp=False, recompute="full"),
    }
)


# what is run ---------------------------------------------------------------------------------------------------------


def lowered(model: Model, layout: Layout) -> Program:
    return lower(model, attrs.evolve(layout, seq=SEQ, micro_batch=MICRO_BATCH))


def on_one_rank(model: Model, layout: Layout) -> Program:
    """The same micro-batch on a single rank: what the data ranks share out, it has all alone."""
    return lower(model, Layout(seq=SEQ, micro_batch=MICRO_BATCH * layout.dp))


def part_of(program: Program, part: str) -> Graph:
    """A template or the whole stage, without the step."""
    graph = program.unroll(0) if part == "whole" else program[part]
    return attrs.evolve(graph, ops=(*graph.phase(Phase.FORWARD), *graph.phase(Phase.BACKWARD)))


def assert_layout(model: Model, layout: Layout, part: str, meanings: Mapping[str, Meaning] = MEANINGS) -> int:
    placed, single = lowered(model, layout), on_one_rank(model, layout)
    return assert_same(part_of(placed, part), part_of(single, part), meanings)


# the tests -----------------------------------------------------------------------------------------------------------


def test_every_kind_of_forward_and_backward_has_a_meaning() -> None:
    elsewhere = {*CONVERSIONS, "send", "recv", "grad_norm", "adamw"}  # the runner; between stages; once per step
    assert MEANINGS.keys() | elsewhere == TABLE.keys()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_one_rank_agrees_with_finite_differences(model: Model, part: str) -> None:
    assert assert_finite_differences(part_of(on_one_rank(model, Layout()), part)) > 0


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_all_ranks_together_compute_what_one_rank_computes(model: Model, layout: Layout, part: str) -> None:
    assert assert_layout(model, layout, part) > 0


def test_the_number_of_gradients_compared() -> None:
    # llama: 2 norms, qkv, out, gate_up, down = 6 and the stream; gpt2: 2 norms of 2, 4 weights of 4 biases = 12
    assert assert_layout(LLAMA, LAYOUTS["tp2"], "dense") == 6 + 1
    assert assert_layout(GPT2, LAYOUTS["tp2"], "dense") == 2 * 2 + 4 * 2 + 1
    # embedding (tokens, positions), 2 layers, head (norm of 2, table)
    assert assert_layout(GPT2, LAYOUTS["tp2"], "whole") == 2 + 2 * 12 + 3


@pytest.mark.parametrize("layout", ["tp2", "dp2-tp2-no-sp", "dp2-tp2-full"])
def test_biases_of_gate_up_and_of_row_parallel_projections(layout: str) -> None:
    # 2 norms; weight and bias of qkv, out, gate_up, down; the stream
    assert assert_layout(BIASED, LAYOUTS[layout], "dense") == 2 + 4 * 2 + 1


@pytest.mark.parametrize("part", range(len(TEMPLATES)))
@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(cp=2, tp=2, sp=True), Layout(dp=2, cp=2, tp=2, sp=False)])
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=lambda model: model.name)
def test_a_split_sequence_follows_from_the_same_rule(model: Model, layout: Layout, part: int) -> None:
    """Layouts do not offer context parallelism yet, but the algebra has nothing to add for it."""
    logical = logical_templates(model, MICRO_BATCH * layout.dp, SEQ)[part]
    assert assert_same(placed_on(mesh_of(layout), logical), placed_on(mesh_of(Layout()), logical)) > 0


WRONG = (AssertionError, PlacementError)
MESH = mesh_of(Layout(cp=2, tp=2, sp=False))
CP, TP = Axis("cp", 2, 2), Axis("tp", 2, 1)
PLACES = (None, Placement(TP, 0), Placement(TP, 1), Placement(TP, None))


@pytest.mark.parametrize("outer", [(), (Placement(CP, 0),), (Placement(CP, 1),), (Placement(CP, None),)])
@pytest.mark.parametrize("after", PLACES[:3])
@pytest.mark.parametrize("before", PLACES)
def test_a_conversion_keeps_the_value(outer: Place, before: Placement | None, after: Placement | None) -> None:
    tensor = Tensor("x", "sd", (8, 4), place=(*outer, *((before,) if before else ())))
    writer = Writer(MESH)
    moved = writer.convert(tensor, (*outer, *((after,) if after else ())), Op("", "", (), ()))
    twice = Op("y", "add", (moved, moved), (attrs.evolve(moved, name="y"),))
    value = np.arange(32.0).reshape(8, 4)
    np.testing.assert_allclose(run(Graph("g", (*writer.ops, twice)), {"x": value}).value("y"), 2 * value)


def test_two_axes_of_one_dimension_are_gathered_inside_out() -> None:
    tensor = Tensor("x", "s", (8,), place=(Placement(CP, 0), Placement(TP, 0)))
    ranks = scatter(tensor, np.arange(8.0), (CP, TP))
    assert ranks[1, 0].tolist() == [4, 5]  # cp rank 1 has the second half, of which tp rank 0 has the first
    assert assemble(tensor, ranks, (CP, TP)).tolist() == list(range(8))
    whole = Op("y", "all_gather", (tensor,), (attrs.evolve(tensor, name="y", place=()),), group=(CP, TP))
    assert run(Graph("g", (whole,)), {"x": np.arange(8.0)}).arrays["y"][1, 1].tolist() == list(range(8))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((Placement(CP, 0), Placement(TP, 0)), (Placement(TP, 0),)),
        ((Placement(TP, 0),), (Placement(CP, 0), Placement(TP, 0))),
        ((Placement(CP, None), Placement(TP, 0)), (Placement(CP, 0), Placement(TP, 0))),
        ((Placement(CP, 0),), (Placement(TP, 0),)),
    ],
    ids=["gather", "slice", "reduce-scatter", "slice-then-gather"],
)
def test_an_outer_axis_cannot_move_while_an_inner_one_splits_the_same_dimension(before: Place, after: Place) -> None:
    """[s/cp/tp] -> [s/tp]: tp rank 0 would need the first half, and its cp group holds the first and third quarter."""
    tensor, writer = Tensor("x", "s", (8,), place=before), Writer(MESH)
    with pytest.raises(WRONG):
        writer.convert(tensor, after, Op("", "", (), ()))
        run(Graph("g", tuple(writer.ops)), {"x": np.arange(8.0)})


def test_several_axes_move_together() -> None:
    both = ((Placement(CP, 0), Placement(TP, 0)), (Placement(CP, 1), Placement(TP, 1)))
    tensor, writer = Tensor("x", "sd", (8, 4), place=both[0]), Writer(MESH)
    moved = writer.convert(tensor, both[1], Op("", "", (), ()))
    assert [op.kind for op in writer.ops] == ["all_to_all"]
    value = np.arange(32.0).reshape(8, 4)
    ranks = run(Graph("g", tuple(writer.ops)), {"x": value})
    np.testing.assert_array_equal(ranks.value(moved.name), value)
    assert ranks.arrays[moved.name][1, 0].tolist() == value[:, 2:3].tolist()  # cp rank 1, tp rank 0: third column


def test_routed_tokens_come_back_in_order() -> None:
    """An outer axis may leave their sequence, which mixes up the tokens until it returns."""
    place = (Placement(CP, 1), Placement(TP, 1))
    tensor, writer = Tensor("x", "Es", (2, 8), place=place, fraction=(1, 2)), Writer(MESH)
    sent = writer.convert(tensor, (Placement(CP, 0), Placement(TP, 1)), Op("", "", (), ()))
    back = writer.convert(sent, place, Op("", "", (), ()))
    value = np.arange(16.0).reshape(2, 8)
    ranks = run(Graph("g", tuple(writer.ops)), {"x": value})
    assert ranks.value(sent.name)[0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    np.testing.assert_array_equal(ranks.value(back.name), value)


# mutations: a wrong rule is seen -------------------------------------------------------------------------------------

LOWERING = "stepgraph.lowering"


def nothing_pends(letters: str, at: At, axes: Sequence[Axis], inner: str = "") -> Place:
    """The wrong rule: a result that lacks the split letter is taken for replicated."""
    return tuple(p for p in result_place(letters, at, axes, inner) if p.dim is not None)


@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("module", ["collectives", "backward"])
def test_a_summed_letter_has_to_leave_a_pending_sum(module: str, sp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{LOWERING}.{module}.result_place", nothing_pends)
    with pytest.raises(AssertionError, match="differs between the ranks of tp"):
        assert_layout(LLAMA, Layout(tp=2, sp=sp), "dense")


def test_gradients_of_a_data_rank_are_only_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{LOWERING}.backward.result_place", nothing_pends)
    with pytest.raises(AssertionError, match="differs between the ranks of dp"):
        assert_layout(LLAMA, LAYOUTS["dp4"], "dense")


@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("wrong", [lambda place: place, lambda place: ()], ids=["same", "replicated"])
def test_the_gradient_is_placed_as_the_dual(wrong: object, sp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{LOWERING}.backward.dual_place", wrong)
    with pytest.raises(WRONG):
        assert_layout(LLAMA, Layout(tp=2, sp=sp), "dense")


def without_its_sum(graph: Graph, name: str) -> Graph:
    """The graph in which a reduce-scatter only slices."""
    assert graph[name].kind == "reduce_scatter"
    return attrs.evolve(graph, ops=tuple(attrs.evolve(op, kind="slice") if op.name == name else op for op in graph.ops))


def test_every_single_reduce_scatter_is_needed() -> None:
    placed, single = (part_of(p, "dense") for p in (lowered(LLAMA, Layout(tp=2)), on_one_rank(LLAMA, Layout(tp=2))))
    names = [op.name for op in placed.ops if op.kind == "reduce_scatter"]
    assert len(names) == 2 + 2  # forward: attention and MLP outputs; backward: their normalised inputs
    for name in names:
        with pytest.raises(AssertionError, match="Not equal"):
            assert_same(without_its_sum(placed, name), single)


def without(graph: Graph, name: str) -> Graph:
    """The graph in which the readers of a collective read what it should have moved, under its claims."""
    dropped = graph[name]
    (source,), (moved,) = dropped.inputs, dropped.outputs
    readers = [attrs.evolve(op, inputs=tuple(source if t == moved else t for t in op.inputs)) for op in graph.ops]
    return attrs.evolve(graph, ops=tuple(op for op in readers if op.name != name))


def test_every_single_all_reduce_is_needed() -> None:
    layout = Layout(tp=2, sp=False)
    placed, single = part_of(lowered(GPT2, layout), "whole"), part_of(on_one_rank(GPT2, layout), "whole")
    names = [op.name for op in placed.ops if op.kind == "all_reduce" and op.role != "inner"]
    assert len(names) == 1 + 2 * (2 + 2) + 1  # embedding; layers forward and backward; the head's input, backward
    for name in names:
        with pytest.raises(AssertionError, match="differs between the ranks of tp"):
            assert_same(without(placed, name), single)


def split_in_thirds(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The wrong packing: all query heads, all key heads, all value heads."""
    queries, keys = (t.local_shape[2] for t in op.outputs[:2])
    q, k, v = np.split(x[0], (queries, queries + keys), axis=2)
    return q, k, v


def join_thirds(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The inverse of `split_in_thirds`."""
    return (np.concatenate(x, axis=2),)


def test_heads_have_to_be_packed_group_by_group() -> None:
    thirds: dict[str, Meaning] = {**MEANINGS, "split_qkv": split_in_thirds, "join_qkv": join_thirds}
    assert assert_layout(LLAMA, LAYOUTS["dp4"], "dense", thirds) > 0  # sound by itself
    with pytest.raises(AssertionError, match="Not equal"):
        assert_layout(LLAMA, LAYOUTS["tp2"], "dense", thirds)


def test_vocabulary_rows_have_to_be_counted_from_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Where, "start", lambda *_: 0)
    for part in ("embedding", "head"):
        with pytest.raises(AssertionError, match="Not equal"):
            assert_layout(LLAMA, LAYOUTS["tp2"], part)


def only_the_branch(kind: str) -> Row:
    """The wrong row: the residual's gradient reaches the branch and not the stream."""
    return attrs.evolve(row_of(kind), passes=(1,)) if kind == "add" else row_of(kind)


def test_finite_differences_see_a_lost_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{LOWERING}.backward.row_of", only_the_branch)
    with pytest.raises(AssertionError):
        assert_finite_differences(part_of(on_one_rank(LLAMA, Layout()), "dense"))
