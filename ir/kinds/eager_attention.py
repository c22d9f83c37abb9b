"""Attention as PyTorch eager runs it: scores, softmax and weighted sum as ops of their own, all pairs in memory."""

from __future__ import annotations

from stepgraph.ir.kinds.sources import AUTOGRAD, HF_LLAMA
from stepgraph.ir.rows import Flops, Grad, Row, Rule

_EAGER = f"{HF_LLAMA} eager_attention_forward"

ROWS = (
    Row(
        "repeat_kv",
        Rule.HBM,
        "a copy of each key or value head for every query head of its group",
        f"{HF_LLAMA} repeat_kv",
        spec="bthc->bthc",
        whole="t",
        grads=(Grad("dx", "repeat_kv_dx", ("dy0",), (0,)),),
    ),
    Row(
        "repeat_kv_dx",
        Rule.HBM,
        "sum of the gradients of a head's copies",
        f"{AUTOGRAD} expand",
        spec="bthc->bthc",
        whole="t",
    ),
    Row(
        "attn_scores",
        Rule.GEMM,
        "Q K^T, all pairs",
        _EAGER,
        spec="bshc,bthc->bhst",
        whole="tc",
        flops=Flops.CONTRACTION,
        grads=(
            Grad("dx", "attn_scores_dq", ("dy0", "x1"), (0,)),
            Grad("dx", "attn_scores_dk", ("dy0", "x0"), (1,)),
        ),
    ),
    Row("attn_scores_dq", Rule.GEMM, "dS K", _EAGER, spec="bhst,bthc->bshc", whole="tc", flops=Flops.CONTRACTION),
    Row("attn_scores_dk", Rule.GEMM, "dS^T Q", _EAGER, spec="bhst,bshc->bthc", whole="tc", flops=Flops.CONTRACTION),
    Row(
        "scale",
        Rule.HBM,
        "scores over the root of the key width (attribute width)",
        _EAGER,
        spec="bhst->bhst",
        whole="t",
        grads=(Grad("dx", "scale_dx", ("dy0",), (0,)),),
    ),
    Row("scale_dx", Rule.HBM, "dy over the root of the key width", f"{AUTOGRAD} mul", spec="bhst->bhst", whole="t"),
    Row(
        "mask",
        Rule.HBM,
        "add minus infinity where a query does not see a key",
        _EAGER,
        spec="bhst->bhst",
        whole="t",
        passes=(0,),
    ),
    Row(
        "softmax",
        Rule.HBM,
        "softmax over the keys",
        _EAGER,
        spec="bhst->bhst",
        whole="t",
        grads=(Grad("dx", "softmax_dx", ("dy0", "y0"), (0,)),),
    ),
    Row(
        "softmax_dx",
        Rule.HBM,
        "y (dy - sum y dy)",
        f"{AUTOGRAD} _softmax_backward_data",
        spec="bhst,bhst->bhst",
        whole="t",
    ),
    Row(
        "attn_mix",
        Rule.GEMM,
        "P V, all pairs",
        _EAGER,
        spec="bhst,bthw->bshw",
        whole="tw",
        flops=Flops.CONTRACTION,
        grads=(
            Grad("dx", "attn_mix_dp", ("dy0", "x1"), (0,)),
            Grad("dx", "attn_mix_dv", ("dy0", "x0"), (1,)),
        ),
    ),
    Row("attn_mix_dp", Rule.GEMM, "dO V^T", _EAGER, spec="bshw,bthw->bhst", whole="tw", flops=Flops.CONTRACTION),
    Row("attn_mix_dv", Rule.GEMM, "P^T dO", _EAGER, spec="bshw,bhst->bthw", whole="tw", flops=Flops.CONTRACTION),
    Row(
        "contiguous",
        Rule.HBM,
        "the same numbers with positions before heads in memory",
        f"{_EAGER}: transpose(1, 2).contiguous()",
        passes=(0,),
    ),
)
