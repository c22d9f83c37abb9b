"""Multi-token prediction: modules behind the last layer, each of which predicts one token further ahead."""

from __future__ import annotations

from stepgraph.ir.tensor import Tensor
from stepgraph.lowering.blocks.ends import embedding, logits_and_loss
from stepgraph.lowering.blocks.layer import layer
from stepgraph.lowering.blocks.norm import norm
from stepgraph.lowering.builder import Builder
from stepgraph.lowering.model import Model


def predict_further(b: Builder, model: Model, x: Tensor, modules: int, load: tuple[int, int]) -> None:
    """Append the modules to the head's template.

    Each norms the stream and the next tokens' embeddings, projects both together back to the hidden width, runs one
    more layer like the last, and predicts through the model's own head. Shapes: x [b s d]. FLOPs per module: 4 m d^2,
    one layer, one head.
    Source: DeepSeek-AI 2024 (arXiv:2412.19437), section 2.2; NVIDIA/Megatron-LM megatron/core/transformer/
    multi_token_prediction.py.
    """
    for index in range(modules):
        inner = Builder(model.dtype)
        stream = inner.stream("stream", *x.shape)
        out = _module(inner, model, stream, load)
        x = b.absorb(inner, f"mtp{index}.", {stream.name: x})[out.name]


def _module(b: Builder, model: Model, x: Tensor, load: tuple[int, int]) -> Tensor:
    tokens = embedding(b, model, *x.shape[:2])
    kind = model.layers[-1].norm
    both = [norm(b, "token_norm", tokens, kind), norm(b, "stream_norm", x, kind)]
    shape = (*x.shape[:2], 2 * model.hidden)
    pair = b.many("concat", "concat", *both, outs=[Tensor("concat", "bsn", shape, b.dtype)])[0]
    weight = b.param("projection.weight", "nd", (2 * model.hidden, model.hidden))
    h = b.op("linear", "projection", pair, weight, out="bsd", family="mtp")
    out = layer(b, h, model.layers[-1], load)
    logits_and_loss(b, model, norm(b, "final_norm", out, model.final_norm))
    return out
