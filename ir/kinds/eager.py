"""What PyTorch eager runs, kernel by kernel: norms, rotary positions, gated activations, loss, AdamW.

A block emits none of these; a rewrite splits its ops into them. What PyTorch computes in several kernels inside one
autograd function is one backward row here, and the profile counts its kernels and temporaries.
"""

from __future__ import annotations

from stepgraph.ir.kinds.sources import AUTOGRAD, HF_LLAMA, TORCH_ADAMW, TORCH_LOSS
from stepgraph.ir.rows import Grad, Row, Rule

NORMS = (
    Row(
        "cast",
        Rule.HBM,
        "the same numbers in another type",
        f"{HF_LLAMA} LlamaRMSNorm: hidden_states.to(torch.float32)",
        grads=(Grad("dx", "cast_dx", ("dy0",), (0,)),),
    ),
    Row("cast_dx", Rule.HBM, "the gradient in the operand's type", AUTOGRAD),
    Row(
        "square",
        Rule.HBM,
        "x^2",
        f"{HF_LLAMA} LlamaRMSNorm: pow(2)",
        grads=(Grad("dx", "square_dx", ("dy0", "x0"), (0,)),),
    ),
    Row("square_dx", Rule.HBM, "2 x dy, as dy (2 x^1)", f"{AUTOGRAD} pow_backward"),
    Row(
        "mean",
        Rule.HBM,
        "mean over the last letter",
        f"{HF_LLAMA} LlamaRMSNorm: mean(-1, keepdim=True)",
        whole="dcr",
        grads=(Grad("dx", "mean_dx", ("dy0",), (0,)),),
    ),
    Row("mean_dx", Rule.HBM, "dy / width at every coordinate", f"{AUTOGRAD} mean_backward", whole="dcr", spreads=True),
    Row(
        "rsqrt",
        Rule.HBM,
        "1 / sqrt(x + eps)",
        f"{HF_LLAMA} LlamaRMSNorm: rsqrt(variance + eps)",
        grads=(Grad("dx", "rsqrt_dx", ("dy0", "y0"), (0,)),),
    ),
    Row("rsqrt_dx", Rule.HBM, "-1/2 dy y^3", f"{AUTOGRAD} rsqrt"),
    Row(
        "row_mul",
        Rule.HBM,
        "each row times its statistic",
        f"{HF_LLAMA} LlamaRMSNorm",
        whole="dcr",
        grads=(Grad("dx", "row_mul_dx", ("dy0", "x0", "x1"), (0, 1)),),
    ),
    Row("row_mul_dx", Rule.HBM, "gradients of the row and of its statistic", f"{AUTOGRAD} mul", whole="dcr"),
    Row(
        "weight_mul",
        Rule.HBM,
        "each coordinate times its weight",
        f"{HF_LLAMA} LlamaRMSNorm",
        whole="dcr",
        grads=(
            Grad("dx", "weight_mul_dx", ("dy0", "x1"), (0,)),
            Grad("dw", "weight_mul_dw", ("dy0", "x0"), (1,)),
        ),
    ),
    Row("weight_mul_dx", Rule.HBM, "dy w", f"{AUTOGRAD} mul", whole="dcr"),
    Row("weight_mul_dw", Rule.HBM, "dy x, then its sum over tokens", f"{AUTOGRAD} mul", whole="dcr"),
)

ROTARY = (
    Row(
        "heads_first",
        Rule.FREE,
        "a view with heads before positions",
        f"{HF_LLAMA} LlamaAttention: view(...).transpose(1, 2)",
        spec="bshc->bshc",
        grads=(Grad("dx", "heads_first_dx", ("dy0",), (0,)),),
    ),
    Row(
        "heads_first_dx",
        Rule.HBM,
        "the gradient copied back to positions before heads",
        f"{AUTOGRAD} view: reshape of a transposed gradient",
        spec="bshc->bshc",
    ),
    Row(
        "rotary_mul",
        Rule.HBM,
        "times the cosine or sine (attribute table) of position x frequency",
        f"{HF_LLAMA} apply_rotary_pos_emb",
        whole="c",
        grads=(Grad("dx", "rotary_mul_dx", ("dy0",), (0,)),),
    ),
    Row("rotary_mul_dx", Rule.HBM, "dy times the same table", f"{AUTOGRAD} mul", whole="c"),
    Row(
        "rotary_halves",
        Rule.FREE,
        "views of a head's two halves",
        f"{HF_LLAMA} rotate_half",
        spec="bshc->bshj,bshj",
        whole="cj",
        grads=(Grad("dx", "rotary_halves_dx", ("dy0", "dy1"), (0,)),),
    ),
    Row(
        "rotary_halves_dx",
        Rule.HBM,
        "each half's gradient in a tensor of zeros, and the sum of both",
        f"{AUTOGRAD} slice_backward",
        spec="bshj,bshj->bshc",
        whole="cj",
    ),
    Row("neg", Rule.HBM, "-x", f"{HF_LLAMA} rotate_half", grads=(Grad("dx", "neg_dx", ("dy0",), (0,)),)),
    Row("neg_dx", Rule.HBM, "-dy", f"{AUTOGRAD} neg"),
    Row(
        "cat_halves",
        Rule.HBM,
        "two halves side by side",
        f"{HF_LLAMA} rotate_half",
        spec="bshj,bshj->bshc",
        whole="cj",
        grads=(Grad("dx", "cat_halves_dx", ("dy0",), (0, 1)),),
    ),
    Row("cat_halves_dx", Rule.FREE, "views of both halves", f"{AUTOGRAD} cat", spec="bshc->bshj,bshj", whole="cj"),
)

GATES = (
    Row(
        "split_gate_up",
        Rule.FREE,
        "views of the packed projection: gate and up",
        "huggingface/transformers models/phi3/modeling_phi3.py Phi3MLP: chunk(2, dim=-1)",
        whole="k",
        grads=(Grad("dx", "join_gate_up", ("dy0", "dy1"), (0,)),),
    ),
    Row("join_gate_up", Rule.HBM, "both gradients side by side", f"{AUTOGRAD} split", whole="k", spreads=True),
    Row(
        "mul",
        Rule.HBM,
        "x y, both of one shape",
        f"{HF_LLAMA} LlamaMLP: act_fn(gate) * up",
        commutative=True,
        grads=(Grad("dx", "mul_dx", ("dy0", "x0", "x1"), (0, 1)),),
    ),
    Row("mul_dx", Rule.HBM, "dy y and dy x", f"{AUTOGRAD} mul"),
)

LOSS = (
    Row(
        "log_softmax",
        Rule.HBM,
        "x - log sum exp x over the whole vocabulary",
        TORCH_LOSS,
        whole="v",
        grads=(Grad("dx", "log_softmax_dx", ("dy0", "y0"), (0,)),),
    ),
    Row("log_softmax_dx", Rule.HBM, "dy - exp(y) sum dy", f"{AUTOGRAD} _log_softmax_backward_data", whole="v"),
    Row(
        "nll",
        Rule.HBM,
        "minus the log-probability of each label; ends the model",
        TORCH_LOSS,
        spec="bsv,bs->bs",
        whole="v",
        inner="v",
        grads=(Grad("dx", "nll_dx", ("x1",), (0,)),),
    ),
    Row("nll_dx", Rule.HBM, "-1 at the label, zeros elsewhere", f"{AUTOGRAD} nll_loss_backward", spec="bs->bsv"),
)

FOREACH = (
    Row(
        "foreach_scale", Rule.HBM, "x times a number (attribute by): decay, beta_2 or the bias correction", TORCH_ADAMW
    ),
    Row("foreach_lerp", Rule.HBM, "first moment: x + (1 - beta_1) (g - x)", TORCH_ADAMW),
    Row("foreach_addcmul", Rule.HBM, "second moment: x + (1 - beta_2) g g", TORCH_ADAMW),
    Row("foreach_sqrt", Rule.HBM, "sqrt x", TORCH_ADAMW),
    Row("foreach_add", Rule.HBM, "x + eps", TORCH_ADAMW),
    Row("foreach_addcdiv", Rule.HBM, "parameters: x - rate m / d", TORCH_ADAMW),
    Row("foreach_copy", Rule.HBM, "the same numbers in the parameters' type", TORCH_ADAMW),
)

ROWS = (*NORMS, *ROTARY, *GATES, *LOSS, *FOREACH)
