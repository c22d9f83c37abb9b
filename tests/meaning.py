"""What every op kind of the table computes, on one rank, in numpy float64.

A meaning sees the op's own operands and nothing else, so what backward needs really is among what the graph passes
to it. The single fact from outside is where the rank's slice of a dimension starts: positions and vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from meaning_activations import ACTIVATIONS
from meaning_attention import ATTENTION
from meaning_eager import EAGER
from meaning_experts import EXPERTS
from meaning_rank import EPS, Array, Meaning, Where, soft_cap, soft_cap_slope
from stepgraph.ir.op import Op


def contraction(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Sum over every letter that the result lacks: linear, of experts too, its two gradients, the gradient of a bias."""
    return (np.einsum(",".join(t.dims for t in op.inputs) + "->" + op.outputs[0].dims, *x),)


def total(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The sum of the operands."""
    return (np.sum(x, axis=0),)


# ends ----------------------------------------------------------------------------------------------------------------


def _rows(ids: Array, first: int, count: int) -> tuple[Array, Array]:
    """Local row of every token, and whether this rank owns it."""
    local = ids - first
    owned = (local >= 0) & (local < count)
    return np.where(owned, local, 0), owned


def embedding(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Rows that this rank owns; zeros for all others."""
    ids, table = x
    rows, owned = _rows(ids, where.start(op.inputs[1], "v"), len(table))
    return (table[rows] * owned[..., None],)


def embedding_dw(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Gradient rows added into the rows that this rank owns."""
    dy, ids = x
    dw = np.zeros(op.outputs[0].local_shape)
    rows, owned = _rows(ids, where.start(op.outputs[0], "v"), len(dw))
    np.add.at(dw, rows, dy * owned[..., None])
    return (dw,)


def position_add(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The row of each position of this rank's sequence range."""
    start = where.start(op.inputs[0], "s")
    return (x[0] + x[1][start : start + x[0].shape[1]],)


def position_add_dw(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The batch sum, in the rows of this rank's sequence range."""
    dw, start = np.zeros_like(x[1]), where.start(op.inputs[0], "s")
    dw[start : start + x[0].shape[1]] = x[0].sum(0)
    return (dw,)


def cross_entropy(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Loss and softmax over the whole vocabulary: the runner gathers it, because `v` is an inner letter."""
    logits, labels = x
    shifted = logits - logits.max(-1, keepdims=True)
    softmax = np.exp(shifted) / np.exp(shifted).sum(-1, keepdims=True)
    return -np.log(np.take_along_axis(softmax, labels[..., None], -1)[..., 0]), softmax


def cross_entropy_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Softmax minus one at the label, if it is here: the gradient of the sum of all token losses."""
    softmax, labels = x
    rows, owned = _rows(labels, where.start(op.inputs[0], "v"), softmax.shape[-1])
    return (softmax - np.eye(softmax.shape[-1])[rows] * owned[..., None],)


def concat(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Both streams of a token, one behind the other."""
    return (np.concatenate(x, axis=-1),)


def concat_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The inverse of `concat`."""
    first, second = np.split(x[0], [op.outputs[0].shape[-1]], axis=-1)
    return first, second


# norms ---------------------------------------------------------------------------------------------------------------


def rmsnorm(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """x rstd w with rstd = (mean x^2 + eps)^(-1/2)."""
    rstd = 1 / np.sqrt((x[0] ** 2).mean(-1) + EPS)
    return x[0] * rstd[..., None] * x[1], rstd


def rmsnorm_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """rstd (g - n mean(g n)) with g = dy w and n = x rstd."""
    dy, value, weight, rstd = x
    g, n = dy * weight, value * rstd[..., None]
    return ((g - n * (g * n).mean(-1, keepdims=True)) * rstd[..., None],)


def rmsnorm_dw(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The sum of dy n over this rank's rows: tokens, or heads of tokens."""
    dy, value, rstd = x
    return ((dy * value * rstd[..., None]).reshape(-1, value.shape[-1]).sum(0),)


def rmsnorm_heads(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """One norm over all heads of a token: the runner gathers them, because `h` is an inner letter."""
    rstd = 1 / np.sqrt((x[0] ** 2).mean((-2, -1)) + EPS)
    return x[0] * rstd[..., None, None] * x[1], rstd


def rmsnorm_heads_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """rstd (g - n mean(g n)), with the mean over all heads."""
    dy, value, weight, rstd = x
    g, n = dy * weight, value * rstd[..., None, None]
    return ((g - n * (g * n).mean((-2, -1), keepdims=True)) * rstd[..., None, None],)


def rmsnorm_heads_dw(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The sum of dy n over this rank's tokens, for its heads."""
    dy, value, rstd = x
    return (np.einsum("bshc,bshc,bs->hc", dy, value, rstd),)


def layernorm(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """(x - mean) rstd w + bias with rstd = (variance + eps)^(-1/2)."""
    mean, rstd = x[0].mean(-1), 1 / np.sqrt(x[0].var(-1) + EPS)
    return (x[0] - mean[..., None]) * rstd[..., None] * x[1] + x[2], mean, rstd


def layernorm_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """rstd (g - mean g - n mean(g n)) with g = dy w and n = (x - mean) rstd."""
    dy, value, weight, mean, rstd = x
    g, n = dy * weight, (value - mean[..., None]) * rstd[..., None]
    return ((g - g.mean(-1, keepdims=True) - n * (g * n).mean(-1, keepdims=True)) * rstd[..., None],)


def layernorm_dw(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The sums of dy n and of dy over this rank's tokens."""
    dy, value, mean, rstd = x
    return np.einsum("bsd,bsd,bs->d", dy, value - mean[..., None], rstd), dy.sum((0, 1))


# pointwise -----------------------------------------------------------------------------------------------------------


def bias_add(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """A bias has some of the letters of what it is added to, in the same order."""
    letters, own = op.inputs[0].dims, op.inputs[1].dims
    assert own == "".join(letter for letter in letters if letter in own), f"{own} does not fit {letters}"
    spread = [size if letter in own else 1 for letter, size in zip(letters, x[0].shape, strict=True)]
    return (x[0] + x[1].reshape(spread),)


def softcap(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """cap tanh(x / cap)."""
    return (soft_cap(x[0]),)


def softcap_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """dy (1 - (y / cap)^2)."""
    return (x[0] * soft_cap_slope(x[1]),)


CONTRACTIONS = (
    *("linear", "linear_dx", "linear_dw", "bias_add_dw"),
    *("grouped_linear", "grouped_linear_dx", "grouped_linear_dw"),
)

MEANINGS: Mapping[str, Meaning] = MappingProxyType(
    {
        **dict.fromkeys(CONTRACTIONS, contraction),
        **dict.fromkeys(("add", "grad_add"), total),
        **{
            meaning.__name__: meaning
            for meaning in (
                *(embedding, embedding_dw, position_add, position_add_dw, cross_entropy, cross_entropy_dx),
                *(concat, concat_dx),
                *(rmsnorm, rmsnorm_dx, rmsnorm_dw, layernorm, layernorm_dx, layernorm_dw),
                *(rmsnorm_heads, rmsnorm_heads_dx, rmsnorm_heads_dw, bias_add, softcap, softcap_dx),
            )
        },
        **ACTIVATIONS,
        **ATTENTION,
        **EXPERTS,
        **EAGER,
    }
)
"""Meanings by kind: all kinds of forward and backward except the conversions, which move data between ranks."""
