"""What happens once per step."""

from __future__ import annotations

from stepgraph.ir.kinds.sources import PAPER
from stepgraph.ir.rows import Flops, Row, Rule

ROWS = (
    Row(
        "grad_norm",
        Rule.HBM,
        "sum of squares of all gradients, for clipping; the sum over ranks is a scalar, kept as metadata",
        "Pascanu et al. 2013, arXiv:1211.5063",
        inner="p",
        awaited=True,
    ),
    Row(
        "adamw",
        Rule.HBM,
        "moments, master weights, parameters; 11 FLOPs per parameter",
        f"{PAPER}, section 7",
        flops=Flops.ADAMW,
    ),
)
