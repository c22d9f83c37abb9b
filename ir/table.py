"""The op table: one row per kind, what an op computes.

Letters: b batch, s sequence, t key sequence, d hidden, h heads, c head width, f FFN width, k the gate and up halves,
v vocabulary, l rows of a position table, p a rank's flat parameters. How software executes a kind (passes, kernels) is a profile's business.
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
        grads=(Grad("dx", "cross_entropy_dx", ("y1", "x1"), (0,)),),
    ),
    Row("cross_entropy_dx", Rule.HBM, "softmax minus one at the label", _EINSUM, spec="bsv,bs->bsv", inner="v"),
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
        spec="bshc,bthc,bthc->bshc,bsh",
        whole="tc",
        flops=Flops.ATTENTION,
        grads=(Grad("dx", "sdpa_dx", ("dy0", "x0", "x1", "x2", "y0", "y1"), (0, 1, 2)),),
    ),
    Row(
        "sdpa_dx",
        Rule.ATTENTION,
        "dQ, dK, dV; computes the scores again",
        "Dao et al. 2022, arXiv:2205.14135, algorithm 4",
        spec="bshc,bshc,bthc,bthc,bshc,bsh->bshc,bthc,bthc",
        whole="tc",
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
    # 4. norms ----------------------------------------------------------------------------------------------------
    Row(
        "rmsnorm",
        Rule.HBM,
        "x / rms(x) * weight; keeps 1/rms",
        f"{_PAPER}, rule 2; Zhang and Sennrich 2019, arXiv:1910.07467",
        whole="d",
        grads=(
            Grad("dx", "rmsnorm_dx", ("dy0", "x0", "x1", "y1"), (0,)),
            Grad("dw", "rmsnorm_dw", ("dy0", "x0", "y1"), (1,)),
        ),
    ),
    Row("rmsnorm_dx", Rule.HBM, "gradient of the normalised input", f"{_PAPER}, rule 2", whole="d"),
    Row("rmsnorm_dw", Rule.HBM, "gradient of the weight: a sum over tokens", f"{_PAPER}, rule 2", whole="d"),
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
        spec="bskf->bsf",
        whole="k",
        grads=(Grad("dx", "swiglu_dx", ("dy0", "x0"), (0,)),),
    ),
    Row(
        "swiglu_dx", Rule.HBM, "gradients of gate and up, packed", f"{_PAPER}, rule 2", spec="bsf,bskf->bskf", whole="k"
    ),
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
    # 6. layout: the conversions of the placement algebra, and stage boundaries --------------------------------------
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
    # 7. step -------------------------------------------------------------------------------------------------------
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
