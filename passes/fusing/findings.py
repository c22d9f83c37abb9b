"""What looking for a pattern comes to: what is bound so far, a place found, a near miss, and what may lie between ops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op
from stepgraph.ir.rows import Rule
from stepgraph.ir.table import CONVERSIONS, row_of
from stepgraph.ir.tensor import Tensor


@attrs.frozen
class Gap:
    """What keeps a pattern apart that is there otherwise: a collective, a stage boundary or a third layer.

    op: the reader, or the collective itself.
    """

    code: str
    op: str
    text: str


@attrs.frozen
class Bound:
    """What is known so far: tensors by parameter, ops by pattern node (an absent optional op is None), gaps."""

    tensors: Mapping[str, Tensor]
    ops: Mapping[int, Op | None]
    gaps: tuple[Gap, ...] = ()

    @property
    def depth(self) -> int:
        """How much of the pattern is bound."""
        return len(self.tensors) + len(self.ops)

    @property
    def present(self) -> tuple[Op, ...]:
        """The ops that are bound, those of absent nodes left out."""
        return tuple(op for op in self.ops.values() if op is not None)


@attrs.frozen
class Miss:
    """Why a pattern did not match: how far it got, at which op, what was there."""

    depth: int
    op: str
    reason: str


@attrs.frozen
class Found:
    """A place where the pattern's structure is there, legal or not; members in program order.

    gaps: what lies between the members, none when they meet directly.
    """

    members: tuple[Op, ...]
    tensors: Mapping[str, Tensor]
    gaps: tuple[Gap, ...] = ()


def behind(graph: Graph, op: Op) -> Op | None:
    """The op whose result conversions hand on."""
    while op.kind in CONVERSIONS:
        source = graph.producer(op.inputs[0])
        if source is None:
            return None
        op = source
    return op


def kinds_handed_over(graphs: Iterable[Graph]) -> frozenset[str]:
    """Kinds of the ops whose results a `send` takes to another stage."""
    hops = ((graph, op) for graph in graphs for op in graph.ops if row_of(op.kind).rule is Rule.POINT_TO_POINT)
    sends = ((graph, op) for graph, op in hops if op.inputs)
    makers = (graph.producer(op.inputs[0]) for graph, op in sends)
    return frozenset(op.kind for op in makers if op is not None)
