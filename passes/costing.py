"""costs: FLOPs, bytes, kernels and seconds of every op of a graph, by the three rules."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from stepgraph.errors import refuse
from stepgraph.hwtargets.links import GroupGeometry
from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op
from stepgraph.ir.rows import Row, Rule, flops_of
from stepgraph.ir.table import row_of
from stepgraph.ir.tensor import Axis
from stepgraph.passes.base import Setting
from stepgraph.passes.collective import collective_s, comm_bytes, geometry_of, hop_s
from stepgraph.passes.gemm import compute_s, math_dtype
from stepgraph.passes.profiles import kernels_of, operand_bytes
from stepgraph.passes.traffic import group_bytes, launches

OWN_TIME = (Rule.GEMM, Rule.ATTENTION, Rule.TOPK)
"""Rules whose time is not bytes over bandwidth; fusion leaves it alone."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@attrs.frozen(eq=False)
class Costs:
    """One number per op, by its position in `graph.ops`, for one rank and one execution.

    compute_s, hbm_s, comm_s: seconds under each rule; an op is under one, AdamW under two. Top-k counts as compute: its
    throughput does not follow the HBM rate. roofline_s: what
    max(F / peak, B / beta) would have said, without efficiencies, collectives at nothing.
    """

    graph: Graph
    flops: Ints
    hbm_bytes: Ints
    comm_bytes: Ints
    kernels: Ints
    compute_s: Floats
    hbm_s: Floats
    comm_s: Floats
    roofline_s: Floats

    @property
    def time_s(self) -> Floats:
        """Seconds of each op, its launch not included."""
        return self.compute_s + self.hbm_s + self.comm_s


def costs(graph: Graph, setting: Setting) -> Costs:
    """Cost every op of a graph.

    GEMM F / (peak eta); HBM c B / (reachable beta); collectives by the ring or all-to-all rule; AdamW's 11 FLOPs per
    parameter at the peak, as the source text has it. A fused kernel's bytes, kernels and HBM time stand at its first
    member. Raises: UnknownKindError, never a silent zero.
    """
    geometries: dict[tuple[Axis, ...], GroupGeometry] = {}
    found = [_cost(op, row_of(op.kind), setting, geometries) for op in graph.ops]
    columns = list(zip(*found, strict=True)) or [()] * 8
    flops, hbm, comm, kernels = (_integers(graph, column) for column in columns[:4])
    times = [np.array(column, dtype=np.float64) for column in columns[4:]]
    unfused = Costs(graph, flops, hbm, comm, kernels, *times)
    return apply_groups(unfused, setting) if graph.groups else unfused


def apply_groups(cost: Costs, setting: Setting) -> Costs:
    """Unfused costs with every fused kernel in place of its members.

    Matmuls, attention and top-k keep their own time; the kernel adds HBM time for max(0, its traffic minus theirs), so
    what they move by themselves stays inside their efficiency.
    """
    hbm_bytes, kernels, hbm_s = cost.hbm_bytes.copy(), cost.kernels.copy(), cost.hbm_s.copy()
    graph, rate = cost.graph, setting.target.hbm.effective_bytes_per_s
    for group in graph.groups:
        members = [graph.positions[name] for name in group.members]
        traffic = group_bytes(graph, group, setting.profile)
        own = sum(int(cost.hbm_bytes[i]) for i in members if row_of(graph.ops[i].kind).rule in OWN_TIME)
        run = launches(graph, group, setting.profile)
        hbm_bytes[members], kernels[members], hbm_s[members] = 0, 0, 0.0
        first = members[0]
        hbm_bytes[first], kernels[first] = traffic, run
        hbm_s[_streaming(graph, members)] = max(0, traffic - own) / rate / group.efficiency
    return attrs.evolve(cost, hbm_bytes=hbm_bytes, kernels=kernels, hbm_s=hbm_s)


def _streaming(graph: Graph, members: Sequence[int]) -> int:
    """The member at which a kernel's HBM time is booked: the first that streams, so that it lands in its bucket."""
    return next((i for i in members if row_of(graph.ops[i].kind).rule not in OWN_TIME), members[0])


def _integers(graph: Graph, column: Sequence[int]) -> Ints:
    """A column as int64. Raises: InputError where one op counts more than that."""
    try:
        return np.array(column, dtype=np.int64)
    except OverflowError:
        op = graph.ops[max(range(len(column)), key=column.__getitem__)]
        what = f"{op.name} alone counts {max(column):.1e} FLOPs or bytes on one rank"
        raise refuse(
            "too-large", f"graph {graph.name}", what, "less than 2**63", "lower the micro-batch or seq"
        ) from None


_Numbers = tuple[int, int, int, int, float, float, float, float]


def _cost(op: Op, row: Row, setting: Setting, geometries: dict[tuple[Axis, ...], GroupGeometry]) -> _Numbers:
    execution = setting.profile[op.kind]
    kernels = kernels_of(op, execution)
    if row.rule is Rule.FREE:
        return 0, 0, 0, kernels, 0.0, 0.0, 0.0, 0.0
    if row.rule in (Rule.COLLECTIVE, Rule.POINT_TO_POINT):
        size = comm_bytes(op)
        return 0, 0, size, kernels, 0.0, 0.0, _comm_s(op, row, size, setting, geometries), 0.0
    if row.rule is Rule.TOPK:
        return _topk(op, kernels, setting)
    flops, traffic = flops_of(op, row), operand_bytes(op, execution)
    return _on_chip(op, row, flops, traffic, kernels, setting)


def _topk(op: Op, kernels: int, setting: Setting) -> _Numbers:
    """m E b / tau: scores of all experts at the throughput of the target's top-k kernel.

    Source: How to Think About Asymptotic Times, section 5.
    """
    scores = op.inputs[0].nbytes
    ideal = scores / setting.target.hbm.bandwidth_bytes_per_s
    return 0, scores, 0, kernels, scores / setting.target.topk_bytes_per_s, 0.0, 0.0, ideal


def _comm_s(op: Op, row: Row, size: int, setting: Setting, geometries: dict[tuple[Axis, ...], GroupGeometry]) -> float:
    if row.rule is Rule.POINT_TO_POINT:
        return hop_s(op, size, setting.target)
    geometry = geometries.get(op.group)
    if geometry is None:
        geometry = geometries[op.group] = geometry_of(op.group, setting.target.scale_up.ranks)
    return collective_s(op, size, setting.target, geometry)


def _on_chip(op: Op, row: Row, flops: int, traffic: int, kernels: int, setting: Setting) -> _Numbers:
    hbm = setting.target.hbm
    peak = setting.target.peak_flops_per_s(math_dtype(op))
    roofline = max(flops / peak, traffic / hbm.bandwidth_bytes_per_s)
    if row.rule in (Rule.GEMM, Rule.ATTENTION):
        return flops, traffic, 0, kernels, compute_s(op, row, flops, setting), 0.0, 0.0, roofline
    return flops, traffic, 0, kernels, flops / peak, traffic / hbm.effective_bytes_per_s, 0.0, roofline
