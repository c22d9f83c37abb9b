"""Kernels in an order in which they can run, and what is said when there is none."""

from __future__ import annotations

from itertools import pairwise

import attrs
import networkx as nx
import pytest
from hypothesis import given

from samples import small
from stepgraph.ir.contraction import ContractionError, contracted_order, unit_positions
from stepgraph.ir.graph import Graph, Group
from stepgraph.ir.op import Op
from stepgraph.ir.tensor import Tensor
from strategies import graphs


def wired(edges: str, *groups: str) -> Graph:
    """A graph from `b:a c:ab`: b reads what a makes, c what a and b make. Groups are named after their members."""
    tensors = {part[0]: Tensor(part[0], "b", (4,)) for part in edges.split()}
    ops = (Op(part[0], "gelu", tuple(tensors[t] for t in part[2:]), (tensors[part[0]],)) for part in edges.split())
    return Graph("wired", tuple(ops), groups=tuple(Group(name, "rule", tuple(name)) for name in groups))


def order(graph: Graph) -> str:
    return " ".join("".join(kernel) for kernel in contracted_order(graph))


def test_without_groups_it_is_program_order() -> None:
    assert contracted_order(small()) == tuple((op.name,) for op in small().ops)
    assert contracted_order(Graph("empty", ())) == ()


def test_a_kernel_stands_where_its_last_member_does() -> None:
    assert order(wired("a: b: c:a d:b e:c", "ac")) == "b ac d e"
    assert contracted_order(wired("a: b: c:a", "ac")) == (("b",), ("a", "c"))


def test_a_kernel_runs_before_what_needs_it_even_if_a_member_stands_behind() -> None:
    # c needs a, whose kernel also holds e, which needs d: d moves up with it
    assert order(wired("a: b: c:a d: e:d", "ae")) == "b d ae c"


def test_units_are_known_by_their_last_position() -> None:
    assert unit_positions(wired("a: b: c:a d:b", "ac", "bd")) == [2, 3, 2, 3]


def test_a_group_round_an_op_that_is_not_in_it_cannot_run() -> None:
    with pytest.raises(ContractionError) as caught:
        contracted_order(wired("a: b:a c:b", "ac"))
    assert caught.value.groups == ("ac",)
    assert caught.value.cycle == (("b",), ("a", "c"))
    assert str(caught.value) == "no order for graph 'wired': b needs what kernel ac makes; kernel ac needs what b makes"


def test_two_groups_that_are_convex_can_be_cyclic_together() -> None:
    crossed = "a: b: c:a d:b"  # a -> c and b -> d
    assert order(wired(crossed, "ad")) == "b ad c"
    assert order(wired(crossed, "bc")) == "a bc d"
    with pytest.raises(ContractionError, match="kernel bc needs what kernel ad makes; kernel ad needs what kernel bc"):
        contracted_order(wired(crossed, "ad", "bc"))


def test_only_the_circle_is_told_not_the_way_to_it() -> None:
    with pytest.raises(ContractionError) as caught:
        contracted_order(wired("a: b: c:a d:b e:d f:e", "ad", "bc", "ef"))
    assert set(caught.value.groups) == {"ad", "bc"}


def test_a_long_chain_is_no_deep_call() -> None:
    # the kernel of the first and the last op needs all between, which begin with an op of their own
    chain = Graph("chain", tuple(_links(5000)), groups=(Group("ends", "", ("x", "n4999")),))
    assert contracted_order(chain)[-1] == ("x", "n4999")


def _links(count: int) -> list[Op]:
    names = ["x", *(f"n{i}" for i in range(count))]
    tensors = [Tensor(name, "b", (4,)) for name in names]
    links = [Op(a.name, "gelu", (b,), (a,)) for b, a in pairwise(tensors[1:])]
    return [Op("x", "gelu", (), (tensors[0],)), Op("n0", "gelu", (), (tensors[1],)), *links]


def test_a_member_that_is_not_there_is_no_silent_default() -> None:
    with pytest.raises(KeyError):
        contracted_order(attrs.evolve(small(), groups=(Group("g", "", ("nowhere",)),)))


def _contracted(graph: Graph) -> nx.DiGraph[str]:
    """The contracted graph by another way: networkx, nodes named after their groups."""
    node = {op.name: f"op {op.name}" for op in graph.ops}
    node |= {name: f"kernel {group.name}" for group in graph.groups for name in group.members}
    network: nx.DiGraph[str] = nx.DiGraph()
    network.add_nodes_from(node.values())
    made = {t.name: op.name for op in graph.ops for t in op.outputs}
    reads = [(node[made[t.name]], node[op.name]) for op in graph.ops for t in op.inputs if t.name in made]
    network.add_edges_from((a, b) for a, b in reads if a != b)
    return network


@given(graphs(10))
def test_there_is_an_order_exactly_when_the_contracted_graph_is_acyclic(graph: Graph) -> None:
    network = _contracted(graph)
    node = {name: f"kernel {group.name}" for group in graph.groups for name in group.members}
    try:
        found = contracted_order(graph)
    except ContractionError as error:
        names = [node.get(kernel[0], f"op {kernel[0]}") for kernel in error.cycle]
        assert all(network.has_edge(maker, reader) for reader, maker in pairwise([*names, names[0]]))
        assert any(name.startswith("kernel") for name in names)
        return
    assert nx.is_directed_acyclic_graph(network)
    assert sorted(name for kernel in found for name in kernel) == sorted(op.name for op in graph.ops)
    place = {node.get(kernel[0], f"op {kernel[0]}"): i for i, kernel in enumerate(found)}
    assert all(place[a] < place[b] for a, b in network.edges())
