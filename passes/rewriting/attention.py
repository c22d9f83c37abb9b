"""Attention in one kernel and in many: eager attention keeps all pairs in memory, flash attention none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op
from stepgraph.ir.rewriting import LOGICAL, Parts, Rewrite, replace_ops
from stepgraph.ir.tensor import Tensor

REACH = ("causal", "window", "chunk")
"""Attributes that say which keys a query sees."""

BEFORE_MIX = ("cast", "softmax", "cast", "mask", "softcap", "scale", "attn_scores")
"""What stands before the weighted sum, from it backwards; only softmax, scale and scores always do."""

OPTIONAL = ("cast", "mask", "softcap")


def eager_attention(op: Op, parts: Parts) -> None:
    """Q K^T, scale, mask, softmax in fp32, P V, and the copies around them: up to 10 kernels.

    HBM passes over all pairs, b h s t, forward: scores W1, scale 2, mask 2, casts and softmax 3 + 4 + 3, sum R1. Both
    matmuls compute every pair: a causal mask halves nothing. The log-sum-exp is not made.
    Source: huggingface/transformers models/llama/modeling_llama.py eager_attention_forward, repeat_kv.
    """
    query, key, value = op.inputs
    key, value = _repeated(parts, key, query, "keys"), _repeated(parts, value, query, "values")
    batch, sequence, heads, _ = query.shape
    square = parts.like(query, "scores", dims="bhst", shape=(batch, heads, sequence, key.shape[1]))
    scores = parts.emit("attn_scores", square, query, key)
    scores = _seen(op, parts, parts.emit("scale", parts.like(scores, "scaled"), scores, width=query.shape[-1]))
    narrow = scores.dtype != "fp32"
    wide = parts.emit("cast", parts.like(scores, "float", dtype="fp32"), scores) if narrow else scores
    weights = parts.emit("softmax", parts.like(wide, "softmax"), wide)
    weights = parts.emit("cast", parts.like(scores, "weights"), weights) if narrow else weights
    mixed = parts.emit("attn_mix", parts.like(op.outputs[0], "mixed"), weights, value)
    parts.emit("contiguous", op.outputs[0], mixed)


def _repeated(parts: Parts, heads: Tensor, query: Tensor, part: str) -> Tensor:
    if heads.shape[2] == query.shape[2]:
        return heads
    shape = (*heads.shape[:2], query.shape[2], heads.shape[3])
    return parts.emit("repeat_kv", parts.like(heads, part, shape=shape), heads)


def _seen(op: Op, parts: Parts, scores: Tensor) -> Tensor:
    """Capped and masked scores."""
    given = dict(op.attrs)
    if given.get("softcap"):
        scores = parts.emit("softcap", parts.like(scores, "capped"), scores, softcap=given["softcap"])
    if not any(given.get(name) for name in REACH):
        return scores
    reach: dict[str, Any] = {name: given[name] for name in REACH if name in given}
    return parts.emit("mask", parts.like(scores, "masked"), scores, **reach)


def flash_attention() -> Rewrite:
    """The rewrite that makes one flash kernel of eager attention; the inverse of decomposing sdpa.

    Left alone: chains in which somebody else reads a value in between, and what is flash attention already.
    """
    return Rewrite("flash_attention", LOGICAL, _fuse_attention)


def _fuse_attention(graph: Graph) -> Graph:
    made: dict[str, Sequence[Op]] = {}
    for op in graph.ops:
        chain = _chain(graph, op) if op.kind == "attn_mix" else []
        if chain:
            made.update((member.name, ()) for member in chain)
            made[chain[0].name] = _flash(graph, chain)
    return replace_ops(graph, made)


def _chain(graph: Graph, mix: Op) -> list[Op]:
    """The ops of one eager attention, from the copy of its result back to its scores; none where it does not match."""
    last = _only_reader(graph, mix)
    chain = [last, mix] if last and last.kind == "contiguous" else []
    for kind in BEFORE_MIX if chain else ():
        before = graph.producer(chain[-1].inputs[0])
        if before and before.kind == kind and _only_reader(graph, before) == chain[-1]:
            chain.append(before)
        elif kind not in OPTIONAL:
            return []
    copies = [_copy(graph, user) for user in (chain[-1], mix)] if chain else []
    return chain + [copy for copy in copies if copy]


def _only_reader(graph: Graph, op: Op) -> Op | None:
    """The one op that reads the op's result, which nothing outside reads."""
    users = graph.users(op.outputs[0])
    leaves = any(t.name == op.outputs[0].name for t in graph.outputs)
    return users[0] if len(users) == 1 and not leaves else None


def _copy(graph: Graph, user: Op) -> Op | None:
    """The repetition of key or value heads, a matmul's second operand, that only this attention reads."""
    maker = graph.producer(user.inputs[1])
    return maker if maker and maker.kind == "repeat_kv" and _only_reader(graph, maker) == user else None


def _flash(graph: Graph, chain: Sequence[Op]) -> Sequence[Op]:
    by_kind = {op.kind: op for op in chain}
    scores, mix = by_kind["attn_scores"], by_kind["attn_mix"]
    removed = {op.name for op in chain}
    operands = [scores.inputs[0]]
    for tensor in (scores.inputs[1], mix.inputs[1]):
        maker = graph.producer(tensor)
        operands.append(maker.inputs[0] if maker and maker.name in removed else tensor)
    given: dict[str, Any] = {
        name: value for kind in ("mask", "softcap") if kind in by_kind for name, value in by_kind[kind].attrs
    }
    parts = Parts(chain[0], "flash_attention")
    query = operands[0]
    lse = parts.like(query, "lse", dims="bsh", shape=query.shape[:3], dtype="fp32")
    parts.many("sdpa", (chain[0].outputs[0], lse), *operands, **{"causal": False, **given})
    return parts.ops
