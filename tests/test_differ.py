"""Differences between two graphs, in words and in program order."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from samples import small
from stepgraph.ir.differ import Change, Edit, diff
from stepgraph.ir.graph import Graph, Group
from stepgraph.ir.op import Op
from stepgraph.ir.tensor import Tensor
from stepgraph.ir.text import dump
from strategies import graphs


def with_op(graph: Graph, name: str, *new: Op) -> Graph:
    """The graph with `new` in the place of the op of that name."""
    ops = [other for op in graph.ops for other in (new if op.name == name else (op,))]
    return attrs.evolve(graph, ops=tuple(ops))


def test_no_difference() -> None:
    found = diff(small(), small())
    assert not found
    assert str(found) == "no difference"


def test_changed_fields_are_told_before_and_after() -> None:
    op = small()["norm.all_gather"]
    after = attrs.evolve(op, attrs=(("bytes", 2),), origin="", module="mlp")
    found = diff(small(), with_op(small(), op.name, after))
    edits = (Edit("module", "attn", "mlp"), Edit("origin", "collectives", ""), Edit("bytes", "", "2"))
    assert found.changed == (Change("norm.all_gather", edits),)
    assert (found.added, found.removed, found.graph) == ((), (), ())
    assert str(found) == "~ norm.all_gather: module attn -> mlp, origin collectives -> (none), bytes (none) -> 2"


def test_lines_stand_in_program_order() -> None:
    graph = small()
    norm, qkv = graph["norm"], graph["qkv"]
    changed = attrs.evolve(norm, module="block")
    new = Op("gelu", "gelu", (qkv.outputs[0],), (Tensor("gelu", "b", (2,)),))
    without = with_op(graph, "norm.regather")
    after = with_op(with_op(without, "norm", changed), "qkv", qkv, new)
    # %norm.regather is read by qkv.dw and made by nobody now, so it enters
    assert str(diff(graph, after)).split("\n") == [
        "~ graph: input %norm.regather (none) -> bf16[b/dp=2 s=8 d=16] act",
        "~ norm: module attn -> block",
        "- %norm.regather : bf16[b/dp=2 s=8 d=16] act = all_gather(%norm) group=tp of=norm role=regather",
        "+ %gelu : bf16[b=2] = gelu(%qkv)",
    ]


def test_an_edited_tensor_is_told_where_it_is_made() -> None:
    graph = small()
    norm = graph["norm"]
    y = attrs.evolve(norm.outputs[0], dtype="fp8")
    gather = attrs.evolve(graph["norm.all_gather"], inputs=(y,))
    again = attrs.evolve(graph["norm.regather"], inputs=(y,))
    after = with_op(graph, "norm", attrs.evolve(norm, outputs=(y, norm.outputs[1])))
    after = with_op(with_op(after, "norm.all_gather", gather), "norm.regather", again)
    found = diff(graph, after)
    assert [change.name for change in found.changed] == ["norm"]
    assert [edit.field for edit in found.changed[0].edits] == ["outputs"]


def test_what_stands_around_the_ops_counts() -> None:
    graph = small()
    after = attrs.evolve(graph, facts=frozenset({"placed"}), outputs=graph.outputs[:1])
    assert diff(graph, after).graph == (
        Edit("facts", "backward placed", "placed"),
        Edit("outputs", "%qkv %qkv.dx %qkv.dw", "%qkv"),
    )


def test_another_order_is_a_difference() -> None:
    graph = small()
    after = attrs.evolve(graph, ops=(*graph.ops[:4], graph.ops[5], graph.ops[4], graph.ops[6]))
    assert "~ graph: order from here qkv.dx -> qkv.dw" in str(diff(graph, after))


def test_kernels_are_compared_after_the_ops() -> None:
    one, two, three = Group("one", "r", ("norm",)), Group("two", "r", ("qkv",)), Group("three", "", ("qkv.dx",), 2)
    wider = attrs.evolve(two, members=("norm.all_gather", "qkv"))
    found = diff(attrs.evolve(small(), groups=(one, two)), attrs.evolve(small(), groups=(wider, three)))
    assert found
    assert (found.ungrouped, found.grouped) == ((one, two), (wider, three))
    assert str(found).split("\n") == [
        "- kernel one = norm rule=r",
        "- kernel two = qkv rule=r",
        "+ kernel two = norm.all_gather qkv rule=r",
        "+ kernel three = qkv.dx launches=2",
    ]


def test_another_order_of_kernels_is_a_difference() -> None:
    one, two = Group("one", "r", ("norm",)), Group("two", "r", ("qkv",))
    found = diff(attrs.evolve(small(), groups=(one, two)), attrs.evolve(small(), groups=(two, one)))
    assert str(found) == "~ graph: kernels from here one -> two"


@st.composite
def pairs(draw: DrawFn) -> tuple[Graph, Graph]:
    """A graph, and the same with ops and kernels dropped, changed or put elsewhere."""
    graph = draw(graphs(4))
    kept = [op for op in graph.ops if draw(st.integers(0, 3))]
    changed = [attrs.evolve(op, module=draw(st.sampled_from((op.module, "other")))) for op in kept]
    order = draw(st.permutations(changed)) if draw(st.booleans()) else changed
    held = [group for group in graph.groups if draw(st.integers(0, 3))]
    groups = [attrs.evolve(group, kernels=draw(st.sampled_from((group.kernels, 5)))) for group in held]
    regrouped = draw(st.permutations(groups)) if draw(st.booleans()) else groups
    return graph, attrs.evolve(graph, ops=tuple(order), groups=tuple(regrouped))


@given(pairs())
def test_nothing_differs_exactly_when_the_texts_are_equal(pair: tuple[Graph, Graph]) -> None:
    a, b = pair
    assert not diff(a, a)
    assert bool(diff(a, b)) == (dump(a) != dump(b))


@given(pairs())
def test_the_way_back_adds_what_the_way_there_removes(pair: tuple[Graph, Graph]) -> None:
    a, b = pair
    there, back = diff(a, b), diff(b, a)
    assert (there.added, there.removed) == (back.removed, back.added)
    assert (there.grouped, there.ungrouped) == (back.ungrouped, back.grouped)
    assert {c.name for c in there.changed} == {c.name for c in back.changed}
    assert sorted(there.order) == sorted({op.name for op in (*a.ops, *b.ops)})
