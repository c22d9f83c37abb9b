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
    residual stream (or the first split one when that is a pending sum), and lets a sum through only when every operand
    is one.
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
    on = [t.on(axis) for t in inputs]
    if on[0] is None:
        return ""
    if all(p is not None and p.dim is None for p in on):
        return PENDING
    split = next(((t, p.dim) for t, p in zip(inputs, on, strict=True) if p is not None and p.dim is not None), None)
    return split[0].dims[split[1]] if split else ""
