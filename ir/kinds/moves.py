"""Moves: conversions of a placement, and stage boundaries."""

from __future__ import annotations

from stepgraph.ir.kinds.sources import NCCL
from stepgraph.ir.rows import Row, Rule

ROWS = (
    Row("slice", Rule.FREE, "keep this rank's part of a replicated tensor", "placement algebra: R to S"),
    Row("reduce_scatter", Rule.COLLECTIVE, "finish a pending sum, keep a part", NCCL),
    Row("all_reduce", Rule.COLLECTIVE, "finish a pending sum, keep all of it", NCCL),
    Row("all_to_all", Rule.COLLECTIVE, "move the split to another dimension", NCCL),
    Row("all_gather", Rule.COLLECTIVE, "collect the parts on every rank", NCCL),
    Row(
        "send", Rule.POINT_TO_POINT, "hand a tensor to a neighbouring stage", "Narayanan et al. 2021, arXiv:2104.04473"
    ),
    Row(
        "recv",
        Rule.POINT_TO_POINT,
        "take a tensor from a neighbouring stage",
        "Narayanan et al. 2021, arXiv:2104.04473",
    ),
)
