"""What a meaning gets to know of the rank that it runs on, and constants of the models that the tests run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from stepgraph.ir.op import Op
from stepgraph.ir.tensor import Axis, Tensor

Array = npt.NDArray[Any]
EPS = 1e-5
CAP = 2.0
"""Of soft-capped scores and logits: low enough to bend them."""


@attrs.frozen
class Where:
    """A rank: its index on every axis of the mesh, outermost first."""

    axes: tuple[Axis, ...]
    index: tuple[int, ...]

    def start(self, tensor: Tensor, letter: str) -> int:
        """Global index of the first element of this rank's slice of the dimension `letter`."""
        dim, begin = tensor.dims.index(letter), 0
        size = tensor.shape[dim]
        for placement in tensor.place:
            if placement.dim == dim:
                size //= placement.axis.size
                begin += size * self.index[[axis.name for axis in self.axes].index(placement.axis.name)]
        return begin


Meaning = Callable[[Op, Sequence[Array], Where], tuple[Array, ...]]
"""From an op, its operands on one rank and the rank to the op's results on that rank."""


def soft_cap(x: Array) -> Array:
    """cap tanh(x / cap)."""
    return np.asarray(CAP * np.tanh(x / CAP))


def soft_cap_slope(capped: Array) -> Array:
    """The derivative of `soft_cap` by its result: 1 - (y / cap)^2; 0 where a score is hidden."""
    return np.where(np.isfinite(capped), 1 - (np.where(np.isfinite(capped), capped, 0) / CAP) ** 2, 0)
