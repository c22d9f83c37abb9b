"""What stands in a box of the drawing: labels, shapes and colours of ops and tensors, as DOT attributes.

Labels are HTML-like, so every text from outside is escaped here and nowhere else.
"""

from __future__ import annotations

from html import escape
from types import MappingProxyType

import attrs

from stepgraph.ir.op import Op
from stepgraph.ir.rows import Rule
from stepgraph.ir.table import row_of
from stepgraph.ir.tensor import DTYPE_BYTES, Tensor, describe

FONT = "Helvetica"
QUIET = "#6b7280"
"""Colour of what may be overlooked: kinds, shapes, views."""

RULE_FILLS = MappingProxyType(
    {
        Rule.GEMM: "#bfdbfe",
        Rule.ATTENTION: "#ddd6fe",
        Rule.HBM: "#fed7aa",
        Rule.COLLECTIVE: "#bbf7d0",
        Rule.POINT_TO_POINT: "#a7f3d0",
        Rule.FREE: "#f3f4f6",
    }
)
"""Fill of an op by its cost rule, where no note says otherwise."""

_RULE_WORDS = MappingProxyType(
    {Rule.GEMM: "matmul", Rule.HBM: "memory-bound", Rule.POINT_TO_POINT: "point to point", Rule.FREE: "view"}
)

_MARKS = MappingProxyType({"recompute": "recomputed", "regather": "gathered again"})


@attrs.frozen
class OpNote:
    """What the caller knows about an op and the graph does not: its time, its share, the rule that bounds it.

    label_lines: shown below the shape, plain text. fill: a Graphviz colour; "" keeps the rule's. tooltip: shown under
    the pointer in SVG; "" keeps the usual one.
    """

    label_lines: tuple[str, ...] = ()
    fill: str = ""
    tooltip: str = ""


_NO_NOTE = OpNote()


def is_comm(op: Op) -> bool:
    """Whether the op moves bytes between ranks."""
    return row_of(op.kind).rule in (Rule.COLLECTIVE, Rule.POINT_TO_POINT)


def fill_of(op: Op, note: OpNote | None) -> str:
    """The colour of an op's box."""
    return note.fill if note and note.fill else RULE_FILLS[row_of(op.kind).rule]


def op_attributes(op: Op, short: str, note: OpNote | None) -> dict[str, str]:
    """DOT attributes of an op's node: collectives are hexagons, views small and grey, what runs again has a dashed rim.

    short: the name to show. Raises: UnknownKindError.
    """
    note = note or _NO_NOTE
    attributes = {"label": _op_label(op, short, note), "fillcolor": fill_of(op, note), "tooltip": note.tooltip or op.name}
    if op.role in _MARKS:
        attributes |= {"style": "filled,dashed" if is_comm(op) else "filled,rounded,dashed", "penwidth": "1.6"}
    elif is_comm(op):
        attributes["style"] = "filled"
    if is_comm(op):
        attributes |= {"shape": "hexagon", "margin": "-0.12,-0.04"}
    if row_of(op.kind).rule is Rule.FREE:
        attributes |= {"color": "#d1d5db", "fontcolor": QUIET, "margin": "0.06,0.02"}
    return attributes


def stream_attributes(tensor: Tensor) -> dict[str, str]:
    """DOT attributes of a tensor that enters or leaves: a small ellipse."""
    label = f"<{_plain(tensor.name)}<br/>{_small(describe(tensor))}>"
    return {"label": label, "shape": "ellipse", "fillcolor": "white", "margin": "0.02,0.01", "tooltip": facts(tensor)}


def facts(tensor: Tensor) -> str:
    """A tensor in one line: `attn.norm [b s/tp d] bf16 1x512x4096, 4 MiB`."""
    return f"{tensor.name} {describe(tensor)} {tensor.dtype} {local_shape(tensor)}, {byte_text(tensor.nbytes)}"


def local_shape(tensor: Tensor) -> str:
    """What one rank holds: `1x512x4096`; a scalar is `1`."""
    return "x".join(map(str, tensor.local_shape)) or "1"


def byte_text(n_bytes: int) -> str:
    """Bytes in binary units: `32 MiB`, `1.5 GiB`."""
    size, unit = float(n_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"


def heading(title: str, rules: tuple[Rule, ...]) -> str:
    """The graph's own label: the title, and a colour patch with the name of each rule."""
    cells = "".join(
        f'<td bgcolor="{RULE_FILLS[rule]}" width="18" height="12" fixedsize="true"></td>'
        f"<td>{_small(_RULE_WORDS.get(rule, rule.value))}</td>"
        for rule in rules
    )
    rows = [f"<tr><td>{_bold(title)}</td></tr>"] if title else []
    if cells:
        rows.append(f'<tr><td><table border="0" cellspacing="4" cellpadding="1"><tr>{cells}</tr></table></td></tr>')
    return f'<<table border="0" cellspacing="0" cellpadding="2">{"".join(rows)}</table>>' if rows else ""


def plain(text: str) -> str:
    """A text for an HTML-like label: escaped, control characters replaced (they would end the whole label)."""
    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))


_plain = plain


def _op_label(op: Op, short: str, note: OpNote) -> str:
    head = _comm_head(op, short) if is_comm(op) else [_bold(short), *_kind_line(op, short)]
    mark = [_small(_MARKS[op.role])] if op.role in _MARKS else []
    notes = [_plain(line) for line in note.label_lines]
    return f"<{'<br/>'.join([*head, *mark, *_value_lines(op), *notes])}>"


def _comm_head(op: Op, short: str) -> list[str]:
    group = f" {op.group_name}={op.group_size}" if op.group else ""
    return [_bold(op.kind.replace("_", "-") + group), _small(short.replace(f".{op.kind}", ""))]


def _kind_line(op: Op, short: str) -> list[str]:
    return [_small(op.kind)] if op.kind != short else []


def _value_lines(op: Op) -> list[str]:
    if not op.outputs:
        return []
    made = op.outputs[0]
    if is_comm(op):
        return [_small(describe(made) + "  " + byte_text(max(t.nbytes for t in (*op.inputs, *op.outputs))))]
    return [_small(describe(made)), _small(local_shape(made))]


def _bold(text: str) -> str:
    return f"<b>{_plain(text)}</b>"


def _small(text: str) -> str:
    return f'<font point-size="9" color="{QUIET}">{_plain(text)}</font>'
