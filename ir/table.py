"""The op table: one row per kind, what an op computes.

Letters: b batch, s sequence, t key sequence, d hidden, h heads, c key width, w value width, r latent width, e rotary
part, n both packed, u packed key and value, f FFN width, k the gate and up halves, E experts, v vocabulary, l rows of a position
table, p a rank's flat parameters. How software executes a kind (passes, kernels) is a profile's business.
"""

from __future__ import annotations

from types import MappingProxyType

from stepgraph.errors import did_you_mean
from stepgraph.ir.rows import Flops, Grad, Row, Rule

_PAPER = "How to Think About Asymptotic Times in Transformer Forward Passes"
_SP = "Korthikanti et al. 2022, arXiv:2205.05198"
_EINSUM = "matrix calculus of Y = X W"
_NCCL = "NVIDIA NCCL user guide, collective operations"

ROWS = (
    # 1. ends -----------------------------------------------------------------------------------------------------
    Row(
        "embedding",
        Rule.HBM,
        "rows of the table by token id",
        f"{_SP}, section 4.2",
        spec="bs,vd->bsd",
        grads=(Grad("dw", "embedding_dw", ("dy0", "x0"), (1,)),),
    ),
    Row("embedding_dw", Rule.HBM, "add gradient rows into the table's gradient", _EINSUM, spec="bsd,bs->vd"),
    Row(
        "position_add",
        Rule.HBM,
        "add the row of each position, from a table of l rows",
        "Radford et al. 2019, Language Models are Unsupervised Multitask Learners",
        passes=(0,),
        grads=(Grad("dw", "position_add_dw", ("dy0", "x1"), (1,)),),
    ),
    Row("position_add_dw", Rule.HBM, "sum of the gradient over the batch, by position", _EINSUM, spec="bsd,ld->ld"),
    Row(
        "cross_entropy",
        Rule.HBM,
        "loss of each token; keeps the softmax for backward",
        "NVIDIA/Megatron-LM megatron/core/tensor_parallel/cross_entropy.py",
        inner="v",
        reductions=("max", "target", "sum"),
        grads=(Grad("dx", "cross_entropy_dx", ("y1", "x1"), (0,)),),
    ),
    Row("cross_entropy_dx", Rule.HBM, "softmax minus one at the label", _EINSUM, spec="bsv,bs->bsv", inner="v"),
    Row(
        "concat",
        Rule.HBM,
        "two streams side by side",
        "DeepSeek-AI 2024, arXiv:2412.19437, section 2.2",
        spec="bsd,bsd->bsn",
        whole="dn",
        grads=(Grad("dx", "concat_dx", ("dy0",), (0, 1)),),
    ),
    Row("concat_dx", Rule.FREE, "views of both halves", "as concat", spec="bsn->bsd,bsd", whole="dn"),
    # 2. contractions ---------------------------------------------------------------------------------------------
    Row(
        "linear",
        Rule.GEMM,
        "Y = X W",
        f"{_PAPER}, rule 1",
        flops=Flops.CONTRACTION,
        grads=(
            Grad("dx", "linear_dx", ("dy0", "x1"), (0,)),
            Grad("dw", "linear_dw", ("dy0", "x0"), (1,)),
        ),
    ),
    Row("linear_dx", Rule.GEMM, "dX = dY W^T", f"{_PAPER}, section 6", flops=Flops.CONTRACTION),
    Row("linear_dw", Rule.GEMM, "dW = X^T dY", f"{_PAPER}, section 6", flops=Flops.CONTRACTION),
    # 3. attention ------------------------------------------------------------------------------------------------
    Row(
        "sdpa",
        Rule.ATTENTION,
        "softmax(Q K^T) V in one flash kernel; keeps the log-sum-exp",
        f"{_PAPER}, section 3; Dao et al. 2022, arXiv:2205.14135",
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
        f"{_PAPER}, rule 2; Su et al. 2021, arXiv:2104.09864",
        whole="c",
        grads=(Grad("dx", "rope_dx", ("dy0",), (0,)),),
    ),
    Row("rope_dx", Rule.HBM, "rotate back", f"{_PAPER}, rule 2", whole="c"),
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
    # 4. norms ----------------------------------------------------------------------------------------------------
    Row(
        "rmsnorm",
        Rule.HBM,
        "x / rms(x) * weight; keeps 1/rms",
        f"{_PAPER}, rule 2; Zhang and Sennrich 2019, arXiv:1910.07467",
        whole="dcr",
        grads=(
            Grad("dx", "rmsnorm_dx", ("dy0", "x0", "x1", "y1"), (0,)),
            Grad("dw", "rmsnorm_dw", ("dy0", "x0", "y1"), (1,)),
        ),
    ),
    Row("rmsnorm_dx", Rule.HBM, "gradient of the normalised input", f"{_PAPER}, rule 2", whole="dcr"),
    Row("rmsnorm_dw", Rule.HBM, "gradient of the weight: a sum over tokens", f"{_PAPER}, rule 2", whole="dcr"),
    Row(
        "rmsnorm_heads",
        Rule.HBM,
        "one norm over all heads together; split heads reduce the sum of squares",
        "allenai/OLMo-core src/olmo_core/nn/attention (QK norm over the full width)",
        whole="c",
        inner="h",
        reductions=("squares",),
        grads=(
            Grad("dx", "rmsnorm_heads_dx", ("dy0", "x0", "x1", "y1"), (0,)),
            Grad("dw", "rmsnorm_heads_dw", ("dy0", "x0", "y1"), (1,)),
        ),
    ),
    Row(
        "rmsnorm_heads_dx",
        Rule.HBM,
        "gradient of the normalised input; split heads reduce one dot product per token",
        "as rmsnorm_heads",
        whole="c",
        inner="h",
        reductions=("dots",),
    ),
    Row("rmsnorm_heads_dw", Rule.HBM, "gradient of the weight", "as rmsnorm_heads", whole="c"),
    Row(
        "layernorm",
        Rule.HBM,
        "(x - mean) / std * weight + bias; keeps mean and 1/std",
        f"{_PAPER}, rule 2; Ba et al. 2016, arXiv:1607.06450",
        whole="d",
        grads=(
            Grad("dx", "layernorm_dx", ("dy0", "x0", "x1", "y1", "y2"), (0,)),
            Grad("dw", "layernorm_dw", ("dy0", "x0", "y1", "y2"), (1, 2)),
        ),
    ),
    Row("layernorm_dx", Rule.HBM, "gradient of the normalised input", f"{_PAPER}, rule 2", whole="d"),
    Row("layernorm_dw", Rule.HBM, "gradients of weight and bias", f"{_PAPER}, rule 2", whole="d"),
    # 5. pointwise ------------------------------------------------------------------------------------------------
    Row(
        "add",
        Rule.HBM,
        "residual add; its gradient is the output's, shared by both branches",
        f"{_PAPER}, rule 2",
        linear=True,
        commutative=True,
        passes=(0, 1),
    ),
    Row(
        "grad_add",
        Rule.HBM,
        "sum of the gradients of a tensor with several readers",
        f"{_PAPER}, rule 2 (residual add, backward)",
        linear=True,
        commutative=True,
    ),
    Row(
        "bias_add",
        Rule.HBM,
        "add a vector to every token",
        _EINSUM,
        passes=(0,),
        grads=(Grad("dw", "bias_add_dw", ("dy0",), (1,)),),
    ),
    Row("bias_add_dw", Rule.HBM, "sum of the gradient over what the bias lacks", _EINSUM),
    Row(
        "swiglu",
        Rule.HBM,
        "silu(gate) * up on the packed projection",
        f"{_PAPER}, rule 2; Shazeer 2020, arXiv:2002.05202",
        whole="k",
        grads=(Grad("dx", "swiglu_dx", ("dy0", "x0"), (0,)),),
    ),
    Row("swiglu_dx", Rule.HBM, "gradients of gate and up, packed", f"{_PAPER}, rule 2", whole="k"),
    Row(
        "geglu",
        Rule.HBM,
        "gelu(gate) * up on the packed projection",
        "Shazeer 2020, arXiv:2002.05202",
        whole="k",
        grads=(Grad("dx", "geglu_dx", ("dy0", "x0"), (0,)),),
    ),
    Row(
        "reglu",
        Rule.HBM,
        "relu(gate) * up on the packed projection",
        "Shazeer 2020, arXiv:2002.05202",
        whole="k",
        grads=(Grad("dx", "reglu_dx", ("dy0", "x0"), (0,)),),
    ),
    Row("reglu_dx", Rule.HBM, "gradients of gate and up, packed", "as reglu", whole="k"),
    Row("geglu_dx", Rule.HBM, "gradients of gate and up, packed", "as geglu", whole="k"),
    Row(
        "softcap",
        Rule.HBM,
        "cap * tanh(x / cap)",
        "Gemma Team 2024, arXiv:2408.00118, section 2",
        grads=(Grad("dx", "softcap_dx", ("dy0", "y0"), (0,)),),
    ),
    Row("softcap_dx", Rule.HBM, "gradient of the cap", "as softcap"),
    Row(
        "gate_mul",
        Rule.HBM,
        "multiply each token by a sigmoid gate of one column",
        "Qwen Team 2024, Qwen1.5-MoE (shared expert gate)",
        grads=(Grad("dx", "gate_mul_dx", ("dy0", "x0", "x1"), (0, 1)),),
    ),
    Row("gate_mul_dx", Rule.HBM, "gradients of the token and of its gate", "as gate_mul"),
    Row(
        "gelu",
        Rule.HBM,
        "Gaussian error linear unit",
        "Hendrycks and Gimpel 2016, arXiv:1606.08415",
        grads=(Grad("dx", "gelu_dx", ("dy0", "x0"), (0,)),),
    ),
    Row("gelu_dx", Rule.HBM, "gradient of gelu", "as gelu"),
    Row(
        "relu",
        Rule.HBM,
        "max(x, 0)",
        "Nair and Hinton 2010",
        grads=(Grad("dx", "relu_dx", ("dy0", "x0"), (0,)),),
    ),
    Row("relu_dx", Rule.HBM, "gradient where x is positive", "as relu"),
    Row(
        "silu",
        Rule.HBM,
        "x * sigmoid(x)",
        "Elfwing et al. 2017, arXiv:1702.03118",
        grads=(Grad("dx", "silu_dx", ("dy0", "x0"), (0,)),),
    ),
    Row("silu_dx", Rule.HBM, "gradient of silu", "as silu"),
    # 6. experts ------------------------------------------------------------------------------------------------------
    Row(
        "topk",
        Rule.TOPK,
        "scores of all experts, the k best of each token",
        f"{_PAPER}, section 5",
        whole="E",
        grads=(Grad("dx", "topk_dx", ("dy0", "y0"), (0,)),),
    ),
    Row("topk_dx", Rule.HBM, "gradient of the chosen scores", "as topk", whole="E"),
    Row(
        "aux_loss",
        Rule.HBM,
        "load-balancing loss: hangs on to the scores, whose gradient it adds to",
        "Fedus et al. 2021, arXiv:2101.03961, section 2.2",
        whole="E",
        grads=(Grad("dx", "aux_loss_dx", ("dy0", "x0"), (0,)),),
    ),
    Row("aux_loss_dx", Rule.HBM, "adds the loss's gradient", "as aux_loss", whole="E"),
    Row(
        "permute",
        Rule.HBM,
        "k copies of each token, sorted by expert",
        f"{_PAPER}, section 5",
        spec="bsd,bsE->Ebsd",
        grads=(Grad("dx", "permute_dx", ("dy0", "x1"), (0,)),),
    ),
    Row("permute_dx", Rule.HBM, "sum of the gradients of a token's copies", "as permute", spec="Ebsd,bsE->bsd"),
    Row(
        "unpermute",
        Rule.HBM,
        "sum of a token's copies, weighted by their scores",
        f"{_PAPER}, section 5",
        spec="bsE,Ebsd->bsd",
        grads=(Grad("dx", "unpermute_dx", ("dy0", "x0", "x1"), (0, 1)),),
    ),
    Row(
        "unpermute_dx",
        Rule.HBM,
        "gradients of the scores and of the copies",
        "as unpermute",
        spec="bsd,bsE,Ebsd->bsE,Ebsd",
    ),
    Row(
        "grouped_linear",
        Rule.GEMM,
        "Y_e = X_e W_e for every local expert e",
        f"{_PAPER}, section 5; NVIDIA/TransformerEngine GroupedLinear",
        flops=Flops.CONTRACTION,
        grads=(
            Grad("dx", "grouped_linear_dx", ("dy0", "x1"), (0,)),
            Grad("dw", "grouped_linear_dw", ("dy0", "x0"), (1,)),
        ),
    ),
    Row("grouped_linear_dx", Rule.GEMM, "dX_e = dY_e W_e^T", "as grouped_linear", flops=Flops.CONTRACTION),
    Row("grouped_linear_dw", Rule.GEMM, "dW_e = X_e^T dY_e", "as grouped_linear", flops=Flops.CONTRACTION),
    # 7. layout: the conversions of the placement algebra, and stage boundaries --------------------------------------
    Row("slice", Rule.FREE, "keep this rank's part of a replicated tensor", "placement algebra: R to S"),
    Row("reduce_scatter", Rule.COLLECTIVE, "finish a pending sum, keep a part", _NCCL),
    Row("all_reduce", Rule.COLLECTIVE, "finish a pending sum, keep all of it", _NCCL),
    Row("all_to_all", Rule.COLLECTIVE, "move the split to another dimension", _NCCL),
    Row("all_gather", Rule.COLLECTIVE, "collect the parts on every rank", _NCCL),
    Row(
        "send", Rule.POINT_TO_POINT, "hand a tensor to a neighbouring stage", "Narayanan et al. 2021, arXiv:2104.04473"
    ),
    Row(
        "recv",
        Rule.POINT_TO_POINT,
        "take a tensor from a neighbouring stage",
        "Narayanan et al. 2021, arXiv:2104.04473",
    ),
    # 8. step -------------------------------------------------------------------------------------------------------
    Row(
        "grad_norm",
        Rule.HBM,
        "sum of squares of all gradients, for clipping; the sum over ranks is a scalar, kept as metadata",
        "Pascanu et al. 2013, arXiv:1211.5063",
        inner="p",
    ),
    Row(
        "adamw",
        Rule.HBM,
        "moments, master weights, parameters; 11 FLOPs per parameter",
        f"{_PAPER}, section 7",
        flops=Flops.ADAMW,
    ),
)

TABLE = MappingProxyType({row.kind: row for row in ROWS})
"""Rows by kind."""

CONVERSIONS = ("slice", "reduce_scatter", "all_reduce", "all_to_all", "all_gather")
"""Kinds that only change a placement, in the order in which several are applied: smallest data first."""


class UnknownKindError(LookupError):
    """An op of a kind without a row: never counted as zero."""


def row_of(kind: str) -> Row:
    """The row of a kind.

    Raises: UnknownKindError, with a suggestion.
    """
    row = TABLE.get(kind)
    if row is None:
        raise UnknownKindError(f"no row for op kind {kind!r}; {did_you_mean(kind, TABLE)}")
    return row
