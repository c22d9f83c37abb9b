"""Contractions: Y = X W and its gradients."""

from __future__ import annotations

from stepgraph.ir.kinds.sources import PAPER
from stepgraph.ir.rows import Flops, Grad, Row, Rule

ROWS = (
    Row(
        "linear",
        Rule.GEMM,
        "Y = X W",
        f"{PAPER}, rule 1",
        flops=Flops.CONTRACTION,
        grads=(
            Grad("dx", "linear_dx", ("dy0", "x1"), (0,)),
            Grad("dw", "linear_dw", ("dy0", "x0"), (1,)),
        ),
    ),
    Row("linear_dx", Rule.GEMM, "dX = dY W^T", f"{PAPER}, section 6", flops=Flops.CONTRACTION),
    Row("linear_dw", Rule.GEMM, "dW = X^T dY", f"{PAPER}, section 6", flops=Flops.CONTRACTION),
)
