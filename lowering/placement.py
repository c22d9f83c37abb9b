"""The placement algebra: a mesh axis splits one letter of an op, and everything else follows.

The one rule, for the letter that an axis splits: an operand that has it is split on it, one that lacks it is
replicated; a result that has it is split on it, one that lacks it is a pending sum. An axis that splits no letter
replicates all. "+" stands for a pending sum that a linear op lets through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepgraph.ir.op import Op
from stepgraph.ir.rows import Row, Spec
from stepgraph.ir.tensor import Axis, Kind, Place, Placement, Tensor

PENDING = "+"
"""The letter of an axis whose pending sum passes through a linear op."""

At = Mapping[str, str]
"""Axis name to the letter that it splits; axes that split none are absent."""


def operand_place(letters: str, at: At, axes: Sequence[Axis]) -> Place:
    """How an operand with these letters must be placed."""
    placements = []
    for axis in axes:
        letter = at.get(axis.name, "")
        if letter == PENDING:
            placements.append(Placement(axis, None))
        elif letter and letter in letters:
            placements.append(Placement(axis, letters.index(letter)))
    return tuple(placements)


def result_place(letters: str, at: At, axes: Sequence[Axis], inner: str = "") -> Place:
    """How a result with these letters is placed; `inner` letters leave no pending sum behind."""
    placements = []
    for axis in axes:
        letter = at.get(axis.name, "")
        if not letter or (letter in inner and letter not in letters):
            continue
        placements.append(Placement(axis, letters.index(letter) if letter in letters else None))
    return tuple(placements)


def dual_place(place: Place) -> Place:
    """How the gradient of a tensor placed so must be: split stays split, replicated and pending become replicated."""
    return tuple(placement for placement in place if placement.dim is not None)


def choose_letters(op: Op, row: Row, spec: Spec, inputs: Sequence[Tensor], axes: Sequence[Axis]) -> dict[str, str]:
    """One letter for each axis.

    First what the op demands (`op.at`); else the letter on which a parameter is split, since parameters never move;
    else the first split operand's, unless it must stay whole; else none. A linear op follows its first operand, the
    residual stream, and lets a sum through only when every operand is one.
    """
    demanded = dict(op.at)
    chosen = {}
    for axis in axes:
        letter = demanded[axis.name] if axis.name in demanded else _letter(row, spec, inputs, axis)
        if letter:
            chosen[axis.name] = letter
    return chosen


def _letter(row: Row, spec: Spec, inputs: Sequence[Tensor], axis: Axis) -> str:
    if row.linear:
        return _linear_letter(inputs, axis)
    ordered = sorted(zip(spec[0], inputs, strict=True), key=lambda pair: pair[1].kind is not Kind.PARAM)
    for letters, tensor in ordered:
        placement = tensor.on(axis)
        if placement is not None and placement.dim is not None and letters[placement.dim] not in row.whole:
            return letters[placement.dim]
    return ""


def _linear_letter(inputs: Sequence[Tensor], axis: Axis) -> str:
    first = inputs[0].on(axis)
    if first is None:
        return ""
    if first.dim is not None:
        return inputs[0].dims[first.dim]
    pending = all((p := t.on(axis)) is not None and p.dim is None for t in inputs)
    return PENDING if pending else ""
