"""The two ends of a model: tables, loss, and what joins streams."""

from __future__ import annotations

from stepgraph.ir.kinds.sources import EINSUM, SEQUENCE_PARALLELISM
from stepgraph.ir.rows import Grad, Row, Rule

ROWS = (
    Row(
        "embedding",
        Rule.HBM,
        "rows of the table by token id",
        f"{SEQUENCE_PARALLELISM}, section 4.2",
        spec="bs,vd->bsd",
        grads=(Grad("dw", "embedding_dw", ("dy0", "x0"), (1,)),),
    ),
    Row("embedding_dw", Rule.HBM, "add gradient rows into the table's gradient", EINSUM, spec="bsd,bs->vd"),
    Row(
        "position_add",
        Rule.HBM,
        "add the row of each position, from a table of l rows",
        "Radford et al. 2019, Language Models are Unsupervised Multitask Learners",
        passes=(0,),
        grads=(Grad("dw", "position_add_dw", ("dy0", "x1"), (1,)),),
    ),
    Row("position_add_dw", Rule.HBM, "sum of the gradient over the batch, by position", EINSUM, spec="bsd,ld->ld"),
    Row(
        "cross_entropy",
        Rule.HBM,
        "loss of each token; keeps the softmax for backward",
        "NVIDIA/Megatron-LM megatron/core/tensor_parallel/cross_entropy.py",
        inner="v",
        reductions=("max", "target", "sum"),
        grads=(Grad("dx", "cross_entropy_dx", ("y1", "x1"), (0,)),),
    ),
    Row("cross_entropy_dx", Rule.HBM, "softmax minus one at the label", EINSUM, spec="bsv,bs->bsv", inner="v"),
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
)
