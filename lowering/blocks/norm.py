"""Normalisation: over the hidden width, over one head, over all heads, or over a latent."""

from __future__ import annotations

from stepgraph.ir.tensor import Tensor
from stepgraph.lowering.builder import Builder


def norm(b: Builder, name: str, x: Tensor, kind: str, over: str = "") -> Tensor:
    """RMSNorm or LayerNorm with its weights; keeps one (two) fp32 statistics per normalised row for backward.

    over: the letters that are normalised together, by default the last one; "hc" is one norm over all heads.
    Shapes: like x.
    """
    over = over or x.dims[-1]
    shape = tuple(size for letter, size in zip(x.dims, x.shape, strict=True) if letter in over)
    weights = [b.param(f"{name}.weight", over, shape)]
    kept = ["rstd"]
    if kind == "layernorm":
        weights.append(b.param(f"{name}.bias", over, shape))
        kept.insert(0, "mean")
    rows = "".join(letter for letter in x.dims if letter not in over)
    outs = [b.like(name, x.dims, [x]), *(b.like(f"{name}.{stat}", rows, [x], "fp32") for stat in kept)]
    return b.many("rmsnorm_heads" if len(over) > 1 else kind, name, x, *weights, outs=outs)[0]
