"""Tensors: letters, global sizes, and what each mesh axis does to them.

A placement says, per axis, that the tensor is split on one of its dimensions or that a sum over the axis is still
pending; an axis that is not named replicates it. Local shape and bytes follow, so no pass can forget to divide.
"""

from __future__ import annotations

import enum
from math import prod
from types import MappingProxyType

import attrs

DTYPE_BYTES = MappingProxyType({"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4, "fp8": 1})
"""Bytes of one element, by type name."""


class Kind(enum.Enum):
    """What a tensor is to the step: it decides who owns its memory."""

    INPUT = "input"  # token ids and labels: no gradient
    PARAM = "param"
    ACT = "act"
    GRAD = "grad"
    STATE = "state"  # optimizer moments and master weights


@attrs.frozen
class Axis:
    """One atom of the device mesh.

    Rank `r` of the axis lies `r * stride` global ranks after its first, so a group of axes knows where its ranks
    are without asking for the mesh.
    """

    name: str
    size: int
    stride: int


@attrs.frozen
class Placement:
    """What one axis does to a tensor: splits dimension `dim`, or (None) leaves a sum pending."""

    axis: Axis
    dim: int | None


Place = tuple[Placement, ...]
"""A tensor's placements in mesh order, outermost axis first; axes that replicate it are absent."""


@attrs.frozen
class Tensor:
    """A named value with one letter and one global size per dimension.

    fraction: (part, whole) of the dense shape that exists. Tokens routed to experts are written as dense [E b s d] of
    which k/E is there, so that dispatching them is one letter giving way to another.

    Shapes: `shape` is global; `local_shape` is what one rank holds (sizes divide, the layout sees to it).
    """

    name: str
    dims: str
    shape: tuple[int, ...]
    dtype: str = "bf16"
    kind: Kind = Kind.ACT
    place: Place = ()
    fraction: tuple[int, int] = (1, 1)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Sizes on one rank: each dimension over the axes that split it."""
        if not self.place:
            return self.shape
        sizes = list(self.shape)
        for placement in self.place:
            if placement.dim is not None:
                sizes[placement.dim] //= placement.axis.size
        return tuple(sizes)

    @property
    def elements(self) -> int:
        """Elements on one rank, rounded up where only a fraction exists."""
        if self.fraction == (1, 1):
            return prod(self.local_shape)
        part, whole = self.fraction
        return -(-prod(self.local_shape) * part // whole)

    @property
    def nbytes(self) -> int:
        """Bytes on one rank: elements x bytes of the type."""
        return self.elements * DTYPE_BYTES[self.dtype]

    def on(self, axis: Axis) -> Placement | None:
        """The placement that this axis gives the tensor, or None when it replicates it."""
        for placement in self.place:
            if placement.axis.name == axis.name:
                return placement
        return None

    def __str__(self) -> str:
        return describe(self)


def describe(tensor: Tensor) -> str:
    """Dims with the axes that split them, pending sums, and what fraction exists: `[E/ep b s d] sum(tp) 8/64`."""
    splits = ["".join(f"/{p.axis.name}" for p in tensor.place if p.dim == i) for i in range(len(tensor.dims))]
    inside = " ".join(letter + split for letter, split in zip(tensor.dims, splits, strict=True))
    pending = ",".join(p.axis.name for p in tensor.place if p.dim is None)
    part = "" if tensor.fraction == (1, 1) else f" {tensor.fraction[0]}/{tensor.fraction[1]}"
    return f"[{inside}]" + (f" sum({pending})" if pending else "") + part


def is_of_experts(param: Tensor) -> bool:
    """Whether a parameter belongs to single experts: its first letter is E, and it is more than a number per expert.

    The router's weight [d E] and its bias [E] belong to the router.
    """
    return len(param.dims) > 1 and param.dims[0] == "E"
