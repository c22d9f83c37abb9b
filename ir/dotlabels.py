"""What stands in the boxes of a drawing: labels, shapes and colours of ops and tensors, as DOT attributes.

Labels are HTML-like, so every text from outside is escaped here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from types import MappingProxyType

import attrs

from stepgraph.ir.graph import Graph, Group
from stepgraph.ir.op import Op
from stepgraph.ir.rows import Rule
from stepgraph.ir.table import row_of
from stepgraph.ir.tensor import Tensor, describe

FONT = "Helvetica"
QUIET = "#57606a"
"""Colour of what may be overlooked: kinds, shapes, views."""

GRAPH_STYLE = MappingProxyType(
    # newrank: ops of different boxes may share a rank, which is what makes partners face each other
    {"rankdir": "TB", "newrank": "true", "labelloc": "t", "fontname": FONT, "nodesep": "0.25", "ranksep": "0.3"}
)
NODE_STYLE = MappingProxyType(
    {
        "shape": "box",
        "style": "filled,rounded",
        "fillcolor": "white",
        "color": "#4b5563",
        "fontname": FONT,
        "fontsize": "11",
        "margin": "0.09,0.05",
        "width": "0.4",
        "height": "0.2",
    }
)
EDGE_STYLE = MappingProxyType({"color": "#374151", "arrowsize": "0.6"})

RULE_FILLS = MappingProxyType(
    {
        Rule.GEMM: "#bfdbfe",
        Rule.ATTENTION: "#ddd6fe",
        Rule.HBM: "#fed7aa",
        Rule.TOPK: "#fde68a",
        Rule.COLLECTIVE: "#bbf7d0",
        Rule.POINT_TO_POINT: "#99f6e4",
        Rule.FREE: "#f0f1f3",
    }
)
"""Fill of an op by its cost rule, where no note says otherwise."""

_RULE_WORDS = MappingProxyType(
    {
        Rule.GEMM: "matmul",
        Rule.ATTENTION: "attention",
        Rule.HBM: "HBM-bound",
        Rule.TOPK: "top-k",
        Rule.COLLECTIVE: "collective",
        Rule.POINT_TO_POINT: "point to point",
        Rule.FREE: "view, free",
    }
)
_MARKS = MappingProxyType({"recompute": "recomputed", "regather": "gathered again"})


@attrs.frozen
class OpNote:
    """What the caller knows about an op and the graph does not: its time, its share, which rule bounds it.

    label_lines: plain text below the shape. fill: a Graphviz colour; "" keeps that of the op's rule. tooltip: shown
    under the pointer in SVG; "" keeps the op's name.
    """

    label_lines: tuple[str, ...] = ()
    fill: str = ""
    tooltip: str = ""


CHANGED_STYLE = MappingProxyType({"color": "#111827", "penwidth": "3"})
"""Rim of an op that the caller calls changed."""


def op_attributes(op: Op, short: str, note: OpNote | None, *, changed: bool = False) -> dict[str, str]:
    """DOT attributes of an op's node: collectives are hexagons, views small and grey, what runs again has a dashed rim.

    short: the name to show. changed: with a thick rim. Raises: UnknownKindError.
    """
    attributes = {
        "label": _op_label(op, short, note),
        "fillcolor": _fill(op, note),
        "tooltip": tooltip((note and note.tooltip) or op.name),
    }
    if _moves(op):
        # a hexagon leaves much room around its text; less margin makes up for it
        attributes |= {"shape": "hexagon", "style": "filled", "margin": "-0.12,-0.03"}
    if _is_free(op):
        attributes |= {"color": "#d1d5db", "fontcolor": QUIET, "fontsize": "9", "margin": "0.06,0.03"}
    if op.role in _MARKS:
        attributes |= {"style": "filled,dashed" if _moves(op) else "filled,rounded,dashed", "penwidth": "1.5"}
    return {**attributes, **CHANGED_STYLE} if changed else attributes


def stream_attributes(tensor: Tensor) -> dict[str, str]:
    """DOT attributes of a tensor that enters or leaves: a small ellipse."""
    label = _html([_text(tensor.name), _small(describe(tensor))])
    return {"label": label, "shape": "ellipse", "margin": "0.02,0.01", "tooltip": edge_tooltip((tensor,))}


def box_attributes(name: str, *, inner: bool) -> dict[str, str]:
    """DOT attributes of the box around a phase, or (inner) around a module in it."""
    attributes = {
        "label": _html([_text(name)]),
        "style": "rounded,filled",
        "color": "#d1d5db",
        "tooltip": tooltip(name),
    }
    if inner:  # a label in the middle would lie on the trunk
        return attributes | {"labeljust": "l", "fillcolor": "white", "fontsize": "12"}
    return attributes | {"fillcolor": "#fafafa", "fontsize": "14"}


KERNEL_COLOUR = "#9333ea"
"""Of the box around a fused kernel; no rule's fill is near it."""


def kernel_attributes(group: Group) -> dict[str, str]:
    """DOT attributes of the box around a fused kernel: dashed, rounded, titled with the rule."""
    launches = f", {group.kernels} launches" if group.kernels != 1 else ""
    title = (group.rule or group.name) + launches
    room = "&#160;" * (2 * len(title))  # makes the box wide enough for a title beside the trunk, not on it
    return {
        "label": _html([f'{room}<font color="{KERNEL_COLOUR}">{_text(title)}</font>']),
        "labeljust": "r",
        "fontsize": "10",
        "style": "rounded,dashed",
        "color": KERNEL_COLOUR,
        "penwidth": "2",
        "tooltip": tooltip(f"one kernel: {', '.join(group.members)}"),
    }


def heading(title: str, graph: Graph, notes: Mapping[str, OpNote]) -> str:
    """The graph's own label: the title, and a patch with the name of every rule whose colour is in use."""
    shown = {row_of(op.kind).rule for op in graph.ops if _fill(op, notes.get(op.name)) == _fill(op, None)}
    patches = "".join(_patch(rule) for rule in Rule if rule in shown)
    patches += _KERNEL_PATCH if graph.groups else ""
    rows = [f"<b>{_text(title)}</b>"] if title else []
    rows += [f'<table border="0" cellspacing="4" cellpadding="1"><tr>{patches}</tr></table>'] if patches else []
    cells = "".join(f"<tr><td>{row}</td></tr>" for row in rows)
    return f'<<table border="0" cellspacing="0" cellpadding="2">{cells}</table>>' if rows else ""


def edge_tooltip(tensors: Iterable[Tensor]) -> str:
    """Tensors, one a line: `attn.norm [b s/tp d], bf16 1x512x4096, 4 MiB`."""
    lines = (f"{t.name} {describe(t)}, {t.dtype} {local_shape(t)}, {byte_text(t.nbytes)}" for t in tensors)
    return tooltip("\n".join(lines))


def tooltip(text: str) -> str:
    """A text for a tooltip, in which Graphviz would read backslashes and angle brackets."""
    from graphviz import escape as plain

    return str(plain("\n".join(_printable(line) for line in text.split("\n"))))


def local_shape(tensor: Tensor) -> str:
    """What one rank holds: `1x512x4096`; a scalar is `1`."""
    return "x".join(map(str, tensor.local_shape)) or "1"


def byte_text(n_bytes: int) -> str:
    """Bytes in binary units: `32 MiB`, `1.5 GiB`."""
    size, units = float(n_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if size >= 100 else f"{size:.3g} {units[0]}"


def _op_label(op: Op, short: str, note: OpNote | None) -> str:
    name = _comm_lines(op, short) if _moves(op) else _name_lines(op, short)
    mark = [_small(_MARKS[op.role])] if op.role in _MARKS else []
    return _html([*name, *mark, *_value_lines(op), *map(_text, note.label_lines if note else ())])


def _name_lines(op: Op, short: str) -> list[str]:
    return [f"<b>{_text(short)}</b>", *([_small(op.kind)] if op.kind != short else [])]


def _comm_lines(op: Op, short: str) -> list[str]:
    """`all-gather tp=8`, and below it the tensor that it moves: the name without the kind."""
    group = f" {op.group_name}={op.group_size}" if op.group else ""
    bare = short.replace(f".{op.kind}", "")
    moved = [_small(bare)] if bare != op.kind else []
    return [f"<b>{_text(op.kind.replace('_', '-') + group)}</b>", *moved]


def _value_lines(op: Op) -> list[str]:
    """Placement and local shape of the first output; of a collective, placement and the bytes of its larger side."""
    whole = max((*op.inputs, *op.outputs), key=lambda t: t.nbytes, default=None)
    if _moves(op) and whole:
        made = f"{describe(op.outputs[0])}  " if op.outputs else ""
        return [_small(f"{made}{byte_text(whole.nbytes)}")]
    return [_small(describe(t)) + "<br/>" + _small(local_shape(t)) for t in op.outputs[:1]]


def _moves(op: Op) -> bool:
    return row_of(op.kind).rule in (Rule.COLLECTIVE, Rule.POINT_TO_POINT)


def _is_free(op: Op) -> bool:
    return row_of(op.kind).rule is Rule.FREE


def _fill(op: Op, note: OpNote | None) -> str:
    return note.fill if note and note.fill else RULE_FILLS[row_of(op.kind).rule]


def _patch(rule: Rule) -> str:
    patch = f'<td bgcolor="{RULE_FILLS[rule]}" width="18" height="12" fixedsize="true"></td>'
    return f"{patch}<td>{_small(_RULE_WORDS[rule])}</td>"


_KERNEL_PATCH = f'<td><font color="{KERNEL_COLOUR}"><b>- - -</b></font></td><td><font point-size="9" color="{QUIET}">one kernel</font></td>'


def _html(lines: Iterable[str]) -> str:
    return f"<{'<br/>'.join(lines)}>"


def _small(text: str) -> str:
    return f'<font point-size="9" color="{QUIET}">{_text(text)}</font>'


def _text(text: str) -> str:
    return escape(_printable(text))


def _printable(text: str) -> str:
    # one control character would end the whole label
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
