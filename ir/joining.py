"""Layers put together: names with prefixes, streams and gradients joined where layers meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import attrs

from stepgraph.ir.graph import Graph, Group, Ports
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.tensor import Tensor

LEFT, RIGHT = "left.", "right."
"""Prefixes of the two layers in the graph of a seam."""


def joined(name: str, layers: list[Graph], spanning: Sequence[Group], step: Graph | None) -> Graph:
    """Neighbouring layers as one graph: forward of all, backward in reverse, then the step if there is one.

    layers: each under a prefix of its own. spanning: kernels across the seams between them, members named as here.
    """
    joins = _joins(layers)
    forward = [op for layer in layers for op in layer.phase(Phase.FORWARD)]
    backward = [op for layer in reversed(layers) for op in layer.phase(Phase.BACKWARD)]
    inside = {t.name for t in joins.values()}
    parts = (*layers, step) if step else layers
    ops = tuple(_renamed(op, joins) for op in (*forward, *backward)) + (step.ops if step else ())
    outputs = tuple(t for part in parts for t in part.outputs if part is step or t.name not in inside)
    groups = (*(group for part in parts for group in part.groups), *spanning)
    whole = Graph(name, ops, outputs, _outer_ports(layers), _common_facts(layers), groups)
    return _with_sorted_groups(whole) if groups else whole


def _with_sorted_groups(graph: Graph) -> Graph:
    """Groups in the order of their first members, which do not say from which layer they came."""
    groups = sorted(graph.groups, key=lambda group: [graph.positions.get(name, -1) for name in group.members[:1]])
    return attrs.evolve(graph, groups=tuple(groups))


def respanned(group: Group, before: str, after: str) -> Group:
    """A seam's group between two layers: `left.` and `right.` become the prefixes of both."""

    def renamed(name: str) -> str:
        if name.startswith(RIGHT):
            return after + name.removeprefix(RIGHT)
        return before + name.removeprefix(LEFT)

    return attrs.evolve(group, name=renamed(group.name), members=tuple(map(renamed, group.members)))


def _outer_ports(layers: list[Graph]) -> Ports:
    first, last = layers[0].ports, layers[-1].ports
    return Ports(first.enters, last.leaves, last.grad_enters, first.grad_leaves)


def _common_facts(layers: list[Graph]) -> frozenset[str]:
    """What has been done to all layers; recomputation is done to some."""
    common = frozenset.intersection(*(layer.facts for layer in layers))
    return common | {fact for layer in layers for fact in layer.facts if fact == "recompute"}


def _joins(layers: list[Graph]) -> dict[str, Tensor]:
    """What each entering tensor is called where it is made: the neighbour's leaving tensor."""
    joins: dict[str, Tensor] = {}
    for left, right in pairwise(layers):
        if right.ports.enters:
            joins[right.ports.enters] = _made(left, left.ports.leaves)
        if left.ports.grad_enters:
            joins[left.ports.grad_enters] = _made(right, right.ports.grad_leaves)
    return joins


def _made(layer: Graph, name: str) -> Tensor:
    return next(t for t in layer.producers[name].outputs if t.name == name)


def _renamed(op: Op, joins: dict[str, Tensor]) -> Op:
    if not any(t.name in joins for t in op.inputs):
        return op
    return attrs.evolve(op, inputs=tuple(joins.get(t.name, t) for t in op.inputs))


def prefixed(graph: Graph, prefix: str) -> Graph:
    """A layer with a prefix before all its names: ops, tensors, ports, kernels."""
    renamed: dict[int, Tensor] = {}  # a tensor is one object wherever it is read, and renamed once

    def tensor(t: Tensor) -> Tensor:
        if id(t) not in renamed:
            renamed[id(t)] = attrs.evolve(t, name=prefix + t.name)
        return renamed[id(t)]

    def op(o: Op) -> Op:
        inputs, outputs = tuple(map(tensor, o.inputs)), tuple(map(tensor, o.outputs))
        of = prefix + o.of if o.of else ""
        return attrs.evolve(o, name=prefix + o.name, inputs=inputs, outputs=outputs, of=of)

    def group(g: Group) -> Group:
        return attrs.evolve(g, name=prefix + g.name, members=tuple(prefix + name for name in g.members))

    ports = Ports(*(prefix + port if port else "" for port in attrs.astuple(graph.ports)))
    ops, groups = tuple(map(op, graph.ops)), tuple(map(group, graph.groups))
    return Graph(prefix + graph.name, ops, tuple(map(tensor, graph.outputs)), ports, graph.facts, groups)
