"""How PyTorch executes the kinds that `decompose` leaves: aten kernels, tensor by tensor. Every profile has these rows.

Where one backward row stands for several kernels, the temporaries between them are counted with the result whose size
they have: each is written once and read once. docs/eager.md adds the rows up.
"""

from __future__ import annotations

from stepgraph.passes.execution import ELEMENTS_PER_LAUNCH, Execution

_FREE = (0.0,)
_ONCE = (1.0,)
_FOREACH = "pytorch/pytorch torch/optim/adam.py, one foreach call"

EAGER = (
    Execution("cast", _ONCE, _ONCE, 1, "R x, W y, each in its own type"),
    Execution("cast_dx", _ONCE, _ONCE, 1, "R dy, W dx, each in its own type"),
    Execution("square", _ONCE, _ONCE, 1, "R x, W y"),
    Execution("square_dx", _ONCE, (5,), 3, "x^1: R x, W t; 2 t: R t, W u; dy u: R dy, u, W dx"),
    Execution("mean", _ONCE, _ONCE, 1, "R x, W one number a row"),
    Execution("mean_dx", _ONCE, _ONCE, 1, "R one number a row, W dx"),
    Execution("rsqrt", _ONCE, (3,), 2, "x + eps: R x, W t; R t, W y"),
    Execution("rsqrt_dx", _ONCE, (5,), 3, "y^3: R y, W t; -dy / 2: R dy, W u; R t, u, W dx"),
    Execution("row_mul", _ONCE, _ONCE, 1, "R x, statistic, W y"),
    Execution("row_mul_dx", (2, 1, 1), (3, 1), 3, "R dy, statistic, W dx; R dy, x, W t; R t, W its sum over the row"),
    Execution("weight_mul", _ONCE, _ONCE, 1, "R x, weight, W y"),
    Execution("weight_mul_dx", _ONCE, _ONCE, 1, "R dy, weight, W dx"),
    Execution("weight_mul_dw", (3, 1), _ONCE, 2, "R dy, x, W t; R t, W its sum over tokens (t counts with dy)"),
    Execution("heads_first", _FREE, _FREE, 0, "a view"),
    Execution("heads_first_dx", _ONCE, _ONCE, 1, "R dy, W its copy"),
    Execution("rotary_mul", _ONCE, _ONCE, 1, "R x, W y; the table, of one row per position, is left out"),
    Execution("rotary_mul_dx", _ONCE, _ONCE, 1, "R dy, W dx"),
    Execution("rotary_halves", _FREE, _FREE, 0, "views"),
    Execution("rotary_halves_dx", _ONCE, (5,), 3, "for each half: R dy, W all of a temporary; R both, W dx"),
    Execution("neg", _ONCE, _ONCE, 1, "R x, W y"),
    Execution("neg_dx", _ONCE, _ONCE, 1, "R dy, W dx"),
    Execution("cat_halves", _ONCE, _ONCE, 1, "R both halves, W y"),
    Execution("cat_halves_dx", _FREE, _FREE, 0, "views"),
    Execution("split_gate_up", _FREE, _FREE, 0, "views"),
    Execution("join_gate_up", _ONCE, _ONCE, 1, "R both gradients, W one tensor"),
    Execution("mul", _ONCE, _ONCE, 1, "R both, W y"),
    Execution("mul_dx", (2, 1, 1), _ONCE, 2, "R dy, y, W dx; R dy, x, W the other gradient"),
    Execution("log_softmax", _ONCE, _ONCE, 1, "R x, W y"),
    Execution("log_softmax_dx", _ONCE, _ONCE, 1, "R dy, y, W dx"),
    Execution("nll", (0, 1), _ONCE, 1, "R labels and one number a token, W loss"),
    Execution("nll_dx", _ONCE, _ONCE, 1, "W zeros, and -1 at the label"),
    Execution("repeat_kv", _ONCE, _ONCE, 1, "R key or value heads, W a copy per query head"),
    Execution("repeat_kv_dx", _ONCE, _ONCE, 1, "R a gradient per query head, W sums"),
    Execution("attn_scores", _ONCE, _ONCE, 1, "batched GEMM: R q, k, W all pairs"),
    Execution("attn_scores_dq", _ONCE, _ONCE, 1, "batched GEMM: R all pairs, k, W dq"),
    Execution("attn_scores_dk", _ONCE, _ONCE, 1, "batched GEMM: R all pairs, q, W dk"),
    Execution("scale", _ONCE, _ONCE, 1, "R x, W y"),
    Execution("scale_dx", _ONCE, _ONCE, 1, "R dy, W dx"),
    Execution("mask", _ONCE, _ONCE, 1, "R x, W y; the mask, which all heads share, is left out"),
    Execution("softmax", _ONCE, _ONCE, 1, "R x, W y in fp32"),
    Execution("softmax_dx", _ONCE, _ONCE, 1, "R dy, y, W dx in fp32"),
    Execution("attn_mix", _ONCE, _ONCE, 1, "batched GEMM: R all pairs, v, W o"),
    Execution("attn_mix_dp", _ONCE, _ONCE, 1, "batched GEMM: R do, v, W all pairs"),
    Execution("attn_mix_dv", _ONCE, _ONCE, 1, "batched GEMM: R do, all pairs, W dv"),
    Execution("contiguous", _ONCE, _ONCE, 1, "R x, W its copy"),
    Execution("foreach_scale", _ONCE, _ONCE, 1, _FOREACH, ELEMENTS_PER_LAUNCH),
    Execution("foreach_lerp", _ONCE, _ONCE, 1, _FOREACH, ELEMENTS_PER_LAUNCH),
    Execution("foreach_addcmul", _ONCE, _ONCE, 1, _FOREACH, ELEMENTS_PER_LAUNCH),
    Execution("foreach_sqrt", _ONCE, _ONCE, 1, _FOREACH, ELEMENTS_PER_LAUNCH),
    Execution("foreach_add", _ONCE, _ONCE, 1, _FOREACH, ELEMENTS_PER_LAUNCH),
    Execution("foreach_addcdiv", _ONCE, _ONCE, 1, _FOREACH, ELEMENTS_PER_LAUNCH),
    Execution("foreach_copy", _ONCE, _ONCE, 1, _FOREACH, ELEMENTS_PER_LAUNCH),
)
"""One row per kind of `ir/kinds/eager.py` and `ir/kinds/eager_attention.py`."""
