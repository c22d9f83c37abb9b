"""The ladder: which way each edge of the drawing runs, and which ops stand on one rung.

Forward runs down, backward runs up beside it. So backward edges are turned round for the layout, and an op and what
belongs to it (its gradients, its second execution) share a rung wherever the order of the two columns allows it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping

import attrs

from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.rows import Rule
from stepgraph.ir.table import row_of
from stepgraph.ir.tensor import Kind, Tensor

AGAIN = ("recompute", "regather")
"""Roles of ops that run a forward op once more: they run down, as it did."""


class Way(enum.Enum):
    """How an edge is drawn."""

    DOWN = "down"
    UP = "up"  # emitted from reader to producer: the layout stays a ladder, half as high
    ACROSS = "across"  # does not bear on the order


@attrs.frozen
class Edge:
    """From what makes tensors to what reads them; ops by name, tensors that enter or leave as `~name`, `name~`."""

    source: str
    target: str
    way: Way
    saved: bool
    tensors: tuple[Tensor, ...]
    main: bool = True
    skip: bool = False


def entering(graph: Graph) -> tuple[Tensor, ...]:
    """Tensors that come from outside and are drawn: streams, gradients, token ids; not parameters, not state."""
    return tuple(t for t in graph.inputs if t.kind not in (Kind.PARAM, Kind.STATE))


def leaving(graph: Graph) -> tuple[Tensor, ...]:
    """What is handed to the neighbours: the stream and its gradient, where an op makes them."""
    made = {t.name: t for op in graph.ops for t in op.outputs}
    return tuple(made[name] for name in (graph.ports.leaves, graph.ports.grad_leaves) if name in made)


def edges_of(graph: Graph) -> tuple[Edge, ...]:
    """Every edge of the drawing; tensors between the same two ends share one."""
    found: dict[tuple[str, str], Edge] = {}
    for edge in (*_reads(graph), *_exits(graph)):
        known = found.get((edge.source, edge.target))
        tensors = (*(known.tensors if known else ()), *edge.tensors)
        found[edge.source, edge.target] = attrs.evolve(edge, tensors=tuple(dict.fromkeys(tensors)))
    return _with_trunk(graph, tuple(found.values()))


def _with_trunk(graph, edges):
    merging = _Classes([_downward(edge) for edge in edges if edge.way is not Way.ACROSS])
    def main(e):
        if e.way is Way.ACROSS: return False
        a, b = _downward(e)
        op = graph.by_name.get(e.target)
        if op is not None and op.role=="dw": return False
        return not any(merging._reaches(x, b) for x in merging.below[a] - {b})
    def skip(e):
        if e.way is Way.ACROSS: return False
        a, b = _downward(e)
        if any(b in merging.below[x] for x in merging.below[a]): return False
        return any(merging._reaches(x, b) for x in merging.below[a] - {b})
    return tuple(attrs.evolve(e, main=main(e), skip=skip(e)) for e in edges)


def rungs(graph: Graph, edges: tuple[Edge, ...]) -> tuple[tuple[str, ...], ...]:
    """Nodes that stand side by side: classes of two and more, merged greedily as long as no order is broken."""
    merging = _Classes([_downward(edge) for edge in edges if edge.way is not Way.ACROSS])
    for left, right in _pairs(graph):
        merging.merge(left, right)
    return tuple(tuple(members) for members in merging.members.values() if len(members) > 1)


def phase_of(graph: Graph, tensor: Tensor) -> Phase:
    """The column of a tensor that enters: that of its first reader."""
    return graph.users(tensor)[0].phase


def _reads(graph: Graph) -> Iterator[Edge]:
    drawn = {t.name for t in entering(graph)}
    for op in graph.ops:
        for tensor in op.inputs:
            producer = graph.producer(tensor)
            if producer:
                yield _edge(producer.name, producer.phase, producer.role, op, tensor)
            elif tensor.name in drawn:
                yield _edge(f"~{tensor.name}", phase_of(graph, tensor), "", op, tensor)


def _edge(source: str, phase: Phase, role: str, op: Op, tensor: Tensor) -> Edge:
    kept = phase is Phase.FORWARD and op.phase is Phase.BACKWARD
    remade = role in AGAIN and op.role not in AGAIN
    if kept or remade or phase is not op.phase:
        return Edge(source, op.name, Way.ACROSS, kept or remade, (tensor,))
    upward = phase is Phase.BACKWARD and op.role not in AGAIN
    return Edge(source, op.name, Way.UP if upward else Way.DOWN, False, (tensor,))


def _exits(graph: Graph) -> Iterator[Edge]:
    for tensor in leaving(graph):
        op = graph.producers[tensor.name]
        way = Way.UP if op.phase is Phase.BACKWARD else Way.DOWN
        yield Edge(op.name, f"{tensor.name}~", way, False, (tensor,))


def _downward(edge: Edge) -> tuple[str, str]:
    return (edge.source, edge.target) if edge.way is Way.DOWN else (edge.target, edge.source)


_NEAREST = ("recompute", "regather", "dx", "dw", "sum")
"""Which partner is placed first: what mirrors the op itself before what sums up around it."""


def _pairs(graph: Graph) -> Iterator[tuple[str, str]]:
    """Forward node and the backward node that should face it, the closest relatives first."""
    ports = graph.ports
    for role in _NEAREST:
        for op in reversed(graph.phase(Phase.BACKWARD)):
            if op.role == role and op.of in graph.by_name:
                yield _facing(graph, op), op.name
    yield f"~{ports.enters}", f"{ports.grad_leaves}~"
    yield f"{ports.leaves}~", f"~{ports.grad_enters}"


def _facing(graph: Graph, op: Op) -> str:
    """The op's forward partner; for a collective, the one that moves what the partner makes."""
    partner = graph[op.of]
    if row_of(op.kind).rule is not Rule.COLLECTIVE or op.role in AGAIN:
        return partner.name
    movers = [user for t in partner.outputs for user in graph.users(t) if user.phase is Phase.FORWARD]
    return next((user.name for user in movers if row_of(user.kind).rule is Rule.COLLECTIVE), partner.name)


class _Classes:
    """Nodes merged into classes; the order between classes stays free of cycles."""

    def __init__(self, order: list[tuple[str, str]]) -> None:
        self.members: dict[str, list[str]] = {node: [node] for pair in order for node in pair}
        self.owner = {node: node for node in self.members}
        self.below: dict[str, set[str]] = {node: set() for node in self.members}
        for above, under in order:
            self.below[above].add(under)

    def merge(self, left: str, right: str) -> None:
        """Put two nodes on one rung unless one of them has to stand above the other."""
        a, b = self._class_of(left), self._class_of(right)
        if a == b or self._reaches(a, b) or self._reaches(b, a):
            return
        for member in self.members.pop(b):
            self.members[a].append(member)
            self.owner[member] = a

    def _class_of(self, node: str) -> str:
        if node not in self.owner:  # a node without order, such as an op that nobody in its column reads
            self.owner[node], self.members[node], self.below[node] = node, [node], set()
        return self.owner[node]

    def _reaches(self, start: str, goal: str) -> bool:
        seen, todo = {start}, [start]
        while todo:
            fresh = {self.owner[under] for member in self.members[todo.pop()] for under in self.below[member]} - seen
            if goal in fresh:
                return True
            seen |= fresh
            todo.extend(fresh)
        return False
