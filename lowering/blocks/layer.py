"""A transformer layer: attention, then the feed-forward part (or both at once), with norms and residual adds."""

from __future__ import annotations

from collections.abc import Callable

from stepgraph.ir.tensor import Tensor
from stepgraph.lowering.blocks.attention import attention
from stepgraph.lowering.blocks.latent import latent_attention
from stepgraph.lowering.blocks.mlp import mlp
from stepgraph.lowering.blocks.moe import experts
from stepgraph.lowering.blocks.norm import norm
from stepgraph.lowering.builder import Builder
from stepgraph.lowering.model import Attention, Experts, Layer


def layer(b: Builder, x: Tensor, spec: Layer, load: tuple[int, int] = (1, 1)) -> Tensor:
    """One layer.

    Shapes: x [b s d] -> [b s d]. load: how uneven experts are visited. A parallel layer has one norm and, under TP,
    one reduction: both parts' pending sums are added first.
    """

    def feed(h: Tensor) -> Tensor:
        return experts(b, h, spec.mlp, load) if isinstance(spec.mlp, Experts) else mlp(b, h, spec.mlp)

    def attend(h: Tensor) -> Tensor:
        sort = spec.attention
        return attention(b, h, sort) if isinstance(sort, Attention) else latent_attention(b, h, sort)

    if spec.parallel:
        h = norm(b, "attn.norm", x, spec.norm)
        both = b.op("add", "mlp.parallel_add", attend(h), feed(h), out="bsd")
        return b.op("add", "mlp.residual", x, both, out="bsd")
    x = _residual(b, x, "attn", attend, spec)
    return _residual(b, x, "moe" if isinstance(spec.mlp, Experts) else "mlp", feed, spec)


def _residual(b: Builder, x: Tensor, part: str, function: Callable[[Tensor], Tensor], spec: Layer) -> Tensor:
    """x + f(norm(x)), x + norm(f(x)) or x + norm(f(norm(x)))."""
    h = x if spec.norms == "post" else norm(b, f"{part}.norm", x, spec.norm)
    y = function(h)
    if spec.norms != "pre":
        y = norm(b, f"{part}.post_norm", b.pin(y), spec.norm)
    return b.op("add", f"{part}.residual", x, y, out="bsd")
