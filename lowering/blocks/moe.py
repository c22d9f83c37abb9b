"""A mixture of experts: router, dispatch, grouped expert GEMMs, combine, and what every token visits besides.

The router is three operators, not one: a small GEMM into E logits, a top-k, and a permutation of k copies.
"""

from __future__ import annotations

import attrs

from stepgraph.ir.tensor import Tensor
from stepgraph.lowering.blocks.mlp import mlp, up_and_activate
from stepgraph.lowering.builder import Builder
from stepgraph.lowering.model import Experts

COUNTS = "token counts per expert travel first"
"""An all-to-all of E integers: listed on the op, not costed."""


def experts(b: Builder, h: Tensor, spec: Experts, load: tuple[int, int] = (1, 1)) -> Tensor:
    """From the normed input to the weighted sum of the experts' outputs.

    load: (part, whole) by which the busiest rank's tokens exceed an even share: capacity or imbalance. Shapes: h
    [b s d] -> [b s d]; routed tokens are [E b s d], of which k/E exists. FLOPs per token: 2 d E + k times an expert.
    Source: How to Think About Asymptotic Times, section 5; NVIDIA/Megatron-LM megatron/core/transformer/moe.
    """
    scores = _route(b, h, spec)
    x = _latent(b, h, spec) if spec.latent else h
    routed = _visit(b, x, scores, spec, load)
    y = b.op("unpermute", "moe.unpermute", scores, routed, out=x.dims)
    y = _latent_up(b, y, h) if spec.latent else y
    return y if spec.shared is None else b.op("add", "moe.shared_add", y, _shared(b, h, spec), out="bsd")


def _route(b: Builder, h: Tensor, spec: Experts) -> Tensor:
    """Scores of the chosen experts, [b s E], in fp32; the load-balancing loss hangs on to them."""
    weight = b.param("moe.router.weight", "dE", (h.shape[-1], spec.experts))
    outs = [b.like("moe.router", "bsE", [h, weight], "fp32")]
    logits = b.many("linear", "moe.router", h, weight, outs=outs, family="router")[0]
    if spec.router_bias:
        bias = b.param("moe.router.bias", "E", (spec.experts,))
        logits = b.many("bias_add", "moe.router_bias", logits, bias, outs=[_named(logits, "moe.router_bias")])[0]
    scores = b.many("topk", "moe.topk", logits, outs=[_named(logits, "moe.topk")], k=spec.top_k, scoring=spec.scoring)[
        0
    ]
    return b.many("aux_loss", "moe.aux_loss", scores, outs=[_named(scores, "moe.aux_loss")])[0]


def _named(like: Tensor, name: str) -> Tensor:
    return attrs.evolve(like, name=name)


def _visit(b: Builder, x: Tensor, scores: Tensor, spec: Experts, load: tuple[int, int]) -> Tensor:
    """Copies go to their experts, through them, and back."""
    fraction = (spec.top_k * load[0], spec.experts * load[1])
    copies = Tensor("moe.permute", f"E{x.dims}", (spec.experts, *x.shape), b.dtype, fraction=fraction)
    sent = b.pin(
        b.many("permute", "moe.permute", x, scores, outs=[copies], metadata=COUNTS)[0], "experts", "moe.dispatch"
    )
    n = (spec.experts,)
    act = up_and_activate(b, sent, spec.expert, "moe.experts", "experts_up", "grouped_linear", "E", n)
    width = x.dims[-1]
    weight = b.param("moe.experts.down.weight", f"Ef{width}", (*n, spec.expert.ffn, x.shape[-1]))
    y = b.op("grouped_linear", "moe.experts.down", act, weight, out=f"Ebs{width}", family="experts_down")
    if spec.expert.bias:
        bias = b.param("moe.experts.down.bias", f"E{width}", (*n, x.shape[-1]))
        y = b.op("bias_add", "moe.experts.down_bias", y, bias, out=y.dims)
    return b.pin(y, "stream", "moe.combine")


def _latent(b: Builder, h: Tensor, spec: Experts) -> Tensor:
    weight = b.param("moe.latent_down.weight", "dz", (h.shape[-1], spec.latent))
    return b.op("linear", "moe.latent_down", h, weight, out="bsz", family="experts_up")


def _latent_up(b: Builder, y: Tensor, h: Tensor) -> Tensor:
    weight = b.param("moe.latent_up.weight", "zd", (y.shape[-1], h.shape[-1]))
    return b.op("linear", "moe.latent_up", y, weight, out="bsd", family="experts_down")


def _shared(b: Builder, h: Tensor, spec: Experts) -> Tensor:
    """The expert that every token visits, gated or not."""
    assert spec.shared is not None
    y = mlp(b, h, spec.shared, "moe.shared", ("shared_up", "shared_down"))
    if not spec.shared_gate:
        return y
    gate = b.op(
        "linear",
        "moe.shared_gate",
        h,
        b.param("moe.shared_gate.weight", "dg", (h.shape[-1], 1)),
        out="bsg",
        family="router",
    )
    return b.op("gate_mul", "moe.shared_gated", b.pin(y), gate, out="bsd")
