"""A graph as a picture: DOT text in the ladder layout.

Forward runs down in one column, backward runs up in the column beside it, and every op faces what belongs to it. One box
per module, in it a dashed one per fused kernel; a kernel with ops of several modules stands between their boxes. Saved
tensors are dashed lines between the columns; parameters are not drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from stepgraph.errors import refuse
from stepgraph.ir.dotlabels import (
    EDGE_STYLE,
    GRAPH_STYLE,
    NODE_STYLE,
    OpNote,
    box_attributes,
    edge_tooltip,
    heading,
    kernel_attributes,
    op_attributes,
    stream_attributes,
    tooltip,
)
from stepgraph.ir.graph import Graph
from stepgraph.ir.ladder import (
    Edge,
    Part,
    Way,
    column_of,
    edges_of,
    enter_id,
    entering,
    leave_id,
    leaving,
    op_id,
    rungs_of,
)
from stepgraph.ir.op import Op, Phase

if TYPE_CHECKING:
    from graphviz import Digraph

__all__ = ["OpNote", "to_dot"]

Notes = Mapping[str, OpNote]

MOST_OPS = 400
"""Larger graphs are not drawn unless somebody says so: nobody can read them."""


def to_dot(
    graph: Graph,
    *,
    notes: Notes | None = None,
    title: str = "",
    max_ops: int = MOST_OPS,
    changed: frozenset[str] = frozenset(),
) -> str:
    """The graph as DOT text; the same graph gives the same text.

    notes: by op name, what the caller knows about an op and wants shown. title: above the picture, with the legend of
    colours. max_ops: larger graphs are refused, because nobody can read them and the layout takes long. changed: ops to
    give a thick rim, for pictures side by side.

    Raises: InputError (too-many-ops); UnknownKindError for an op of a kind without a row.
    """
    if len(graph.ops) > max_ops:
        raise _too_many(graph, max_ops)
    look = _Look(graph, notes or {}, changed)
    drawing = _canvas(graph, look.notes, title)
    for phase in Phase:
        if graph.phase(phase):
            _draw_column(drawing, look, phase)
    edges = edges_of(graph)
    for rung in rungs_of(graph, edges):
        _draw_rung(drawing, rung)
    for edge in edges:
        drawing.edge(*edge.downward, **_edge_attributes(edge))
    return str(drawing.source)


@attrs.frozen
class _Look:
    """What decides how an op looks."""

    graph: Graph
    notes: Notes
    changed: frozenset[str]


def _too_many(graph: Graph, max_ops: int) -> Exception:
    fix = "draw one template (equal layers are one template), fewer layers, or raise max_ops"
    return refuse("too-many-ops", f"graph {graph.name}", f"{len(graph.ops)} ops to draw", f"at most {max_ops}", fix)


def _canvas(graph: Graph, notes: Notes, title: str) -> Digraph:
    from graphviz import Digraph, escape  # not needed to predict, and slow to import

    drawing = Digraph(escape(graph.name))
    drawing.attr("graph", label=heading(title, graph, notes), tooltip=tooltip(title or graph.name), **GRAPH_STYLE)
    drawing.attr("node", **NODE_STYLE)
    drawing.attr("edge", **EDGE_STYLE)
    return drawing


def _draw_column(drawing: Digraph, look: _Look, phase: Phase) -> None:
    """One cluster per phase; in it the streams, and one cluster per module in the order of first use."""
    with drawing.subgraph(name=f"cluster_{phase.value}") as column:
        column.attr(**box_attributes(phase.value, inner=False))
        for node, attributes in _streams(look.graph, phase):
            column.node(node, **attributes)
        for box, ops in _boxes(look.graph, phase).items():
            if box in ("", phase.value):  # a box inside an equal box says nothing
                _draw_ops(column, ops, box, look)
                continue
            with column.subgraph(name=f"cluster_{phase.value}_{op_id(box)}") as module:
                module.attr(**box_attributes(box, inner=True))
                _draw_ops(module, ops, box, look)


def _streams(graph: Graph, phase: Phase) -> Iterator[tuple[str, dict[str, str]]]:
    for node_id, tensors in ((enter_id, entering(graph)), (leave_id, leaving(graph))):
        for tensor in tensors:
            if column_of(graph, tensor) is phase:
                yield node_id(tensor.name), stream_attributes(tensor)


def _boxes(graph: Graph, phase: Phase) -> dict[str, list[Op]]:
    """Ops by the box that they stand in; those of a kernel with ops of several modules stand in none."""
    torn = {group.name for group in graph.groups if len({_box_of(graph[name]) for name in group.members}) > 1}
    boxes: dict[str, list[Op]] = {}
    for op in graph.phase(phase):
        group = graph.group_of.get(op.name)
        box = "" if group and group.name in torn else _box_of(op)
        boxes.setdefault(box, []).append(op)
    return boxes


def _box_of(op: Op) -> str:
    """The op's module with what stands before it in the op's name: layers written out have a box each (`L3.attn`)."""
    start = f".{op.name}".find(f".{op.module}.")
    return op.name[: start + len(op.module)] if op.module and start >= 0 else op.module


def _draw_ops(target: Digraph, ops: list[Op], box: str, look: _Look) -> None:
    """Ops of a box, those of a kernel together where its first one stands."""
    kernels: dict[str, list[Op]] = {}
    for op in ops:
        group = look.graph.group_of.get(op.name)
        kernels.setdefault(f"kernel {group.name}" if group else f"op {op.name}", []).append(op)
    for members in kernels.values():
        group = look.graph.group_of.get(members[0].name)
        if group is None:
            _draw_op(target, members[0], box, look)
            continue
        with target.subgraph(name=f"cluster_kernel_{op_id(group.name)}") as kernel:
            kernel.attr(**kernel_attributes(group))
            for op in members:
                _draw_op(kernel, op, box, look)


def _draw_op(target: Digraph, op: Op, box: str, look: _Look) -> None:
    short = op.name.removeprefix(f"{box}.") if box else op.name
    note = look.notes.get(op.name)
    target.node(op_id(op.name), **op_attributes(op, short, note, changed=op.name in look.changed))


def _draw_rung(drawing: Digraph, rung: tuple[str, ...]) -> None:
    """Same rank, and invisible edges from left to right: they keep forward left of backward."""
    with drawing.subgraph() as same:
        same.attr(rank="same")
        for node in rung:
            same.node(node)
    for left, right in pairwise(rung):
        drawing.edge(left, right, style="invis")


_PART_ATTRIBUTES = MappingProxyType(
    {
        Part.TRUNK: MappingProxyType({"weight": "8"}),
        Part.BRANCH: MappingProxyType[str, str]({}),
        Part.BYPASS: MappingProxyType({"tailport": "e", "headport": "e"}),
    }
)


def _edge_attributes(edge: Edge) -> dict[str, str]:
    attributes = {"tooltip": edge_tooltip(edge.tensors), **_PART_ATTRIBUTES[edge.part]}
    if edge.way is Way.UP:
        attributes["dir"] = "back"
    if edge.way is Way.ACROSS:
        attributes["constraint"] = "false"
    if edge.saved:
        attributes |= {"style": "dashed", "color": "#9ca3af", "weight": "0"}
    return attributes
