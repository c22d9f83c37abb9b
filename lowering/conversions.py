"""Changing a placement: one op per kind, smallest data first, each tensor and target once.

| order | from -> to | op |
|---|---|---|
| 1 | replicated -> split | slice |
| 2 | pending sum -> split | reduce-scatter |
| 3 | pending sum -> replicated | all-reduce |
| 4 | split -> split elsewhere | all-to-all |
| 5 | split -> replicated | all-gather |
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from stepgraph.ir.op import Op, Phase
from stepgraph.ir.rows import Row
from stepgraph.ir.table import CONVERSIONS
from stepgraph.ir.tensor import Axis, Place, Placement, Tensor
from stepgraph.lowering.mesh import Mesh


class PlacementError(ValueError):
    """A conversion that does not exist: a bug in a block or in the algebra, never in the user's input."""


class Writer:
    """Collects placed ops under unique names. Lives for one lowering of one template."""

    def __init__(self, mesh: Mesh, ops: Sequence[Op] = ()) -> None:
        self.mesh = mesh
        self.axes = mesh.splitting
        self.ops = list(ops)
        self._names = {op.name for op in ops}
        self._moved: dict[tuple[str, Place, Phase], Tensor] = {}

    def fresh(self, name: str) -> str:
        """`name`, or `name.2` and so on when it is taken."""
        candidate, count = name, 1
        while candidate in self._names:
            count += 1
            candidate = f"{name}.{count}"
        self._names.add(candidate)
        return candidate

    def emit(self, op: Op) -> Op:
        """Append an op whose name is already unique."""
        self._names.add(op.name)
        self.ops.append(op)
        return op

    def emit_inner(self, op: Op, row: Row, like: Op) -> None:
        """The collectives that run inside an op whose inner letter is split, as ops of their own so that they cost.

        Each is an all-reduce of one fp32 statistic per token: the first tensor of the op that lacks the letter.
        """
        at = dict(op.at)
        split = [axis for axis in self.axes if row.reductions and at.get(axis.name, "-") in row.inner]
        for axes in self.mesh.runs(split):
            letter = at[axes[0].name]
            source = next(t for t in (*op.outputs, *op.inputs) if t.dtype == "fp32" and letter not in t.dims)
            for what in row.reductions:
                self._emit_reduction(op, what, source, axes, like)

    def _emit_reduction(self, op: Op, what: str, source: Tensor, axes: tuple[Axis, ...], like: Op) -> None:
        name = self.fresh(f"{op.name}.{what}")
        out = attrs.evolve(source, name=name)
        inner = attrs.evolve(like, name=name, kind="all_reduce", of=op.of or op.name, role="inner", group=axes)
        self.emit(attrs.evolve(inner, inputs=(source,), outputs=(out,), attrs=self.mesh.named(axes)))

    def convert(self, tensor: Tensor, place: Place, like: Op) -> Tensor:
        """The same value placed as asked; emits what is missing.

        like: phase, of, role, module and origin of the ops that are emitted.
        Raises: PlacementError when no conversion exists.
        """
        if tensor.place == place:
            return tensor
        key = (tensor.name, place, like.phase)
        if key not in self._moved:
            self._moved[key] = self._convert(tensor, place, like)
        return self._moved[key]

    def _convert(self, tensor: Tensor, place: Place, like: Op) -> Tensor:
        base = tensor.name
        steps = self._steps(tensor, place)
        for kind in CONVERSIONS:
            for axes in self.mesh.runs(steps.get(kind, ())):
                tensor = self._move(tensor, base, kind, axes, place, like)
        return tensor

    def _steps(self, tensor: Tensor, place: Place) -> dict[str, list[Axis]]:
        steps: dict[str, list[Axis]] = {}
        for axis in self.axes:
            before, after = tensor.on(axis), _on(place, axis)
            if before != after:
                steps.setdefault(conversion_kind(tensor, before, after), []).append(axis)
        return steps

    def _move(self, tensor: Tensor, base: str, kind: str, axes: tuple[Axis, ...], place: Place, like: Op) -> Tensor:
        moving = {axis.name for axis in axes}
        kept = [p for p in tensor.place if p.axis.name not in moving]
        taken = [p for p in place if p.axis.name in moving]
        merged = tuple(sorted((*kept, *taken), key=lambda p: -p.axis.stride))
        if tensor.fraction == (1, 1):  # routed tokens have no order that could be lost
            _require_innermost(tensor, merged, axes)
        name = self.fresh(f"{base}.{kind}")
        out = attrs.evolve(tensor, name=name, place=merged)
        named = self.mesh.named(axes)
        self.emit(attrs.evolve(like, name=name, kind=kind, inputs=(tensor,), outputs=(out,), group=axes, attrs=named))
        return out


def _require_innermost(tensor: Tensor, after: Place, axes: tuple[Axis, ...]) -> None:
    """A dimension that two axes split is dealt outer axis first, so only its innermost axes can move by themselves."""
    moving = {axis.name for axis in axes}
    for place in (tensor.place, after):
        for moved in (p for p in place if p.axis.name in moving and p.dim is not None):
            inner = [p for p in place if p.dim == moved.dim and p.axis.stride < moved.axis.stride]
            if any(p.axis.name not in moving for p in inner):
                raise PlacementError(f"{tensor.name} {tensor}: {moved.axis.name} cannot move past the axes inside it")


def _on(place: Place, axis: Axis) -> Placement | None:
    return next((p for p in place if p.axis.name == axis.name), None)


def conversion_kind(tensor: Tensor, before: Placement | None, after: Placement | None) -> str:
    """The op that turns one placement on an axis into another.

    Raises: PlacementError for replicated -> pending and split -> pending, which lose or invent data.
    """
    if after is not None and after.dim is None:
        raise PlacementError(f"{tensor.name} {tensor}: nothing turns {before} into a pending sum")
    if before is None:
        return "slice"
    if before.dim is None:
        return "all_reduce" if after is None else "reduce_scatter"
    return "all_gather" if after is None else "all_to_all"
