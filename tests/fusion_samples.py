"""Graphs for fusion written by hand, and random rules that are cut out of random graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import networkx as nx
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from stepgraph.ir.graph import Graph, Ports
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.tensor import Axis, Kind, Tensor
from stepgraph.passes.fusing.pattern import FusionRule
from stepgraph.passes.fusing.recorder import Node, Var

TP = Axis("tp", 2, 1)
SIDE = (1, 64, 32)
MD = 64 * 32 * 2
"""Bytes of one tensor of the graphs below, in bf16."""


def act(name: str, kind: Kind = Kind.ACT) -> Tensor:
    return Tensor(name, "bsd", SIDE, kind=kind)


class Sketch:
    """Writes a graph op by op; operands are named, and whatever nobody made enters it."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def add(self, name: str, kind: str, *reads: str, phase: Phase = Phase.FORWARD, **changes: Any) -> None:
        """An op with one result of its own name."""
        made = attrs.evolve(Op(name, kind, tuple(map(act, reads)), (act(name),)), phase=phase)
        self.ops.append(attrs.evolve(made, **changes))

    def graph(self, *outputs: str, name: str = "hand", **changes: Any) -> Graph:
        """The graph; without outputs, what nobody reads leaves it."""
        read = {t.name for op in self.ops for t in op.inputs}
        left = [t.name for op in self.ops for t in op.outputs if t.name not in read]
        graph = Graph(name, tuple(self.ops), tuple(map(act, outputs or left)))
        return attrs.evolve(graph, **changes)


def sketched(*lines: str, outputs: Sequence[str] = ()) -> Graph:
    """Forward ops, each written `name = kind operands`, as `s = add x y`."""
    sketch = Sketch()
    for line in lines:
        name, _, kind, *reads = line.split()
        sketch.add(name, kind, *reads)
    return sketch.graph(*outputs)


def layer(name: str, *lines: str, enters: str = "x", leaves: str) -> Graph:
    """A forward-only template whose stream enters and leaves under these names."""
    graph = sketched(*lines, outputs=(leaves,))
    return attrs.evolve(graph, name=name, ports=Ports(enters=enters, leaves=leaves))


def contracted(graph: Graph) -> nx.DiGraph[str]:
    """The graph with every kernel as one node, built here with another library than the one under test uses."""
    unit = {op.name: op.name for op in graph.ops}
    unit |= {name: f"kernel {group.name}" for group in graph.groups for name in group.members}
    made = {t.name: op.name for op in graph.ops for t in op.outputs}
    drawn: nx.DiGraph[str] = nx.DiGraph()
    drawn.add_nodes_from(unit.values())
    edges = [(unit[made[t.name]], unit[op.name]) for op in graph.ops for t in op.inputs if t.name in made]
    drawn.add_edges_from((left, right) for left, right in edges if left != right)
    return drawn


POINTWISE = {1: ("gelu", "silu", "softcap"), 2: ("add", "gate_mul", "gelu_dx"), 3: ("grad_add",)}
BACKWARD = {1: ("rope_dx",), 2: ("grad_add", "gelu_dx", "silu_dx"), 3: ("grad_add",)}
HEAVY = {2: ("linear",)}


@st.composite
def chains(draw: DrawFn, most: int = 9) -> Graph:
    """A sound graph of many small ops with much reuse: pointwise ones, views, matmuls and norms with two results."""
    sketch = Sketch()
    known = ["x", "y", "z"]
    for index in range(draw(st.integers(2, most))):
        back = index >= most - 3
        phase = Phase.BACKWARD if back else Phase.FORWARD
        count = draw(st.sampled_from((1, 2, 2, 2, 3)))
        kinds = (BACKWARD if back else POINTWISE)[count]
        if not back and count == 2:
            kinds += HEAVY[2]
        reads = [draw(st.sampled_from(known[-5:])) for _ in range(count)]
        name = f"n{index}"
        sketch.add(name, draw(st.sampled_from(kinds)), *reads, phase=phase)
        known.append(name)
        if draw(st.booleans()):
            op = sketch.ops[-1]
            twin = _twin(draw, name, op)
            sketch.ops[-1] = twin
            known += [t.name for t in twin.outputs[1:]]
    outputs = draw(st.lists(st.sampled_from(known[3:]), max_size=3, unique=True))
    return sketch.graph(*outputs)


def _twin(draw: DrawFn, name: str, op: Op) -> Op:
    """The op as one of a kind with two results, or a view of two halves."""
    kind = draw(st.sampled_from(("rmsnorm", "split_latent", "gate_mul_dx")))
    count = {"rmsnorm": 2, "split_latent": 1, "gate_mul_dx": 3}[kind]
    reads = (op.inputs * 3)[:count]
    return attrs.evolve(op, kind=kind, inputs=reads, outputs=(act(name), act(f"{name}.too")))


@st.composite
def vertical_rules(draw: DrawFn, graph: Graph, name: str) -> FusionRule:
    """A rule cut out of a graph: an op, some of what it reads, some of what those read; shared parts are shared."""
    root = draw(st.sampled_from(graph.ops))
    nodes: dict[str, Node] = {}
    node = _cut(draw, graph, root, nodes, draw(st.integers(0, 3)))
    return _rule(draw, name, (node,))


@st.composite
def horizontal_rules(draw: DrawFn, graph: Graph, name: str) -> FusionRule:
    """Two or three ops that read one tensor, each with what else it reads."""
    shared = [ops for ops in graph.readers.values() if len(ops) > 1]
    if not shared:
        return draw(vertical_rules(graph, name))
    chosen = draw(st.lists(st.sampled_from(draw(st.sampled_from(shared))), min_size=2, max_size=3, unique=True))
    nodes: dict[str, Node] = {}
    return _rule(draw, name, tuple(_cut(draw, graph, op, nodes, 0) for op in chosen))


def _cut(draw: DrawFn, graph: Graph, op: Op, nodes: dict[str, Node], depth: int) -> Node:
    args: list[Var | Node] = []
    for tensor in op.inputs:
        maker = graph.producer(tensor)
        inside = maker is not None and maker.outputs[0].name == tensor.name and depth and draw(st.booleans())
        if maker is not None and inside:
            args.append(nodes.get(maker.name) or _cut(draw, graph, maker, nodes, depth - 1))
        else:
            args.append(Var(tensor.name))
    node = Node(frozenset({op.kind}), tuple(args), written=op.kind)
    nodes[op.name] = node
    return node


def _rule(draw: DrawFn, name: str, roots: tuple[Node, ...]) -> FusionRule:
    return FusionRule(name, (), roots, kernels=draw(st.sampled_from((1, 1, 2))))


@st.composite
def rules(draw: DrawFn, graph: Graph, name: str = "random") -> FusionRule:
    """A legal rule for some place of a graph."""
    return draw(st.one_of(vertical_rules(graph, name), horizontal_rules(graph, name)))


@st.composite
def graphs_with_rules(draw: DrawFn, least: int = 1, most: int = 3) -> tuple[Graph, tuple[FusionRule, ...]]:
    """A graph, and rules that have something to find in it."""
    graph = draw(chains())
    return graph, tuple(draw(rules(graph, f"r{i}")) for i in range(draw(st.integers(least, most))))


def members_of(graph: Graph) -> Mapping[str, tuple[str, ...]]:
    """Members of each kernel, by its name."""
    return {group.name: group.members for group in graph.groups}
