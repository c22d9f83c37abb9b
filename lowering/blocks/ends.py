"""The two ends of a decoder: token (and position) embedding, and final norm, output head and loss."""

from __future__ import annotations

from stepgraph.ir.tensor import Tensor
from stepgraph.lowering.blocks.norm import norm
from stepgraph.lowering.builder import Builder
from stepgraph.lowering.model import Model

EMBEDDING_WEIGHT = "embedding.weight"
"""Name of the token table; a tied head reads the same name."""


def embedding(b: Builder, model: Model, batch: int, sequence: int) -> Tensor:
    """Token rows, plus learned positions where the model has them.

    Shapes: ids [b s] -> [b s d]. With the table split over the vocabulary the result is a pending sum, and nothing in
    the graph says whether it should become replicated or sequence-split, so it is pinned to the stream.
    """
    table = b.param(EMBEDDING_WEIGHT, "vd", (model.vocab, model.hidden))
    x = b.op("embedding", "embedding.tokens", b.tokens("ids", batch, sequence), table, out="bsd")
    if model.learned_positions:
        positions = b.param("embedding.positions.weight", "ld", (model.learned_positions, model.hidden))
        x = b.op("position_add", "embedding.positions", x, positions, out="bsd")
    return b.pin(x)


def head(b: Builder, model: Model, x: Tensor) -> Tensor:
    """Final norm, logits and the loss of each token.

    Shapes: x [b s d] -> loss [b s]. FLOPs: 2 m d vocab. The loss keeps the fp32 softmax for backward.
    """
    return logits_and_loss(b, model, norm(b, "head.norm", x, model.final_norm))


def logits_and_loss(b: Builder, model: Model, h: Tensor) -> Tensor:
    """Logits of the normed stream and the loss of each token. Shapes: h [b s d] -> [b s]."""
    name = EMBEDDING_WEIGHT if model.tied_embeddings else "head.weight"
    logits = b.op(
        "linear", "head.logits", h, b.param(name, "vd", (model.vocab, model.hidden)), out="bsv", family="lm_head"
    )
    if model.head_bias:
        logits = b.op("bias_add", "head.logits_bias", logits, b.param("head.bias", "v", (model.vocab,)), out="bsv")
    if model.final_softcap:
        logits = b.op("softcap", "head.softcap", logits, out="bsv")
    labels = b.tokens("labels", *h.shape[:2])
    outs = [b.like("head.loss", "bs", [logits], "fp32"), b.like("head.loss.softmax", "bsv", [logits], "fp32")]
    return b.many("cross_entropy", "head.loss", logits, labels, outs=outs)[0]
