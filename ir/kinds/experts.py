"""Experts: scores, routing, grouped matmuls."""

from __future__ import annotations

from stepgraph.ir.kinds.sources import PAPER
from stepgraph.ir.rows import Flops, Grad, Row, Rule

ROWS = (
    Row(
        "topk",
        Rule.TOPK,
        "scores of all experts, the k best of each token",
        f"{PAPER}, section 5",
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
        hands_on=True,
        grads=(Grad("dx", "aux_loss_dx", ("dy0", "x0"), (0,)),),
    ),
    Row("aux_loss_dx", Rule.HBM, "adds the loss's gradient", "as aux_loss", whole="E"),
    Row(
        "permute",
        Rule.HBM,
        "k copies of each token, sorted by expert",
        f"{PAPER}, section 5",
        spec="bsd,bsE->Ebsd",
        grads=(Grad("dx", "permute_dx", ("dy0", "x1"), (0,)),),
    ),
    Row("permute_dx", Rule.HBM, "sum of the gradients of a token's copies", "as permute", spec="Ebsd,bsE->bsd"),
    Row(
        "unpermute",
        Rule.HBM,
        "sum of a token's copies, weighted by their scores",
        f"{PAPER}, section 5",
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
        f"{PAPER}, section 5; NVIDIA/TransformerEngine GroupedLinear",
        flops=Flops.CONTRACTION,
        grads=(
            Grad("dx", "grouped_linear_dx", ("dy0", "x1"), (0,)),
            Grad("dw", "grouped_linear_dw", ("dy0", "x0"), (1,)),
        ),
    ),
    Row("grouped_linear_dx", Rule.GEMM, "dX_e = dY_e W_e^T", "as grouped_linear", flops=Flops.CONTRACTION),
    Row("grouped_linear_dw", Rule.GEMM, "dW_e = X_e^T dY_e", "as grouped_linear", flops=Flops.CONTRACTION),
)
