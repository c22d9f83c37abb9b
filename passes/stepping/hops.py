"""Hops: seconds to hand the stream from each stage to the next, and its gradient back."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from stepgraph.ir.op import Op
from stepgraph.ir.program import Program
from stepgraph.passes.base import Setting
from stepgraph.passes.collective import hop_s
from stepgraph.passes.costing import Costs


def hops_s(program: Program, costed: Mapping[str, Costs], setting: Setting) -> tuple[list[float], list[float]]:
    """Seconds of every stage boundary, forwards and backwards; nothing where both stages are on one rank.

    Shapes: one entry per boundary, stages - 1.
    """
    ranks = [stage.rank for stage in program.stages]
    if len(ranks) == 1:
        return [], []
    send = costed["send"]
    forward, backward = (
        [_hop_s(op, int(size), source, to, setting) for source, to in pairwise(ranks)]
        for op, size in zip(send.graph.ops[:2], send.comm_bytes[:2], strict=True)
    )
    return forward, backward


def _hop_s(op: Op, size_bytes: int, source: int, to: int, setting: Setting) -> float:
    return 0.0 if source == to else hop_s(op, size_bytes, setting.target, source, to)
