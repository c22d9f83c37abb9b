"""Running a placed graph on simulated ranks.

A held tensor is one array with the mesh in front: [axis 0, axis 1, ..., *local shape], outermost axis first. Compute
runs on each rank by itself; a conversion works along the mesh axes of its own group and touches no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import attrs
import numpy as np

from meaning import MEANINGS
from meaning_rank import Array, Meaning, Where
from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.table import CONVERSIONS, row_of
from stepgraph.ir.tensor import Axis, Tensor

TOLERANCE = 1e-9
"""Ranks sum in another order than one rank does; nothing else may differ."""


@attrs.frozen
class Ranks:
    """What all ranks hold after a run: tensors and arrays by tensor name."""

    axes: tuple[Axis, ...]
    tensors: dict[str, Tensor]
    arrays: dict[str, Array]

    def value(self, name: str) -> Array:
        """The global value of a tensor."""
        return assemble(self.tensors[name], self.arrays[name], self.axes)


def run(graph: Graph, values: Mapping[str, Array], meanings: Mapping[str, Meaning] = MEANINGS) -> Ranks:
    """Run forward and backward on every rank of the graph's mesh.

    values: global values of the tensors that enter. The step's ops are left out, and so are the collectives inside
    an op, which stand for what the op's meaning does itself.
    Raises: AssertionError when an array has not the shape that its tensor claims, or differs between ranks along an
    axis that claims to replicate it.
    """
    ops = tuple(op for op in graph.ops if op.phase is not Phase.STEP and not is_inner(op, graph))
    graph = attrs.evolve(graph, ops=ops)
    ranks = Ranks(graph.axes, {}, {})
    for tensor in graph.inputs:
        _hold(ranks, tensor, scatter(tensor, values[tensor.name], ranks.axes))
    for op in ops:
        for tensor, array in zip(op.outputs, _execute(op, ranks, meanings), strict=True):
            _hold(ranks, tensor, array)
    return ranks


def is_inner(op: Op, graph: Graph) -> bool:
    """Whether a collective stands for what another op does inside itself; so does its recomputed copy."""
    original = graph.by_name[op.of] if op.role == "recompute" else op
    return original.role == "inner"


def _hold(ranks: Ranks, tensor: Tensor, array: Array) -> None:
    expected = (*(axis.size for axis in ranks.axes), *tensor.local_shape)
    assert tensor.name not in ranks.arrays, f"{tensor.name} is made twice"
    assert array.shape == expected, f"{tensor.name} {tensor}: {array.shape} where {expected} is claimed"
    for i, axis in enumerate(ranks.axes):
        same = tensor.on(axis) is not None or np.allclose(array, array.take([0], i), rtol=TOLERANCE, atol=TOLERANCE)
        assert same, f"{tensor.name} {tensor}: differs between the ranks of {axis.name}"
    ranks.tensors[tensor.name] = tensor
    ranks.arrays[tensor.name] = array


def _execute(op: Op, ranks: Ranks, meanings: Mapping[str, Meaning]) -> list[Array]:
    for tensor in op.inputs:
        held = ranks.tensors[tensor.name]
        assert held.place == tensor.place, f"{op.name} reads {tensor.name} as {tensor}, but it is {held}"
    inputs = [ranks.arrays[tensor.name] for tensor in op.inputs]
    if op.kind in CONVERSIONS:
        return [_convert(op, inputs[0], ranks.axes)]
    inner = _inner(op, ranks.axes)
    inputs = [_along(inner[::-1], gather, t, x, ranks.axes) for t, x in zip(op.inputs, inputs, strict=True)]
    outputs = _on_each_rank(op, inputs, ranks.axes, meanings[op.kind])
    return [_along(inner, keep, t, x, ranks.axes) for t, x in zip(op.outputs, outputs, strict=True)]


def _on_each_rank(op: Op, inputs: list[Array], axes: tuple[Axis, ...], meaning: Meaning) -> list[Array]:
    sizes = tuple(axis.size for axis in axes)
    try:
        results = [meaning(op, [x[index] for x in inputs], Where(axes, index)) for index in np.ndindex(*sizes)]
        return [np.stack(column).reshape(*sizes, *column[0].shape) for column in zip(*results, strict=True)]
    except ValueError as error:  # how numpy says that shapes do not meet
        raise AssertionError(f"{op.name}: {error}") from error


# ops that look across an axis ----------------------------------------------------------------------------------------


def _inner(op: Op, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Axes that split an inner letter over which the op's row reduces: only there it has to look at other ranks."""
    row, at = row_of(op.kind), dict(op.at)
    return tuple(axis for axis in axes if row.reductions and at.get(axis.name, "-") in row.inner)


def _along(
    inner: tuple[Axis, ...],
    step: Callable[[Array, int, int], Array],
    tensor: Tensor,
    array: Array,
    axes: tuple[Axis, ...],
) -> Array:
    """Gather an operand (innermost axis first) or keep a part of a result (outermost first) along the inner axes."""
    for axis in inner:
        placement = tensor.on(axis)
        if placement is not None and placement.dim is not None:
            array = step(array, axes.index(axis), len(axes) + placement.dim)
    return array


# conversions: `mesh` is the position of the axis of the group, `dim` that of a dimension of the tensor -----------------


def gather(array: Array, mesh: int, dim: int) -> Array:
    """Every rank of the axis gets the parts of all of them, side by side."""
    count = array.shape[mesh]
    return _everywhere(np.concatenate([array.take([rank], mesh) for rank in range(count)], dim), mesh, count)


def keep(array: Array, mesh: int, dim: int) -> Array:
    """Rank r of the axis keeps part r of what it holds."""
    count = array.shape[mesh]
    mine = [np.split(array.take([rank], mesh), count, dim)[rank] for rank in range(count)]
    return np.concatenate(mine, mesh)


def reduce(array: Array, mesh: int) -> Array:
    """Every rank of the axis gets the sum."""
    return _everywhere(array.sum(mesh, keepdims=True), mesh, array.shape[mesh])


def _everywhere(array: Array, mesh: int, count: int) -> Array:
    return np.repeat(array, count, mesh)


def _convert(op: Op, array: Array, axes: tuple[Axis, ...]) -> Array:
    """Undo what the group did to the tensor, then do what it shall: an all-to-all is a gather, of which a part stays.

    Splits are undone inside out, since the innermost axis has the neighbouring parts, and made outside in.
    """
    before, after = op.inputs[0], op.outputs[0]
    changed = {axis.name for axis in axes if before.on(axis) != after.on(axis)}
    assert changed == {axis.name for axis in op.group}, f"{op.name}: the group is {op.group_name}, {changed} changed"
    inside_out = sorted(op.group, key=lambda axis: axis.stride)
    undo, make = _STEPS[op.kind]
    for axis in inside_out:
        _assert_contiguous(op, axis)
        array = undo(array, axes.index(axis), *_dim(before, axis, len(axes)))
    for axis in reversed(inside_out):
        array = make(array, axes.index(axis), *_dim(after, axis, len(axes)))
    return array


def _dim(tensor: Tensor, axis: Axis, offset: int) -> list[int]:
    """The position of the dimension that the axis splits, if it splits one."""
    placement = tensor.on(axis)
    return [] if placement is None or placement.dim is None else [offset + placement.dim]


def _assert_contiguous(op: Op, axis: Axis) -> None:
    """An axis can only be moved while no axis inside it that stays splits the same dimension.

    Tokens that are routed to experts have no order: their parts may change places, and come back the same way.
    """
    for tensor in (op.inputs[0], op.outputs[0]):
        own = tensor.on(axis)
        staying = [p for p in tensor.place if p.axis not in op.group and p.axis.stride < axis.stride]
        contiguous = own is None or all(p.dim != own.dim or p.dim is None for p in staying)
        assert contiguous or is_routed(tensor), f"{op.name}: {tensor}"


def is_routed(tensor: Tensor) -> bool:
    """Whether only a fraction of the dense [E b s d] exists: copies of tokens on the way to, at or from experts."""
    return tensor.fraction != (1, 1)


def _nothing(array: Array, mesh: int) -> Array:
    return array


_STEPS: Mapping[str, tuple[Callable[..., Array], Callable[..., Array]]] = MappingProxyType(
    {
        "slice": (_nothing, keep),
        "reduce_scatter": (reduce, keep),
        "all_reduce": (reduce, _nothing),
        "all_to_all": (gather, keep),
        "all_gather": (gather, _nothing),
    }
)
"""What a conversion does on each axis of its group: first with the old placement, then towards the new one."""


# between global values and ranks ---------------------------------------------------------------------------------------


def scatter(tensor: Tensor, value: Array, axes: tuple[Axis, ...]) -> Array:
    """What every rank holds of a global value. A pending sum lies on the first rank of its axis."""
    assert value.shape == tensor.shape, f"{tensor.name}: {value.shape} is not {tensor.shape}"
    array = value
    for i, axis in enumerate(axes):
        array = np.repeat(np.expand_dims(array, i), axis.size, i)
        placement = tensor.on(axis)
        if placement is not None and placement.dim is not None:
            array = keep(array, i, i + 1 + placement.dim)
        elif placement is not None:
            np.moveaxis(array, i, 0)[1:] = 0
    return array


def assemble(tensor: Tensor, array: Array, axes: tuple[Axis, ...]) -> Array:
    """The global value: splits side by side, pending sums added up, one of the replicas."""
    for i, axis in reversed(list(enumerate(axes))):
        placement = tensor.on(axis)
        if placement is not None and placement.dim is not None:
            array = gather(array, i, i + 1 + placement.dim)
        elif placement is not None:
            array = reduce(array, i)
        array = array.take(0, i)
    return array
