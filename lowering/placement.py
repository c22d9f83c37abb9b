"""Choosing letters: which letter of an op each mesh axis splits. What follows from the choice is the one rule."""

from __future__ import annotations

from collections.abc import Sequence

from stepgraph.ir.op import Op
from stepgraph.ir.placement import PENDING, At, dual_place, operand_place, result_place
from stepgraph.ir.rows import Row, Spec
from stepgraph.ir.tensor import Axis, Kind, Tensor

__all__ = ["PENDING", "At", "dual_place", "operand_place", "result_place", "choose_letters"]


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
