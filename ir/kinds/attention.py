"""Attention: flash kernels, packed projections, rotary positions, latents."""

from __future__ import annotations

from stepgraph.ir.kinds.sources import PAPER
from stepgraph.ir.rows import Flops, Grad, Row, Rule

ROWS = (
    Row(
        "sdpa",
        Rule.ATTENTION,
        "softmax(Q K^T) V in one flash kernel; keeps the log-sum-exp",
        f"{PAPER}, section 3; Dao et al. 2022, arXiv:2205.14135",
        spec="bshc,bthc,bthw->bshw,bsh",
        whole="tcw",
        flops=Flops.ATTENTION,
        grads=(Grad("dx", "sdpa_dx", ("dy0", "x0", "x1", "x2", "y0", "y1"), (0, 1, 2)),),
    ),
    Row(
        "sdpa_dx",
        Rule.ATTENTION,
        "dQ, dK, dV; computes the scores again",
        "Dao et al. 2022, arXiv:2205.14135, algorithm 4",
        spec="bshw,bshc,bthc,bthw,bshw,bsh->bshc,bthc,bthw",
        whole="tcw",
        flops=Flops.ATTENTION_BACKWARD,
    ),
    Row(
        "sdpa_sink",
        Rule.ATTENTION,
        "flash attention with one learned logit per head in the softmax",
        "OpenAI 2025, arXiv:2508.10925; Dao et al. 2022, arXiv:2205.14135",
        spec="bshc,bthc,bthw,h->bshw,bsh",
        whole="tcw",
        flops=Flops.ATTENTION,
        grads=(Grad("dx", "sdpa_sink_dx", ("dy0", "x0", "x1", "x2", "x3", "y0", "y1"), (0, 1, 2, 3)),),
    ),
    Row(
        "sdpa_sink_dx",
        Rule.ATTENTION,
        "dQ, dK, dV and the gradient of the sinks",
        "as sdpa_sink",
        spec="bshw,bshc,bthc,bthw,h,bshw,bsh->bshc,bthc,bthw,h",
        whole="tcw",
        flops=Flops.ATTENTION_BACKWARD,
    ),
    Row(
        "split_qkv",
        Rule.FREE,
        "views of the packed projection: query, key, value heads",
        "NVIDIA/Megatron-LM megatron/core/transformer/attention.py",
        spec="bshc->bshc,bshc,bshc",
        grads=(Grad("dx", "join_qkv", ("dy0", "dy1", "dy2"), (0,)),),
    ),
    Row(
        "join_qkv",
        Rule.FREE,
        "the three gradients are written side by side",
        "as split_qkv",
        spec="bshc,bshc,bshc->bshc",
    ),
    Row(
        "rope",
        Rule.HBM,
        "rotate pairs of a head's coordinates by position",
        f"{PAPER}, rule 2; Su et al. 2021, arXiv:2104.09864",
        whole="c",
        grads=(Grad("dx", "rope_dx", ("dy0",), (0,)),),
    ),
    Row("rope_dx", Rule.HBM, "rotate back", f"{PAPER}, rule 2", whole="c"),
    Row(
        "split_latent",
        Rule.FREE,
        "views of the packed down projection: key/value latent and the shared rotary key",
        "DeepSeek-AI 2024, arXiv:2405.04434, section 2.1",
        spec="bsn->bsr,bse",
        whole="nre",
        grads=(Grad("dx", "join_latent", ("dy0", "dy1"), (0,)),),
    ),
    Row("join_latent", Rule.FREE, "both gradients side by side", "as split_latent", spec="bsr,bse->bsn", whole="nre"),
    Row(
        "latent_keys",
        Rule.HBM,
        "keys and values of every head from the up projection and the shared rotary key",
        "NVIDIA/Megatron-LM megatron/core/fusions/fused_mla_yarn_rope_apply.py",
        spec="bshu,bse->bshc,bshw",
        whole="uecw",
        grads=(Grad("dx", "latent_keys_dx", ("dy0", "dy1"), (0, 1)),),
    ),
    Row(
        "latent_keys_dx",
        Rule.HBM,
        "gradients of the up projection and, summed over heads, of the rotary key",
        "as latent_keys",
        spec="bshc,bshw->bshu,bse",
        whole="uecw",
    ),
)
