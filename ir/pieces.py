"""Pieces of the text form: reads one tensor, one op or one fused kernel from a line, given the axes of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs

from stepgraph.ir.graph import Group
from stepgraph.ir.op import Attr, Op, Phase
from stepgraph.ir.tensor import Axis, Kind, Place, Placement, Tensor
from stepgraph.ir.words import FIELDS, Line, default_kind

T = TypeVar("T")
Axes = Mapping[str, Axis]

_KINDS = tuple(kind.value for kind in Kind)
_KERNEL_FIELDS = ("rule", "launches", "efficiency")


@attrs.frozen
class Read:
    """A tensor by name, and where it is read."""

    name: str
    line: Line
    column: int


@attrs.frozen
class Made:
    """A tensor that is described, and where its name stands."""

    tensor: Tensor
    line: Line
    column: int


@attrs.frozen
class OpLine:
    """What the line of an op says: the op still without operands, what it makes and what it reads."""

    op: Op
    made: tuple[Made, ...]
    reads: tuple[Read, ...]


def until_end(line: Line, read: Callable[[], T]) -> tuple[T, ...]:
    """Read one item after the other until the line ends."""
    found: list[T] = []
    while not line.done():
        found.append(read())
    return tuple(found)


def one_of(line: Line, known: tuple[str, ...], what: str) -> str:
    """Read one of the known words. Raises: TextError."""
    for name in known:
        if line.accept_word(name):
            return name
    raise line.error(f"{what}: {', '.join(known)}")


def new_axis(line: Line) -> Axis:
    """Read an axis of the mesh line: `tp=8:1`. Raises: TextError."""
    name = line.word("a mesh axis: name=size:stride")
    line.need("=")
    size = line.integer("the axis's size")
    line.need(":")
    return Axis(name, size, line.integer("the axis's stride"))


def read_tensor(line: Line) -> Read:
    """Read `%name` where a tensor is read. Raises: TextError."""
    column = line.here()
    return Read(line.tensor_word(), line, column)


def made_tensor(line: Line, axes: Axes, usual: Kind | None) -> Made:
    """Read `%name : description` where a tensor enters (`usual` None) or is made. Raises: TextError."""
    column, name = line.here(), line.tensor_word()
    line.need(":")
    dtype = line.word("a type, as in bf16[b=4]")
    line.need("[")
    dims, shape, splits = _dims(line, axes)
    place = _in_mesh_order(line, axes, splits + _pending(line, axes))
    fraction = _fraction(line)
    return Made(Tensor(name, dims, shape, dtype, _kind(line, usual), place, fraction), line, column)


def op_line(line: Line, axes: Axes, phase: Phase) -> OpLine:
    """Read an op to the end of its line. Raises: TextError."""
    made: tuple[Made, ...] = ()
    if line.ahead("%"):
        made = line.listed(lambda: made_tensor(line, axes, default_kind(phase)), ",")
        line.need("=")
    kind = line.word("an op's kind")
    line.need("(")
    reads = () if line.ahead(")") else line.listed(lambda: read_tensor(line), ",")
    line.need(")")
    outputs = tuple(m.tensor for m in made)
    op = Op(_op_name(line, outputs), kind, (), outputs, phase=phase)
    return OpLine(_with_fields(line, axes, op), made, reads)


def _known_axis(line: Line, axes: Axes) -> Axis:
    start, name = line.here(), line.word("a mesh axis")
    if name not in axes:
        raise line.error(f"an axis of the mesh: {', '.join(axes) or 'it has none'}", start)
    return axes[name]


def _dims(line: Line, axes: Axes) -> tuple[str, tuple[int, ...], list[Placement]]:
    dims, shape, splits = "", [], []
    while not line.accept("]"):
        letter, over, size = _dim(line, axes)
        splits += [Placement(axis, len(dims)) for axis in over]
        dims += letter
        shape.append(size)
    return dims, tuple(shape), splits


def _dim(line: Line, axes: Axes) -> tuple[str, list[Axis], int]:
    start, letter = line.here(), line.word("a dimension, as in b/dp=4, or ']'")
    if len(letter) != 1:
        raise line.error("one letter for a dimension", start)
    over = []
    while line.accept("/"):
        over.append(_known_axis(line, axes))
    line.need("=")
    return letter, over, line.integer("the dimension's global size")


def _fraction(line: Line) -> tuple[int, int]:
    if not line.accept_word("part"):
        return 1, 1
    line.need("(")
    part = line.integer("how much of the dense shape exists: part(8/64)")
    line.need("/")
    whole = line.integer("of how much")
    line.need(")")
    return part, whole


def _pending(line: Line, axes: Axes) -> list[Placement]:
    if not line.accept_word("sum"):
        return []
    line.need("(")
    over = line.listed(lambda: _known_axis(line, axes), ",")
    line.need(")")
    return [Placement(axis, None) for axis in over]


def _in_mesh_order(line: Line, axes: Axes, found: list[Placement]) -> Place:
    by_axis = {placement.axis.name: placement for placement in found}
    if len(by_axis) != len(found):
        raise line.error("each axis once in a tensor")
    return tuple(by_axis[name] for name in axes if name in by_axis)


def _kind(line: Line, usual: Kind | None) -> Kind:
    if usual is not None and (line.ahead(",") or line.ahead("=")):
        return usual
    return Kind(one_of(line, _KINDS, "a tensor's kind"))


def _op_name(line: Line, outputs: tuple[Tensor, ...]) -> str:
    if line.accept_word("as"):
        return line.word("the op's name")
    if not outputs:
        raise line.error("'as NAME': the op has no output to be named after")
    return outputs[0].name


def _with_fields(line: Line, axes: Axes, op: Op) -> Op:
    pairs: list[tuple[str, Attr]] = []
    seen: set[str] = set()
    while not line.done():
        column, quoted = line.here(), line.ahead('"')
        key = line.word("a field or an attribute: key=value")
        line.need("=")
        if quoted or key not in FIELDS:
            pairs.append((key, line.value()))
            continue
        if key in seen:
            raise line.error("each field once", column)
        seen.add(key)
        op = _with_field(line, axes, op, key)
    return attrs.evolve(op, attrs=tuple(pairs))


def _with_field(line: Line, axes: Axes, op: Op, key: str) -> Op:
    if key == "at":
        return attrs.evolve(op, at=line.listed(lambda: _split(line), ","))
    if key == "group":
        return attrs.evolve(op, group=line.listed(lambda: _known_axis(line, axes), "+"))
    named: dict[str, Any] = {key: line.word(f"a text for {key}")}
    return attrs.evolve(op, **named)


def _split(line: Line) -> tuple[str, str]:
    axis = line.word("a mesh axis, as in tp:h")
    line.need(":")
    return axis, "+" if line.accept("+") else line.word("a letter or '+'")


def kernel_line(line: Line) -> Group:
    """Read a fused kernel, what follows `kernel`, to the end of its line. Raises: TextError."""
    name = line.word("the kernel's name")
    line.need("=")
    members: list[str] = []
    fields: dict[str, Any] = {}
    while not line.done():
        column, text = line.here(), line.word("an op's name, or rule=, launches= or efficiency=")
        if not line.accept("="):
            members.append(text)
            continue
        if text not in _KERNEL_FIELDS or text in fields:
            raise line.error(f"each of these once: {', '.join(_KERNEL_FIELDS)}", column)
        fields[text] = _kernel_field(line, text)
    return Group(name, fields.get("rule", ""), tuple(members), fields.get("launches", 1), fields.get("efficiency", 1.0))


def _kernel_field(line: Line, key: str) -> str | float:
    if key == "rule":
        return line.word("the fusion rule's name")
    if key == "launches":
        return line.integer("how many launches")
    column, part = line.here(), line.value()
    if isinstance(part, (str, bool)):
        raise line.error("a number: the part of the HBM rate", column)
    return float(part)
