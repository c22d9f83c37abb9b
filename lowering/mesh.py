"""The device mesh of a layout, and where every kind of tensor is at home on it.

Ranks run tp-cp-ep-dp-pp, tp fastest (NVIDIA/Megatron-LM megatron/core/parallel_state.py). An axis of one rank does not
exist: with TP = 1 there is no TP axis, so no TP op can be emitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import prod

import attrs

from stepgraph.ir.tensor import Axis, Place, Placement
from stepgraph.lowering.layout import Layout

ORDER = ("tp", "cp", "dp", "pp")
"""Axes from the fastest to the slowest."""

PARAM_LETTERS = (("tp", "hfv"),)
"""What an axis splits of a parameter: TP its heads, its FFN width or its vocabulary."""

TOKEN_LETTERS = (("dp", "b"), ("cp", "s"))
"""What an axis splits of token ids and labels."""


@attrs.frozen
class Mesh:
    """Axes with more than one rank, outermost first, and whether the stream is sequence-parallel."""

    axes: tuple[Axis, ...]
    sequence_parallel: bool

    @cached_property
    def splitting(self) -> tuple[Axis, ...]:
        """Axes that split tensors: all but the pipeline."""
        return tuple(axis for axis in self.axes if axis.name != "pp")

    @cached_property
    def data(self) -> tuple[Axis, ...]:
        """Axes over which every rank sees other tokens: gradients of a parameter are summed over them."""
        return tuple(axis for axis in self.axes if axis.name in ("dp", "cp"))

    def axis(self, name: str) -> Axis | None:
        """The axis of that name, or None when it has one rank."""
        return next((axis for axis in self.axes if axis.name == name), None)

    def home_of_param(self, dims: str) -> Place:
        """Where a parameter with these letters lives."""
        return self._split(dims, PARAM_LETTERS)

    def home_of_tokens(self, dims: str) -> Place:
        """Where token ids and labels live."""
        return self._split(dims, TOKEN_LETTERS)

    def home_of_stream(self, dims: str) -> Place:
        """Where the residual stream lives: with sequence parallelism TP splits its tokens too."""
        letters = (*TOKEN_LETTERS, ("tp", "s")) if self.sequence_parallel else TOKEN_LETTERS
        return self._split(dims, letters)

    def _split(self, dims: str, letters: tuple[tuple[str, str], ...]) -> Place:
        return tuple(_placements(self.splitting, dims, dict(letters)))


def _placements(axes: tuple[Axis, ...], dims: str, letters: dict[str, str]) -> Iterator[Placement]:
    for axis in axes:
        dim = next((i for i, letter in enumerate(dims) if letter in letters.get(axis.name, "")), None)
        if dim is not None:
            yield Placement(axis, dim)


def mesh_of(layout: Layout) -> Mesh:
    """The mesh of a layout: sizes from it, strides from the rank order.

    Formula: the stride of an axis is the product of the sizes of all faster axes.
    """
    sizes = [getattr(layout, name) for name in ORDER]
    axes = [Axis(name, size, prod(sizes[:i])) for i, (name, size) in enumerate(zip(ORDER, sizes, strict=True))]
    return Mesh(tuple(axis for axis in reversed(axes) if axis.size > 1), bool(layout.sp))
