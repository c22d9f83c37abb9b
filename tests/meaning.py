"""What every op kind of the table computes, on one rank, in numpy float64.

A meaning sees the op's own operands and nothing else, so what backward needs really is among what the graph passes
to it. The single fact from outside is where the rank's slice of a dimension starts: positions and vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from stepgraph.ir.op import Op
from stepgraph.ir.tensor import Axis, Tensor

Array = npt.NDArray[Any]
EPS = 1e-5


@attrs.frozen
class Where:
    """A rank: its index on every axis of the mesh, outermost first."""

    axes: tuple[Axis, ...]
    index: tuple[int, ...]

    def start(self, tensor: Tensor, letter: str) -> int:
        """Global index of the first element of this rank's slice of the dimension `letter`."""
        dim, begin = tensor.dims.index(letter), 0
        size = tensor.shape[dim]
        for placement in tensor.place:
            if placement.dim == dim:
                size //= placement.axis.size
                begin += size * self.index[[axis.name for axis in self.axes].index(placement.axis.name)]
        return begin


Meaning = Callable[[Op, Sequence[Array], Where], tuple[Array, ...]]
"""From an op, its operands on one rank and the rank to the op's results on that rank."""


def contraction(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Sum over every letter that the result lacks: linear, its two gradients, the gradient of a bias."""
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


# attention -----------------------------------------------------------------------------------------------------------


def _scores(op: Op, query: Tensor, key: Tensor, q: Array, k: Array, where: Where) -> Array:
    """[b h s t], scaled and masked; key head g serves the query heads g r ... g r + r - 1."""
    scores = np.einsum("bshc,bthc->bhst", q, _per_query_head(k, q)) / np.sqrt(q.shape[-1])
    rows = where.start(query, "s") + np.arange(q.shape[1])
    columns = where.start(key, "s") + np.arange(k.shape[1])
    hidden = rows[:, None] < columns[None, :]
    return np.where(hidden, -np.inf, scores) if op.attr("causal") else scores


def _per_query_head(k: Array, q: Array) -> Array:
    return np.repeat(k, q.shape[2] // k.shape[2], axis=2)


def _per_key_head(grad: Array, k: Array) -> Array:
    """Undo `_per_query_head` for gradients: the sum over the query heads of each group."""
    return np.asarray(grad.reshape(*k.shape[:3], -1, k.shape[3]).sum(3))


def sdpa(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """softmax(Q K^T / sqrt c) V and the log-sum-exp of each row."""
    q, k, v = x
    scores = _scores(op, op.inputs[0], op.inputs[1], q, k, where)
    top = scores.max(-1, keepdims=True)
    lse = top + np.log(np.exp(scores - top).sum(-1, keepdims=True))
    out = np.einsum("bhst,bthc->bshc", np.exp(scores - lse), _per_query_head(v, q))
    return out, lse[..., 0].transpose(0, 2, 1)


def sdpa_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """dQ, dK, dV from the scores computed again and the saved log-sum-exp and output."""
    do, q, k, v, o, lse = x
    weights = np.exp(_scores(op, op.inputs[1], op.inputs[2], q, k, where) - lse.transpose(0, 2, 1)[..., None])
    dweights = np.einsum("bshc,bthc->bhst", do, _per_query_head(v, q))
    dscores = weights * (dweights - np.einsum("bshc,bshc->bhs", do, o)[..., None]) / np.sqrt(q.shape[-1])
    dq = np.einsum("bhst,bthc->bshc", dscores, _per_query_head(k, q))
    dk = _per_key_head(np.einsum("bhst,bshc->bthc", dscores, q), k)
    return dq, dk, _per_key_head(np.einsum("bhst,bshc->bthc", weights, do), v)


def split_qkv(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Packed heads lie group by group: the group's query heads, its key head, its value head."""
    batch, sequence, packed, width = x[0].shape
    groups = op.outputs[1].local_shape[2]
    heads = x[0].reshape(batch, sequence, groups, packed // groups, width)
    return heads[..., :-2, :].reshape(batch, sequence, -1, width), heads[..., -2, :], heads[..., -1, :]


def join_qkv(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The inverse of `split_qkv`."""
    q, k, v = x
    batch, sequence, groups, width = k.shape
    heads = np.concatenate([q.reshape(batch, sequence, groups, -1, width), k[..., None, :], v[..., None, :]], axis=3)
    return (heads.reshape(batch, sequence, -1, width),)


def _rotated(x: Array, start: int, direction: int) -> Array:
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-np.arange(half) / half)
    angle = direction * (start + np.arange(x.shape[1]))[:, None, None] * frequency
    left, right = x[..., :half], x[..., half:]
    return np.concatenate(
        [left * np.cos(angle) - right * np.sin(angle), right * np.cos(angle) + left * np.sin(angle)], -1
    )


def rope(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Coordinate i is rotated with coordinate i + c/2 by position x 10000^(-2 i / c)."""
    return (_rotated(x[0], where.start(op.inputs[0], "s"), 1),)


def rope_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The rotation is orthogonal: its gradient turns back."""
    return (_rotated(x[0], where.start(op.inputs[0], "s"), -1),)


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
    """The sum of dy n over this rank's tokens."""
    dy, value, rstd = x
    return (np.einsum("bsd,bsd,bs->d", dy, value, rstd),)


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
    """A bias has the last letters of what it is added to."""
    assert op.inputs[0].dims.endswith(op.inputs[1].dims)
    return (x[0] + x[1],)


def swiglu(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """silu(gate) up; the gate is half 0."""
    gate, up = x[0][:, :, 0], x[0][:, :, 1]
    return (gate / (1 + np.exp(-gate)) * up,)


def swiglu_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Both halves, packed."""
    dy, gate, up = x[0], x[1][:, :, 0], x[1][:, :, 1]
    sigma = 1 / (1 + np.exp(-gate))
    return (np.stack([dy * up * sigma * (1 + gate * (1 - sigma)), dy * gate * sigma], axis=2),)


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The tanh form."""
    return (0.5 * x[0] * (1 + _gelu_tanh(x[0])),)


def gelu_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Product rule on the tanh form."""
    dy, value = x
    tanh = _gelu_tanh(value)
    inner = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * value**2)
    return (dy * 0.5 * (1 + tanh + value * (1 - tanh**2) * inner),)


def relu(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """max(x, 0)."""
    return (np.maximum(x[0], 0),)


def relu_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """dy where x is positive."""
    return (x[0] * (x[1] > 0),)


MEANINGS: Mapping[str, Meaning] = MappingProxyType(
    {
        **dict.fromkeys(("linear", "linear_dx", "linear_dw", "bias_add_dw"), contraction),
        **dict.fromkeys(("add", "grad_add"), total),
        **{
            meaning.__name__: meaning
            for meaning in (
                *(embedding, embedding_dw, position_add, position_add_dw, cross_entropy, cross_entropy_dx),
                *(sdpa, sdpa_dx, split_qkv, join_qkv, rope, rope_dx),
                *(rmsnorm, rmsnorm_dx, rmsnorm_dw, layernorm, layernorm_dx, layernorm_dw),
                *(bias_add, swiglu, swiglu_dx, gelu, gelu_dx, relu, relu_dx),
            )
        },
    }
)
"""Meanings by kind: all kinds of forward and backward except the conversions, which move data between ranks."""
