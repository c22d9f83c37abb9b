"""The collective rule: which bytes an op moves over which link, and how long that takes."""

from __future__ import annotations

from stepgraph.hwtargets.links import GroupGeometry, all_to_all_s, group_geometry, point_to_point_s, ring_s
from stepgraph.hwtargets.target import Target
from stepgraph.ir.op import Op, group_offsets
from stepgraph.ir.tensor import Axis


def comm_bytes(op: Op) -> int:
    """Bytes that count for a collective, on one rank.

    all-gather: its result; reduce-scatter, all-reduce, all-to-all, send, recv: what goes in (comes out) locally.
    Source: the conventions of nccl-tests doc/PERFORMANCE.md (S is the whole buffer).
    """
    if op.kind == "all_gather" or not op.inputs:
        return op.outputs[0].nbytes
    return op.inputs[0].nbytes


def geometry_of(group: tuple[Axis, ...], domain: int) -> GroupGeometry:
    """Where the ranks of a group lie in scale-up domains."""
    return group_geometry(group_offsets(group), domain)


def collective_s(op: Op, size_bytes: int, target: Target, geometry: GroupGeometry) -> float:
    """Seconds of one collective whose ranks lie as `geometry` says, all its pieces one after the other.

    ring: t0 + (P-1) t_link + (P-1)/P S / (alpha(S) beta); an all-reduce is a reduce-scatter and an all-gather.
    Source: How to Think About Asymptotic Times, rule 3.
    """
    pieces = int(op.attr("pieces", 1) or 1)
    piece = size_bytes / pieces
    if op.kind == "all_to_all":
        return pieces * all_to_all_s(target, geometry, piece)
    rings = 2 if op.kind == "all_reduce" else 1
    return pieces * rings * ring_s(target, geometry, piece)


def crosses_domain(axis: Axis, index: int, to: int, domain: int) -> bool:
    """Whether any rank of position `index` on the axis sits in another scale-up domain than its peer at `to`."""
    first, apart = index * axis.stride, (to - index) * axis.stride
    return any(rank // domain != (rank + apart) // domain for rank in range(first, first + axis.stride))


def hop_s(op: Op, size_bytes: int, target: Target, index: int = 0, to: int | None = None) -> float:
    """Seconds to hand a tensor from position `index` of the pipeline to position `to`: the next one, if not given."""
    crosses = crosses_domain(op.group[0], index, index + 1 if to is None else to, target.scale_up.ranks)
    return point_to_point_s(target, crosses, size_bytes)
