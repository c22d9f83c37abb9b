"""Pointwise ops: residuals, biases, activations."""

from __future__ import annotations

from stepgraph.ir.kinds.sources import EINSUM, PAPER
from stepgraph.ir.rows import Grad, Row, Rule

ROWS = (
    Row(
        "add",
        Rule.HBM,
        "residual add; its gradient is the output's, shared by both branches",
        f"{PAPER}, rule 2",
        linear=True,
        commutative=True,
        passes=(0, 1),
    ),
    Row(
        "grad_add",
        Rule.HBM,
        "sum of the gradients of a tensor with several readers",
        f"{PAPER}, rule 2 (residual add, backward)",
        linear=True,
        commutative=True,
    ),
    Row(
        "bias_add",
        Rule.HBM,
        "add a vector to every token",
        EINSUM,
        passes=(0,),
        grads=(Grad("dw", "bias_add_dw", ("dy0",), (1,)),),
    ),
    Row("bias_add_dw", Rule.HBM, "sum of the gradient over what the bias lacks", EINSUM),
    Row(
        "swiglu",
        Rule.HBM,
        "silu(gate) * up on the packed projection",
        f"{PAPER}, rule 2; Shazeer 2020, arXiv:2002.05202",
        whole="k",
        grads=(Grad("dx", "swiglu_dx", ("dy0", "x0"), (0,)),),
    ),
    Row("swiglu_dx", Rule.HBM, "gradients of gate and up, packed", f"{PAPER}, rule 2", whole="k"),
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
)
