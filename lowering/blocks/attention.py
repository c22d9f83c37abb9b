"""Grouped-query attention: packed projection, QK-norm, RoPE, flash attention, output projection."""

from __future__ import annotations

from stepgraph.ir.op import Attr
from stepgraph.ir.tensor import Tensor
from stepgraph.lowering.blocks.norm import norm
from stepgraph.lowering.builder import Builder
from stepgraph.lowering.model import Attention


def attention(b: Builder, h: Tensor, spec: Attention) -> Tensor:
    """From the normed input to the projected output, which under TP is a pending sum.

    Shapes: h [b s d] -> [b s d]. The packed weight is [d, heads + 2 kv_heads, c], ordered by key-value group, so that
    TP splits whole groups. FLOPs: 2 m d (heads + 2 kv_heads) c + 4 heads c x (pairs that see each other) + 2 m heads c d.
    Source: How to Think About Asymptotic Times, section 3; Ainslie et al. 2023 (arXiv:2305.13245) for the groups.
    """
    query, key, value = _project(b, h, spec)
    if spec.qk_norm:
        over = "c" if spec.qk_norm == "head" else "hc"
        query, key = norm(b, "attn.q_norm", query, "rmsnorm", over), norm(b, "attn.k_norm", key, "rmsnorm", over)
    if spec.rotary_dim:
        partly = {"rotary_dim": spec.rotary_dim} if spec.rotary_dim != spec.head_dim else {}
        query = b.op("rope", "attn.rope_q", query, out="bshc", **partly)
        key = b.op("rope", "attn.rope_k", key, out="bshc", **partly)
    mixed = _attend(b, query, key, value, spec)
    return project_out(b, mixed, "bshc", h.shape[-1], bias=spec.out_bias)


def project_out(b: Builder, mixed: Tensor, dims: str, hidden: int, *, bias: bool) -> Tensor:
    """The output projection, row-parallel under TP; its bias is added once the sum is complete."""
    weight = b.param("attn.out.weight", f"{dims[2:]}d", (*mixed.shape[2:], hidden))
    y = b.op("linear", "attn.out", mixed, weight, out="bsd", family="attn_out")
    if not bias:
        return y
    return b.op("bias_add", "attn.out_bias", b.pin(y), b.param("attn.out.bias", "d", (hidden,)), out="bsd")


def _project(b: Builder, h: Tensor, spec: Attention) -> tuple[Tensor, ...]:
    packed = spec.heads + 2 * spec.kv_heads
    weight = b.param("attn.qkv.weight", "dhc", (h.shape[-1], packed, spec.head_dim))
    qkv = b.op("linear", "attn.qkv", h, weight, out="bshc", family="qkv")
    if spec.qkv_bias:
        bias = b.param("attn.qkv.bias", "hc", (packed, spec.head_dim))
        qkv = b.op("bias_add", "attn.qkv_bias", qkv, bias, out="bshc")
    return _split(b, qkv, spec)


def _split(b: Builder, qkv: Tensor, spec: Attention) -> tuple[Tensor, ...]:
    batch, sequence, _, width = qkv.shape
    parts = (("q", spec.heads), ("k", spec.kv_heads), ("v", spec.kv_heads))
    outs = [Tensor(f"attn.split.{part}", "bshc", (batch, sequence, heads, width), b.dtype) for part, heads in parts]
    return b.many("split_qkv", "attn.split", qkv, outs=outs)


def _attend(b: Builder, query: Tensor, key: Tensor, value: Tensor, spec: Attention) -> Tensor:
    outs = [b.like("attn.sdpa", "bshc", [query]), b.like("attn.sdpa.lse", "bsh", [query], "fp32")]
    reach: dict[str, Attr] = {
        name: getattr(spec, name) for name in ("window", "chunk", "softcap") if getattr(spec, name)
    }
    operands = [query, key, value]
    if spec.sinks:
        operands.append(b.param("attn.sinks", "h", (spec.heads,)))
    kind = "sdpa_sink" if spec.sinks else "sdpa"
    return b.many(kind, "attn.sdpa", *operands, outs=outs, causal=spec.causal, family="sdpa", **reach)[0]
