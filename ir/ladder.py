"""The ladder: which way each edge of the drawing runs, and which nodes stand on one rung.

Forward runs down, backward runs up beside it. So edges of backward are turned round for the layout, and an op and what
belongs to it (its gradients, its second execution) share a rung wherever the order of the two columns allows it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from urllib.parse import quote

import attrs

from stepgraph.ir.graph import Graph
from stepgraph.ir.op import AGAIN, Op, Phase
from stepgraph.ir.rows import Rule
from stepgraph.ir.rungs import Order
from stepgraph.ir.table import row_of
from stepgraph.ir.tensor import Kind, Tensor


class Way(enum.Enum):
    """How an edge runs; ACROSS has no say in the layout."""

    DOWN = "down"
    UP = "up"  # laid out from reader to producer: the picture stays half as high, and layout takes no minutes
    ACROSS = "across"


class Part(enum.Enum):
    """What an edge is in its column: TRUNK is kept straight, BYPASS (a residual) is led round the trunk."""

    TRUNK = "trunk"
    BRANCH = "branch"
    BYPASS = "bypass"


@attrs.frozen
class Edge:
    """Data from `source` to `target`, both node ids. saved: kept for backward (or made again for it)."""

    source: str
    target: str
    way: Way
    saved: bool
    tensors: tuple[Tensor, ...]
    part: Part = Part.BRANCH

    @property
    def downward(self) -> tuple[str, str]:
        """The two ends, the upper one in the picture first."""
        return (self.target, self.source) if self.way is Way.UP else (self.source, self.target)


def op_id(name: str) -> str:
    """A node id: any name, in characters that mean nothing in DOT.

    `=` and two hex digits stand for every other byte; `%`, the usual way, begins Graphviz's own anonymous names.
    """
    return quote(name, safe="").replace("~", "%7E").replace("%", "=") or "="


def enter_id(name: str) -> str:
    """The node of a tensor that enters; no op has such an id."""
    return f"~{op_id(name)}"


def leave_id(name: str) -> str:
    """The node of a tensor that leaves."""
    return f"{op_id(name)}~"


def entering(graph: Graph) -> tuple[Tensor, ...]:
    """Tensors that come from outside and are drawn: streams, gradients, token ids; neither parameters nor state."""
    return tuple(t for t in graph.inputs if t.kind not in (Kind.PARAM, Kind.STATE))


def leaving(graph: Graph) -> tuple[Tensor, ...]:
    """What is handed to the neighbours, where an op makes it: the stream and its gradient."""
    made = {t.name: t for op in graph.ops for t in op.outputs}
    return tuple(made[name] for name in (graph.ports.leaves, graph.ports.grad_leaves) if name in made)


def column_of(graph: Graph, tensor: Tensor) -> Phase:
    """Where a tensor's ellipse stands: with the op that makes it, else with its first reader."""
    producer = graph.producer(tensor)
    return producer.phase if producer else graph.users(tensor)[0].phase


def edges_of(graph: Graph) -> tuple[Edge, ...]:
    """Every edge of the drawing; tensors between the same two ends share one."""
    found: dict[tuple[str, str], Edge] = {}
    for edge in (*_reads(graph), *_exits(graph)):
        known = found.get((edge.source, edge.target))
        tensors = (*(known.tensors if known else ()), *edge.tensors)
        found[edge.source, edge.target] = attrs.evolve(edge, tensors=tuple(dict.fromkeys(tensors)))
    order = order_of(graph, tuple(found.values()))
    roles = {op_id(op.name): op.role for op in graph.ops}
    return tuple(attrs.evolve(e, part=_part(e, order, roles.get(e.target, ""))) for e in found.values())


def order_of(graph: Graph, edges: tuple[Edge, ...]) -> Order:
    """What stands above what."""
    streams = [*(enter_id(t.name) for t in entering(graph)), *(leave_id(t.name) for t in leaving(graph))]
    nodes = [*streams, *(op_id(op.name) for op in graph.ops)]
    return Order(nodes, [edge.downward for edge in edges if edge.way is not Way.ACROSS])


def rungs_of(graph: Graph, edges: tuple[Edge, ...]) -> tuple[tuple[str, ...], ...]:
    """Nodes that stand side by side, left to right: forward, what runs again, weight gradients, the gradient's trunk.

    Partners are put on one rung one pair after the other, as long as that breaks no order.
    """
    order = order_of(graph, edges)
    for left, right in _pairs(graph):
        order.merge(left, right)
    place = {op_id(op.name): _place(op) for op in graph.ops} | {enter_id(graph.ports.enters): 0}
    return tuple(tuple(sorted(rung, key=lambda node: place.get(node, _TRUNK))) for rung in order.rungs())


def _reads(graph: Graph) -> Iterator[Edge]:
    drawn = {t.name for t in entering(graph)}
    above = _inner_chain(graph)
    for op in graph.ops:
        for tensor in op.inputs:
            producer = above.get(op.name) or graph.producer(tensor)
            if producer:
                yield _edge(op_id(producer.name), producer.phase, producer.role, op, tensor)
            elif tensor.name in drawn:
                yield _edge(enter_id(tensor.name), column_of(graph, tensor), "", op, tensor)


def _inner_chain(graph: Graph) -> dict[str, Op]:
    """Collectives inside an op run one after the other: each hangs below the one before it."""
    last: dict[str, Op] = {}
    above: dict[str, Op] = {}
    for op in graph.ops:
        if op.role == "inner" and op.of in graph.by_name:
            above[op.name] = last.get(op.of, graph[op.of])
            last[op.of] = op
    return above


def _edge(source: str, phase: Phase, role: str, op: Op, tensor: Tensor) -> Edge:
    saved = (phase is Phase.FORWARD and op.phase is Phase.BACKWARD) or (role in AGAIN and op.role not in AGAIN)
    way = _way(phase, role, op)
    return Edge(source, op_id(op.name), way, saved, (tensor,))


def _way(phase: Phase, role: str, op: Op) -> Way:
    """Which way data made in `phase` by an op of that role runs to `op`."""
    if phase is not op.phase or (role == "recompute" and op.role not in AGAIN):
        return Way.ACROSS
    return Way.UP if phase is Phase.BACKWARD and role not in AGAIN else Way.DOWN


def _exits(graph: Graph) -> Iterator[Edge]:
    for tensor in leaving(graph):
        op = graph.producers[tensor.name]
        way = Way.UP if op.phase is Phase.BACKWARD else Way.DOWN
        yield Edge(op_id(op.name), leave_id(tensor.name), way, False, (tensor,))


def _part(edge: Edge, order: Order, role: str) -> Part:
    """role: of the op at the target."""
    if edge.way is Way.ACROSS or role == "dw":
        return Part.BRANCH
    steps = order.steps_round(*edge.downward)
    if steps == 0:
        return Part.TRUNK
    # two steps bend round a single box by themselves; beside what runs again there is no room
    return Part.BRANCH if steps == 2 or role in AGAIN else Part.BYPASS


_NEAREST = ("recompute", "regather", "dx", "dw", "sum")
"""Which partners are put together first: what mirrors the op itself before what sums up around it."""

_TRUNK = 3


def _place(op: Op) -> int:
    if op.phase is Phase.FORWARD:
        return 0
    return {"recompute": 1, "regather": 2, "dw": 2}.get(op.role, _TRUNK)


def _pairs(graph: Graph) -> Iterator[tuple[str, str]]:
    """A forward node and the backward node that should face it, the closest relatives first."""
    for role in _NEAREST:
        for op in reversed(graph.phase(Phase.BACKWARD)):
            if op.role == role and op.of in graph.by_name:
                yield op_id(_facing(graph, op).name), op_id(op.name)
    ports = graph.ports
    yield enter_id(ports.enters), leave_id(ports.grad_leaves)
    yield leave_id(ports.leaves), enter_id(ports.grad_enters)


def _facing(graph: Graph, op: Op) -> Op:
    """The op's forward partner; for a collective on a gradient, the one that moves what the partner makes."""
    partner = graph[op.of]
    if row_of(op.kind).rule is not Rule.COLLECTIVE or op.role in AGAIN:
        return partner
    readers = [user for t in partner.outputs for user in graph.users(t) if user.phase is Phase.FORWARD]
    return next((user for user in readers if row_of(user.kind).rule is Rule.COLLECTIVE), partner)
