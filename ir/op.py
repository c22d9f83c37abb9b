"""Ops: one execution of one kind, with its operands, its phase and the op that it belongs to."""

from __future__ import annotations

import enum

import attrs

from stepgraph.ir.tensor import Axis, Tensor

Attr = int | float | str | bool


class Phase(enum.Enum):
    """When an op runs: per micro-batch (forward, backward) or once per step."""

    FORWARD = "forward"
    BACKWARD = "backward"  # recomputed forward ops run here too, with role "recompute"
    STEP = "step"


SUM_REPLICATED = "sum_replicated"
"""Origin of collectives over TP, not over data, in the step: gradients of parameters that TP replicates."""


AGAIN = ("recompute", "regather")
"""Roles of ops that repeat a forward op in backward."""


@attrs.frozen
class Op:
    """One execution. Its unique `name` is its identity; two ops that compute the same are still two.

    attrs: sorted (name, value) pairs. at: (axis name, letter) for every axis that splits one of the op's letters;
    "+" lets a pending sum through. of, role: for backward ops, the forward op and what is computed for it ("dx",
    "dw", "recompute", "regather", "sum"); "inner" is a collective that an op pays by itself, forward too; for a collective in backward, the producer of the tensor whose gradient it
    moves, and for a regather the forward collective that it repeats.
    group: the mesh axes over which a collective runs. module: the block that it belongs to. origin: the lowering
    step that made it.
    """

    name: str
    kind: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()
    at: tuple[tuple[str, str], ...] = ()
    phase: Phase = Phase.FORWARD
    of: str = ""
    role: str = ""
    group: tuple[Axis, ...] = ()
    module: str = ""
    origin: str = ""

    def attr(self, name: str, default: Attr | None = None) -> Attr | None:
        """The value of an attribute, or `default`."""
        for key, value in self.attrs:
            if key == name:
                return value
        return default

    @property
    def group_size(self) -> int:
        """Ranks that take part in the collective; 1 for an op that is none."""
        size = 1
        for axis in self.group:
            size *= axis.size
        return size

    @property
    def group_name(self) -> str:
        """The group that the axes are, if lowering named one, else their names joined: `tp`, `ep`, `dp+cp`."""
        return str(self.attr("span") or "+".join(axis.name for axis in self.group))


def group_offsets(group: tuple[Axis, ...]) -> tuple[int, ...]:
    """Where a group's ranks lie, counted from its first rank.

    The product of the axes: sum over axes of index x stride, sorted. Source: rank order tp-cp-ep-dp-pp, tp fastest
    (NVIDIA/Megatron-LM megatron/core/parallel_state.py).
    """
    offsets = [0]
    for axis in group:
        offsets = [base + index * axis.stride for base in offsets for index in range(axis.size)]
    return tuple(sorted(offsets))
