"""A mixture of experts in numpy: routed tokens are the dense [E b s d], with zeros where a token does not visit.

Biases fill the places of tokens that are not there. Their scores are zero, so nothing of it reaches a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from meaning_rank import Array, Meaning, Where
from stepgraph.ir.op import Op

AUX = 0.25
"""Weight of the load-balancing loss, which here is AUX x the sum of the squares of all scores."""


def topk(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """softmax over the k largest logits, zero for all others."""
    k = int(op.attr("k") or 0)
    least = np.sort(x[0], -1)[..., -k][..., None]
    chosen = np.where(x[0] >= least, np.exp(x[0] - x[0].max(-1, keepdims=True)), 0)
    return (chosen / chosen.sum(-1, keepdims=True),)


def topk_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """p (dy - <dy, p>), which is zero where p is."""
    dy, p = x
    return (p * (dy - (dy * p).sum(-1, keepdims=True)),)


def aux_loss(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The scores as they are: the loss is a scalar of its own, see `aux_term`."""
    return (x[0],)


def aux_loss_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The gradient that passes, plus that of `aux_term`: 2 AUX p. It counts once, so a pending sum would show."""
    return (x[0] + 2 * AUX * x[1],)


def aux_term(scores: Array) -> float:
    """What the op adds to the objective: AUX x the sum of squares over all tokens and experts."""
    return float(AUX * np.sum(scores**2))


def permute(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """A copy of the token for each expert that it has a score for."""
    return (np.einsum("bsd,bsE->Ebsd", x[0], x[1] != 0),)


def permute_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The sum over the copies of a token."""
    return (np.einsum("Ebsd,bsE->bsd", x[0], x[1] != 0),)


def unpermute(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """The sum over the copies of a token, weighted with its scores."""
    return (np.einsum("bsE,Ebsd->bsd", *x),)


def unpermute_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """dp = <dy, copy> for the experts that were visited, and dy p for each copy."""
    dy, scores, copies = x
    return np.einsum("bsd,Ebsd->bsE", dy, copies) * (scores != 0), np.einsum("bsd,bsE->Ebsd", dy, scores)


def gate_mul(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """y sigmoid(g), with one g for each token."""
    return (x[0] / (1 + np.exp(-x[1])),)


def gate_mul_dx(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
    """dy sigma, and <dy, y> sigma (1 - sigma)."""
    dy, y, gate = x
    sigma = 1 / (1 + np.exp(-gate))
    return dy * sigma, (dy * y).sum(-1, keepdims=True) * sigma * (1 - sigma)


EXPERTS: Mapping[str, Meaning] = MappingProxyType(
    {
        meaning.__name__: meaning
        for meaning in (
            *(topk, topk_dx, aux_loss, aux_loss_dx, gate_mul, gate_mul_dx),
            *(permute, permute_dx, unpermute, unpermute_dx),
        )
    }
)
"""Meanings by kind."""
