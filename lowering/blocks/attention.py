"""Grouped-query attention: norm, packed projection, RoPE, flash attention, output projection, residual."""

from __future__ import annotations

from stepgraph.ir.tensor import Tensor
from stepgraph.lowering.blocks.norm import norm
from stepgraph.lowering.builder import Builder
from stepgraph.lowering.model import Attention, Layer


def attention(b: Builder, x: Tensor, layer: Layer) -> Tensor:
    """Attention with its norm and its residual add.

    Shapes: x [b s d] -> [b s d]. The packed weight is [d, heads + 2 kv_heads, c], ordered by key-value group, so that
    TP splits whole groups. FLOPs: 2 m d (heads + 2 kv_heads) c + 4 m s heads c (half when causal) + 2 m heads c d.
    Source: How to Think About Asymptotic Times, section 3; Ainslie et al. 2023 (arXiv:2305.13245) for the groups.
    """
    spec, hidden = layer.attention, x.shape[-1]
    assert isinstance(spec, Attention)
    h = norm(b, "attn.norm", x, layer.norm)
    query, key, value = _project(b, h, spec)
    if spec.rotary_dim:
        query = b.op("rope", "attn.rope_q", query, out="bshc")
        key = b.op("rope", "attn.rope_k", key, out="bshc")
    mixed = _attend(b, query, key, value, spec)
    weight = b.param("attn.out.weight", "hcd", (spec.heads, spec.head_dim, hidden))
    y = b.op("linear", "attn.out", mixed, weight, out="bsd", family="attn_out")
    if spec.out_bias:
        y = b.op("bias_add", "attn.out_bias", b.pin(y), b.param("attn.out.bias", "d", (hidden,)), out="bsd")
    return b.op("add", "attn.residual", x, y, out="bsd")


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
    return b.many("sdpa", "attn.sdpa", query, key, value, outs=outs, causal=spec.causal, family="sdpa")[0]
