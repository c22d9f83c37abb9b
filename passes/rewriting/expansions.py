"""Single ops as PyTorch eager runs them: norm, rotary positions, gated activation, loss, AdamW.

Each function emits the ops that stand for one op. Results keep their names; an operand in fp32 needs no casts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from stepgraph.errors import refuse
from stepgraph.ir.op import Op
from stepgraph.ir.rewriting import Parts
from stepgraph.ir.tensor import Kind, Tensor
from stepgraph.passes.rewriting.attention import eager_attention

GATES = MappingProxyType({"swiglu": "silu", "geglu": "gelu", "reglu": "relu"})
"""Packed gated activations, and what they do to the gate."""


def as_fp32(parts: Parts, x: Tensor, part: str = "float") -> Tensor:
    """x in fp32: a cast, or x itself."""
    return x if x.dtype == "fp32" else parts.emit("cast", parts.like(x, part, dtype="fp32"), x)


def as_type_of(parts: Parts, x: Tensor, like: Tensor, part: str) -> Tensor:
    """x in the type of another tensor: a cast, or x itself."""
    return x if x.dtype == like.dtype else parts.emit("cast", parts.like(x, part, dtype=like.dtype), x)


def rmsnorm(op: Op, parts: Parts) -> None:
    """Cast, square, mean, + eps and rsqrt, multiply, cast, multiply by the weight: 8 kernels in bf16.

    HBM passes over x: forward R10 W8, backward R27 W19 (fp32 counts twice).
    Source: huggingface/transformers models/llama/modeling_llama.py LlamaRMSNorm.
    """
    x, weight = op.inputs
    y, rstd = op.outputs
    wide = as_fp32(parts, x)
    squares = parts.emit("square", parts.like(wide, "square"), wide)
    parts.emit("rsqrt", rstd, parts.emit("mean", parts.like(rstd, "mean"), squares))
    normed = parts.emit("row_mul", parts.like(wide, "normed"), wide, rstd)
    parts.emit("weight_mul", y, as_type_of(parts, normed, y, "narrow"), weight)


def rope(op: Op, parts: Parts) -> None:
    """x cos + rotate_half(x) sin: negation, concatenation, two products, a sum: 5 kernels.

    HBM passes over x: forward 10, backward 14 and the copy of a transposed gradient.
    Source: huggingface/transformers models/llama/modeling_llama.py apply_rotary_pos_emb.

    Raises: InputError (decompose) where only a part of a head turns: how it is cut and joined differs by model.
    """
    (x,), (y,) = op.inputs, op.outputs
    if op.attr("rotary_dim") or x.dims != "bshc":
        what = f"{op.name} rotates {op.attr('rotary_dim') or 'a shared key'} of a head of {x.shape[-1]}"
        raise refuse("decompose", "decompose('rope')", what, "heads that turn as a whole", "leave rope out")
    x = parts.emit("heads_first", parts.like(x, "heads"), x)
    straight = parts.emit("rotary_mul", parts.like(x, "cos"), x, table="cos")
    half = {"dims": "bshj", "shape": (*x.shape[:3], x.shape[3] // 2)}
    views = (parts.like(x, "left", **half), parts.like(x, "right", **half))
    left, right = parts.many("rotary_halves", views, x, name=f"{op.name}.halves")
    turned = parts.emit(
        "cat_halves", parts.like(x, "rotated"), parts.emit("neg", parts.like(right, "neg"), right), left
    )
    parts.emit("add", y, straight, parts.emit("rotary_mul", parts.like(x, "sin"), turned, table="sin"))


def gated(op: Op, parts: Parts) -> None:
    """Views of gate and up, the activation of the gate, their product: 2 kernels, HBM passes over m f 5.

    Backward 13, of which 4 write both gradients into one tensor. Source: huggingface/transformers
    models/llama/modeling_llama.py LlamaMLP; models/phi3 for the packed projection.
    """
    (packed,), (y,) = op.inputs, op.outputs
    gate, up = parts.many(
        "split_gate_up", (parts.like(y, "gate"), parts.like(y, "up")), packed, name=f"{op.name}.split"
    )
    activated = parts.emit(GATES[op.kind], parts.like(y, GATES[op.kind]), gate)
    parts.emit("mul", y, activated, up)


def cross_entropy(op: Op, parts: Parts) -> None:
    """Cast, log-softmax, negative log-likelihood: 3 kernels, 7 bf16 passes over the logits forward, 11 backward.

    The whole vocabulary stays together: with a split head the logits are gathered first, as without a parallel loss.
    Source: pytorch/pytorch torch/nn/functional.py cross_entropy on logits.float().
    """
    logits, labels = op.inputs
    wide = as_fp32(parts, logits)
    log_probs = parts.emit("log_softmax", parts.like(wide, "log_softmax"), wide)
    parts.emit("nll", op.outputs[0], log_probs, labels)


def adamw(op: Op, parts: Parts) -> None:
    """Eight foreach calls, 20 fp32 passes: 80 bytes per parameter, and 6 for the copy of narrower parameters.

    Source: pytorch/pytorch torch/optim/adam.py _multi_tensor_adam with decoupled weight decay.
    """
    first, second, grads, master = op.inputs
    new_first, new_second, new_master, *copies = op.outputs

    def step(kind: str, part: str, tensor: Tensor, **by: str) -> Tensor:
        return parts.emit(kind, parts.like(master, part, kind=Kind.STATE), tensor, **by)

    decayed = step("foreach_scale", "decayed", master, by="decay")
    parts.emit("foreach_lerp", new_first, first, grads)
    parts.emit("foreach_addcmul", new_second, step("foreach_scale", "second", second, by="beta_2"), grads)
    root = step("foreach_scale", "corrected", step("foreach_sqrt", "root", new_second), by="bias_correction")
    parts.emit("foreach_addcdiv", new_master, decayed, new_first, step("foreach_add", "denominator", root))
    for params in copies:
        parts.emit("foreach_copy", params, new_master)


EXPANSIONS: Mapping[str, Callable[[Op, Parts], None]] = MappingProxyType(
    {
        "rmsnorm": rmsnorm,
        "rope": rope,
        **dict.fromkeys(GATES, gated),
        "sdpa": eager_attention,
        "cross_entropy": cross_entropy,
        "adamw": adamw,
    }
)
"""What each kind becomes."""
