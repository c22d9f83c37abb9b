"""Normalisation over the hidden dimension."""

from __future__ import annotations

from stepgraph.ir.tensor import Tensor
from stepgraph.lowering.builder import Builder


def norm(b: Builder, name: str, x: Tensor, kind: str) -> Tensor:
    """RMSNorm or LayerNorm with its weights; keeps one (two) fp32 statistics per token for backward.

    Shapes: x [b s d] -> [b s d].
    """
    weights = [b.param(f"{name}.weight", "d", x.shape[-1:])]
    kept = ["rstd"]
    if kind == "layernorm":
        weights.append(b.param(f"{name}.bias", "d", x.shape[-1:]))
        kept.insert(0, "mean")
    outs = [b.like(name, "bsd", [x]), *(b.like(f"{name}.{stat}", "bs", [x], "fp32") for stat in kept)]
    return b.many(kind, name, x, *weights, outs=outs)[0]
