"""Norms, which keep one or two statistics per row."""

from __future__ import annotations

from stepgraph.ir.kinds.sources import PAPER
from stepgraph.ir.rows import Grad, Row, Rule

ROWS = (
    Row(
        "rmsnorm",
        Rule.HBM,
        "x / rms(x) * weight; keeps 1/rms",
        f"{PAPER}, rule 2; Zhang and Sennrich 2019, arXiv:1910.07467",
        whole="dcr",
        grads=(
            Grad("dx", "rmsnorm_dx", ("dy0", "x0", "x1", "y1"), (0,)),
            Grad("dw", "rmsnorm_dw", ("dy0", "x0", "y1"), (1,)),
        ),
    ),
    Row("rmsnorm_dx", Rule.HBM, "gradient of the normalised input", f"{PAPER}, rule 2", whole="dcr"),
    Row("rmsnorm_dw", Rule.HBM, "gradient of the weight: a sum over tokens", f"{PAPER}, rule 2", whole="dcr"),
    Row(
        "rmsnorm_heads",
        Rule.HBM,
        "one norm over all heads together; split heads reduce the sum of squares",
        "allenai/OLMo-core src/olmo_core/nn/attention (QK norm over the full width)",
        whole="c",
        inner="h",
        reductions=("squares",),
        grads=(
            Grad("dx", "rmsnorm_heads_dx", ("dy0", "x0", "x1", "y1"), (0,)),
            Grad("dw", "rmsnorm_heads_dw", ("dy0", "x0", "y1"), (1,)),
        ),
    ),
    Row(
        "rmsnorm_heads_dx",
        Rule.HBM,
        "gradient of the normalised input; split heads reduce one dot product per token",
        "as rmsnorm_heads",
        whole="c",
        inner="h",
        reductions=("dots",),
    ),
    Row("rmsnorm_heads_dw", Rule.HBM, "gradient of the weight", "as rmsnorm_heads", whole="c"),
    Row(
        "layernorm",
        Rule.HBM,
        "(x - mean) / std * weight + bias; keeps mean and 1/std",
        f"{PAPER}, rule 2; Ba et al. 2016, arXiv:1607.06450",
        whole="d",
        grads=(
            Grad("dx", "layernorm_dx", ("dy0", "x0", "x1", "y1", "y2"), (0,)),
            Grad("dw", "layernorm_dw", ("dy0", "x0", "y1", "y2"), (1, 2)),
        ),
    ),
    Row("layernorm_dx", Rule.HBM, "gradient of the normalised input", f"{PAPER}, rule 2", whole="d"),
    Row("layernorm_dw", Rule.HBM, "gradients of weight and bias", f"{PAPER}, rule 2", whole="d"),
)
