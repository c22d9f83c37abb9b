"""Buckets: where the seconds of one rank go. They add up to the step."""

from __future__ import annotations

from collections.abc import Iterable
from operator import add, attrgetter

import attrs

from stepgraph.ir.op import SUM_REPLICATED, Op, Phase
from stepgraph.ir.rows import Rule
from stepgraph.ir.table import row_of


@attrs.frozen
class Buckets:
    """Seconds by cause. hbm: bandwidth-bound ops of the model; optimizer: those of the step; pp_transfer: activations
    on the link; pp_wait: blocked in a pipeline call; idle: nothing left to do until the step ends."""

    gemm: float = 0.0
    attention: float = 0.0
    hbm: float = 0.0
    tp: float = 0.0
    ep: float = 0.0
    cp: float = 0.0
    pp_transfer: float = 0.0
    pp_wait: float = 0.0
    dp: float = 0.0
    launch: float = 0.0
    optimizer: float = 0.0
    idle: float = 0.0

    @property
    def total(self) -> float:
        """Their sum."""
        return float(sum(_values(self)))

    def __add__(self, other: Buckets) -> Buckets:
        return Buckets(*map(add, _values(self), _values(other)))

    def __mul__(self, times: float) -> Buckets:
        return Buckets(*[value * times for value in _values(self)])


NAMES = tuple(field.name for field in attrs.fields(Buckets))
"""Bucket names in order."""

_values = attrgetter(*NAMES)


def bucket_of(op: Op) -> str:
    """The bucket of an op's own time; "" for stage boundaries, whose time the pipeline decides."""
    rule = row_of(op.kind).rule
    if rule is Rule.POINT_TO_POINT:
        return ""
    if rule is Rule.COLLECTIVE:
        return _collective_bucket(op)
    if rule in (Rule.GEMM, Rule.ATTENTION):
        return "gemm" if rule is Rule.GEMM else "attention"
    return "optimizer" if op.phase is Phase.STEP else "hbm"


def _collective_bucket(op: Op) -> str:
    """Where a collective's time goes: by what it is for, which its phase, its origin and its axes tell.

    In the step, data-parallel groups may be called by any atom: those of experts run over TP where ETP is 1.
    """
    span = op.attr("span")
    names = {str(span)} if span else {name for axis in op.group for name in axis.name.split(".")}
    if names == {"ends"}:
        return "pp_transfer"
    if op.phase is Phase.STEP:
        return "tp" if op.origin == SUM_REPLICATED else "dp"
    if op.kind == "all_to_all":
        return "ep"
    if names == {"dp"} and op.kind in ("all_gather", "reduce_scatter"):
        return "dp"
    if names <= {"tp", "etp"}:
        return "tp"
    return "cp" if names == {"cp"} else "ep"


def gather_buckets(ops: Iterable[Op], seconds: Iterable[float]) -> Buckets:
    """Sum the seconds of ops into their buckets."""
    totals: dict[str, float] = {}
    for op, time in zip(ops, seconds, strict=True):
        name = bucket_of(op)
        if name:
            totals[name] = totals.get(name, 0.0) + time
    return Buckets(**totals)
