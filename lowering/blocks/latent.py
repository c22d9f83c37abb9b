"""Multi-head latent attention: queries, keys and values are projected up from narrow latents."""

from __future__ import annotations

from stepgraph.ir.tensor import Tensor
from stepgraph.lowering.blocks.attention import project_out
from stepgraph.lowering.blocks.norm import norm
from stepgraph.lowering.builder import Builder
from stepgraph.lowering.model import LatentAttention


def latent_attention(b: Builder, h: Tensor, spec: LatentAttention) -> Tensor:
    """From the normed input to the projected output, which under TP is a pending sum.

    Shapes: h [b s d] -> [b s d]. Latents are not split by TP (their weights are small and replicated); the up
    projections are, by head. Keys are nope + rope wide, values v wide. FLOPs of the projections: 2 m (d r_q +
    r_q heads (nope + rope) + d (r_kv + rope) + r_kv heads (nope + v)).
    Source: DeepSeek-AI 2024 (arXiv:2405.04434), section 2.1; NVIDIA/Megatron-LM megatron/core/transformer/
    multi_latent_attention.py for what is replicated.
    """
    query = b.op("rope", "attn.rope_q", _queries(b, h, spec), out="bshc", rotary_dim=spec.rope_dim)
    key, value = _keys_and_values(b, h, spec)
    outs = [b.like("attn.sdpa", "bshw", [value]), b.like("attn.sdpa.lse", "bsh", [query], "fp32")]
    mixed = b.many("sdpa", "attn.sdpa", query, key, value, outs=outs, causal=spec.causal, family="sdpa")[0]
    return project_out(b, mixed, "bshw", h.shape[-1], bias=spec.bias)


def _queries(b: Builder, h: Tensor, spec: LatentAttention) -> Tensor:
    width = spec.nope_dim + spec.rope_dim
    if spec.q_rank:
        h = _down(b, "attn.q_down", h, "r", spec.q_rank, spec)
        h = norm(b, "attn.q_norm", h, "rmsnorm")
    weight = b.param("attn.q_up.weight", f"{h.dims[-1]}hc", (h.shape[-1], spec.heads, width))
    return b.op("linear", "attn.q_up", h, weight, out="bshc", family="qkv")


def _down(b: Builder, name: str, h: Tensor, letter: str, width: int, spec: LatentAttention) -> Tensor:
    dims = f"bs{letter}"
    weight = b.param(f"{name}.weight", f"d{letter}", (h.shape[-1], width))
    latent = b.op("linear", name, h, weight, out=dims, family="qkv")
    if not spec.bias:
        return latent
    return b.op("bias_add", f"{name}_bias", latent, b.param(f"{name}.bias", letter, (width,)), out=dims)


def _keys_and_values(b: Builder, h: Tensor, spec: LatentAttention) -> tuple[Tensor, ...]:
    packed = _down(b, "attn.kv_down", h, "n", spec.kv_rank + spec.rope_dim, spec)
    rows = packed.shape[:2]
    parts = [
        Tensor("attn.split.latent", "bsr", (*rows, spec.kv_rank), b.dtype),
        Tensor("attn.split.rope", "bse", (*rows, spec.rope_dim), b.dtype),
    ]
    latent, rotary = b.many("split_latent", "attn.split", packed, outs=parts)
    latent = norm(b, "attn.kv_norm", latent, "rmsnorm")
    rotary = b.op("rope", "attn.rope_k", rotary, out="bse")
    shape = (spec.kv_rank, spec.heads, spec.nope_dim + spec.v_dim)
    both = b.op("linear", "attn.kv_up", latent, b.param("attn.kv_up.weight", "rhu", shape), out="bshu", family="qkv")
    outs = [
        Tensor("attn.keys", "bshc", (*rows, spec.heads, spec.nope_dim + spec.rope_dim), b.dtype),
        Tensor("attn.keys.values", "bshw", (*rows, spec.heads, spec.v_dim), b.dtype),
    ]
    return b.many("latent_keys", "attn.keys", both, rotary, outs=outs)
