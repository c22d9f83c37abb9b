"""Activations in numpy: each is a function and its slope, alone or as the gate of a packed projection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from meaning_rank import Array, Meaning, Where
from stepgraph.ir.op import Op

Function = Callable[[Array], Array]


def _silu(x: Array) -> Array:
    """x sigma(x)."""
    return np.asarray(x / (1 + np.exp(-x)))


def _silu_slope(x: Array) -> Array:
    """sigma (1 + x (1 - sigma))."""
    sigma = 1 / (1 + np.exp(-x))
    return np.asarray(sigma * (1 + x * (1 - sigma)))


def _tanh_of(x: Array) -> Array:
    return np.asarray(np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _gelu(x: Array) -> Array:
    """The tanh form."""
    return np.asarray(0.5 * x * (1 + _tanh_of(x)))


def _gelu_slope(x: Array) -> Array:
    """Product rule on the tanh form."""
    tanh = _tanh_of(x)
    inner = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return np.asarray(0.5 * (1 + tanh + x * (1 - tanh**2) * inner))


def _relu(x: Array) -> Array:
    """max(x, 0)."""
    return np.maximum(x, 0)


def _relu_slope(x: Array) -> Array:
    """1 where x is positive."""
    return np.asarray(x > 0, float)


def _plain(f: Function) -> Meaning:
    """f(x)."""

    def meaning(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
        return (f(x[0]),)

    return meaning


def _plain_dx(slope: Function) -> Meaning:
    """dy f'(x)."""

    def meaning(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
        return (x[0] * slope(x[1]),)

    return meaning


def _halves(packed: Array) -> tuple[Array, Array]:
    """Gate and up: `k` is the last letter but one, and the gate is its half 0."""
    return packed[..., 0, :], packed[..., 1, :]


def _gated(f: Function) -> Meaning:
    """f(gate) up."""

    def meaning(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
        gate, up = _halves(x[0])
        return (f(gate) * up,)

    return meaning


def _gated_dx(f: Function, slope: Function) -> Meaning:
    """dy up f'(gate) and dy f(gate), packed."""

    def meaning(op: Op, x: Sequence[Array], where: Where) -> tuple[Array, ...]:
        dy, (gate, up) = x[0], _halves(x[1])
        return (np.stack([dy * up * slope(gate), dy * f(gate)], axis=-2),)

    return meaning


ACTIVATIONS: Mapping[str, Meaning] = MappingProxyType(
    {
        kind: meaning
        for plain, gated, f, slope in (
            ("silu", "swiglu", _silu, _silu_slope),
            ("gelu", "geglu", _gelu, _gelu_slope),
            ("relu", "reglu", _relu, _relu_slope),
        )
        for kind, meaning in (
            (plain, _plain(f)),
            (f"{plain}_dx", _plain_dx(slope)),
            (gated, _gated(f)),
            (f"{gated}_dx", _gated_dx(f, slope)),
        )
    }
)
"""Meanings by kind."""
