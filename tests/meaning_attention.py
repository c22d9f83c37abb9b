"""Attention in numpy: flash attention with its masks and sinks, rotary positions, and the views around them.

Of a head that is rotated in part, the trailing coordinates turn: there latent attention has its rotary part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from meaning_rank import Array, Meaning, Where, soft_cap, soft_cap_slope
from stepgraph.ir.op import Op
from stepgraph.ir.tensor import Tensor

# scores and their weighted sums ----------------------------------------------------------------------------------------


def _scores(op: Op, query: Tensor, key: Tensor, q: Array, k: Array, where: Where) -> Array:
    """[b h s t], scaled, capped and masked; key head g serves the query heads g r ... g r + r - 1."""
    scores = np.einsum("bshc,bthc->bhst", q, _per_query_head(k, q)) / np.sqrt(q.shape[-1])
    rows = where.start(query, "s") + np.arange(q.shape[1])
    columns = where.start(key, "s") + np.arange(k.shape[1])
    scores = soft_cap(scores) if op.attr("softcap") else scores
    return np.where(hidden(op, rows[:, None], columns[None, :]), -np.inf, scores)


def hidden(op: Op, row: Array, column: Array) -> Array:
    """Keys that a query does not see: later ones, those before its window, those of other chunks."""
    hidden = (row < column) & bool(op.attr("causal"))
    if window := int(op.attr("window") or 0):
        hidden = hidden | (row - column >= window)
    if chunk := int(op.attr("chunk") or 0):
        hidden = hidden | (row // chunk != column // chunk)
    return np.asarray(hidden)


def _per_query_head(k: Array, q: Array) -> Array:
    return np.repeat(k, q.shape[2] // k.shape[2], axis=2)


def _per_key_head(grad: Array, k: Array) -> Array:
    """Undo `_per_query_head` for gradients: the sum over the query heads of each group."""
    return np.asarray(grad.reshape(*k.shape[:3], -1, k.shape[3]).sum(3))


def sdpa(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """softmax(Q K^T / sqrt c) V and the log-sum-exp of each row; a sink is one more logit, without a value."""
    q, k, v, *sinks = x
    scores = _scores(op, op.inputs[0], op.inputs[1], q, k, where)
    lse = np.logaddexp.reduce(scores, axis=-1)
    lse = np.logaddexp(lse, sinks[0][:, None]) if sinks else lse
    out = np.einsum("bhst,bthw->bshw", np.exp(scores - lse[..., None]), _per_query_head(v, q))
    return out, lse.transpose(0, 2, 1)


def sdpa_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """dQ, dK, dV from the scores computed again and the saved log-sum-exp and output."""
    do, q, k, v, o, lse = x
    scores = _scores(op, op.inputs[1], op.inputs[2], q, k, where)
    weights = np.exp(scores - lse.transpose(0, 2, 1)[..., None])
    dweights = np.einsum("bshw,bthw->bhst", do, _per_query_head(v, q))
    dscores = weights * (dweights - np.einsum("bshw,bshw->bhs", do, o)[..., None]) / np.sqrt(q.shape[-1])
    dscores = dscores * soft_cap_slope(scores) if op.attr("softcap") else dscores
    dq = np.einsum("bhst,bthc->bshc", dscores, _per_query_head(k, q))
    dk = _per_key_head(np.einsum("bhst,bshc->bthc", dscores, q), k)
    return dq, dk, _per_key_head(np.einsum("bhst,bshw->bthw", weights, do), v)


def sdpa_sink_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """As without sinks; a sink's own weight p has the gradient -p <dO, O> of each query."""
    do, q, k, v, sinks, o, lse = x
    dsinks = -np.einsum("bsh,bshw,bshw->h", np.exp(sinks - lse), do, o)
    return (*sdpa_dx(op, (do, q, k, v, o, lse), where), dsinks)


# packed heads ----------------------------------------------------------------------------------------------------------


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


# rotary positions ------------------------------------------------------------------------------------------------------


def _rotated(op: Op, x: Array, where: Where, direction: int) -> Array:
    still, turning = np.split(x, [x.shape[-1] - int(op.attr("rotary_dim") or x.shape[-1])], axis=-1)
    half = turning.shape[-1] // 2
    position = where.start(op.inputs[0], "s") + np.arange(x.shape[1])
    frequency = 10000.0 ** (-np.arange(half) / half)
    angle = direction * position.reshape(-1, *(1,) * (x.ndim - 2)) * frequency
    left, right = turning[..., :half], turning[..., half:]
    turned = [left * np.cos(angle) - right * np.sin(angle), right * np.cos(angle) + left * np.sin(angle)]
    return np.concatenate([still, *turned], -1)


def rope(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """Of the last r coordinates, i is rotated with i + r/2 by position x 10000^(-2 i / r)."""
    return (_rotated(op, x[0], where, 1),)


def rope_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The rotation is orthogonal: its gradient turns back."""
    return (_rotated(op, x[0], where, -1),)


# latents ---------------------------------------------------------------------------------------------------------------


def split_latent(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The latent, then the rotary key that all heads share."""
    latent, rotary = np.split(x[0], [op.outputs[0].shape[-1]], axis=-1)
    return latent, rotary


def join_latent(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The inverse of `split_latent`."""
    return (np.concatenate(x, axis=-1),)


def latent_keys(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """A packed head is its key without position, then its value; the shared rotary key goes behind each key."""
    packed, rotary = x
    plain = packed.shape[-1] - op.outputs[1].shape[-1]
    shared = np.broadcast_to(rotary[:, :, None], (*packed.shape[:3], rotary.shape[-1]))
    return np.concatenate([packed[..., :plain], shared], -1), packed[..., plain:]


def latent_keys_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The packed gradients, and the sum of the rotary parts over this rank's heads."""
    dk, dv = x
    plain = dk.shape[-1] - op.outputs[1].shape[-1]
    return np.concatenate([dk[..., :plain], dv], -1), dk[..., plain:].sum(2)


ATTENTION: Mapping[str, Meaning] = MappingProxyType(
    {
        "sdpa_sink": sdpa,
        **{
            meaning.__name__: meaning
            for meaning in (
                *(sdpa, sdpa_dx, sdpa_sink_dx, split_qkv, join_qkv, rope, rope_dx),
                *(split_latent, join_latent, latent_keys, latent_keys_dx),
            )
        },
    }
)
"""Meanings by kind."""
