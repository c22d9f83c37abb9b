"""What PyTorch eager's kernels compute, in numpy: pieces of norms, rotations, gates, attention, loss and AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from meaning_attention import hidden
from meaning_rank import EPS, Array, Meaning, Where
from stepgraph.ir.op import Op

RATE, DECAY, BETA_1, BETA_2, ADAM_EPS, STEP = 0.1, 0.01, 0.9, 0.95, 1e-8, 3
"""Of AdamW: learning rate, weight decay, both betas, epsilon, number of the step."""

BY: Mapping[str, float] = MappingProxyType(
    {"decay": 1 - RATE * DECAY, "beta_2": BETA_2, "bias_correction": (1 - BETA_2**STEP) ** -0.5}
)
"""What a foreach_scale multiplies with."""


def same(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The operands as they are: views, copies and casts, of which float64 knows nothing."""
    return tuple(x)


# norms ---------------------------------------------------------------------------------------------------------------


def square(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """x^2."""
    return (x[0] ** 2,)


def square_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """2 x dy."""
    return (2 * x[0] * x[1],)


def mean(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Over the last letter."""
    return (x[0].mean(-1),)


def mean_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """dy / width, at every coordinate."""
    width = op.outputs[0].local_shape[-1]
    return (np.repeat(x[0][..., None], width, -1) / width,)


def rsqrt(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """(x + eps)^(-1/2)."""
    return ((x[0] + EPS) ** -0.5,)


def rsqrt_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """-dy y^3 / 2."""
    return (-x[0] * x[1] ** 3 / 2,)


def row_mul(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Each row times its number."""
    return (x[0] * x[1][..., None],)


def row_mul_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """dy r, and the sum of dy x over the row."""
    dy, value, statistic = x
    return dy * statistic[..., None], (dy * value).sum(-1)


def product(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """x y: of one shape, or y for the last letter."""
    return (x[0] * x[1],)


def weight_mul_dw(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The sum of dy x over all but the last letter."""
    return ((x[0] * x[1]).reshape(-1, x[0].shape[-1]).sum(0),)


def mul_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """dy y and dy x."""
    return x[0] * x[2], x[0] * x[1]


# rotary positions ------------------------------------------------------------------------------------------------------


def rotary_mul(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Times cos or sin of position x 10000^(-2 i / c), i counted again in the second half."""
    half = x[0].shape[-1] // 2
    position = where.start(op.inputs[0], "s") + np.arange(x[0].shape[1])
    angle = position[:, None, None] * 10000.0 ** (-np.arange(half) / half)
    table = np.cos(angle) if op.attr("table") == "cos" else np.sin(angle)
    return (x[0] * np.concatenate([table, table], -1),)


def halves(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The first and the second half of the last letter."""
    first, second = np.split(x[0], 2, axis=-1)
    return first, second


def joined(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The inverse of `halves`."""
    return (np.concatenate(x, axis=-1),)


def negative(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """-x."""
    return (-x[0],)


# gates ---------------------------------------------------------------------------------------------------------------


def split_gate_up(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Halves of the last letter but one."""
    return x[0][..., 0, :], x[0][..., 1, :]


def join_gate_up(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The inverse of `split_gate_up`."""
    return (np.stack(x, axis=-2),)


# attention -----------------------------------------------------------------------------------------------------------


def repeat_kv(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Each head once for every query head of its group."""
    return (np.repeat(x[0], op.outputs[0].local_shape[2] // x[0].shape[2], axis=2),)


def repeat_kv_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The sum over the query heads of a group."""
    heads = op.outputs[0].local_shape[2]
    return (x[0].reshape(*x[0].shape[:2], heads, -1, x[0].shape[3]).sum(3),)


def _contracted(spec: str) -> Meaning:
    def meaning(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
        return (np.einsum(spec, *x),)

    return meaning


def scale(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Over the root of the key width."""
    return (x[0] / np.sqrt(float(op.attr("width") or 0)),)


def mask(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Minus infinity where the query does not see the key."""
    rows = where.start(op.inputs[0], "s") + np.arange(x[0].shape[2])
    return (np.where(hidden(op, rows[:, None], np.arange(x[0].shape[3])[None, :]), -np.inf, x[0]),)


def softmax(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Over the last letter."""
    weights = np.exp(x[0] - x[0].max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True),)


def softmax_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """y (dy - sum y dy)."""
    dy, y = x
    return (y * (dy - (y * dy).sum(-1, keepdims=True)),)


# loss ----------------------------------------------------------------------------------------------------------------


def log_softmax(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """x - log sum exp x."""
    return (x[0] - np.logaddexp.reduce(x[0], axis=-1, keepdims=True),)


def log_softmax_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """dy - exp(y) sum dy."""
    return (x[0] - np.exp(x[1]) * x[0].sum(-1, keepdims=True),)


def nll(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Minus the log-probability of the label."""
    return (-np.take_along_axis(x[0], x[1][..., None], -1)[..., 0],)


def nll_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """-1 at the label: the gradient of the sum of all token losses."""
    return (-np.eye(op.outputs[0].shape[-1])[x[0]],)


# AdamW ---------------------------------------------------------------------------------------------------------------


def foreach_scale(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """x times what the attribute names."""
    return (x[0] * BY[str(op.attr("by"))],)


def foreach_lerp(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """m + (1 - beta_1) (g - m)."""
    return (x[0] + (1 - BETA_1) * (x[1] - x[0]),)


def foreach_addcmul(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """v + (1 - beta_2) g^2."""
    return (x[0] + (1 - BETA_2) * x[1] ** 2,)


def foreach_sqrt(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """sqrt x."""
    return (np.sqrt(x[0]),)


def foreach_add(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """x + eps."""
    return (x[0] + ADAM_EPS,)


def foreach_addcdiv(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """p - rate / (1 - beta_1^t) m / d."""
    return (x[0] - RATE / (1 - BETA_1**STEP) * x[1] / x[2],)


_SAME = ("cast", "cast_dx", "heads_first", "heads_first_dx", "contiguous", "foreach_copy")
_CONTRACTIONS: Mapping[str, str] = MappingProxyType(
    {
        "attn_scores": "bshc,bthc->bhst",
        "attn_scores_dq": "bhst,bthc->bshc",
        "attn_scores_dk": "bhst,bshc->bthc",
        "attn_mix": "bhst,bthw->bshw",
        "attn_mix_dp": "bshw,bthw->bhst",
        "attn_mix_dv": "bshw,bhst->bthw",
    }
)

EAGER: Mapping[str, Meaning] = MappingProxyType(
    {
        **dict.fromkeys(_SAME, same),
        **{kind: _contracted(spec) for kind, spec in _CONTRACTIONS.items()},
        **dict.fromkeys(("mul", "weight_mul", "weight_mul_dx"), product),
        **dict.fromkeys(("rotary_mul", "rotary_mul_dx"), rotary_mul),
        **dict.fromkeys(("rotary_halves", "cat_halves_dx"), halves),
        **dict.fromkeys(("cat_halves", "rotary_halves_dx"), joined),
        **dict.fromkeys(("neg", "neg_dx"), negative),
        **dict.fromkeys(("scale", "scale_dx"), scale),
        **{
            meaning.__name__: meaning
            for meaning in (
                *(square, square_dx, mean, mean_dx, rsqrt, rsqrt_dx, row_mul, row_mul_dx, weight_mul_dw, mul_dx),
                *(split_gate_up, join_gate_up, repeat_kv, repeat_kv_dx, mask, softmax, softmax_dx),
                *(log_softmax, log_softmax_dx, nll, nll_dx, foreach_scale, foreach_lerp, foreach_addcmul),
                *(foreach_sqrt, foreach_add, foreach_addcdiv),
            )
        },
    }
)
"""Meanings by kind: what no block emits and `decompose` leaves."""
