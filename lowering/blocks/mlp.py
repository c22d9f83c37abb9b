"""The dense feed-forward block: norm, up projection(s), activation, down projection, residual."""

from __future__ import annotations

from types import MappingProxyType

from stepgraph.ir.tensor import Tensor
from stepgraph.lowering.blocks.norm import norm
from stepgraph.lowering.builder import Builder
from stepgraph.lowering.model import Layer, Mlp

GATED_KINDS = MappingProxyType({"silu": "swiglu"})
PLAIN_KINDS = MappingProxyType({"gelu": "gelu", "relu": "relu"})
"""Op kind of each activation that the reader lets through."""


def mlp(b: Builder, x: Tensor, layer: Layer) -> Tensor:
    """Gated or plain MLP with its norm and its residual add.

    Shapes: x [b s d] -> [b s d]. FLOPs: 2 m d (2 f) + 2 m f d gated (one packed up projection), 2 m d f + 2 m f d
    plain. Source: How to Think About Asymptotic Times, section 4; Shazeer 2020 (arXiv:2002.05202) for the gate.
    """
    spec, hidden = layer.mlp, x.shape[-1]
    assert isinstance(spec, Mlp)
    h = norm(b, "mlp.norm", x, layer.norm)
    h = _gated(b, h, spec) if spec.gated else _plain(b, h, spec)
    weight = b.param("mlp.down.weight", "fd", (spec.ffn, hidden))
    y = b.op("linear", "mlp.down", h, weight, out="bsd", family="mlp_down")
    if spec.bias:
        y = b.op("bias_add", "mlp.down_bias", b.pin(y), b.param("mlp.down.bias", "d", (hidden,)), out="bsd")
    return b.op("add", "mlp.residual", x, y, out="bsd")


def _gated(b: Builder, h: Tensor, spec: Mlp) -> Tensor:
    weight = b.param("mlp.gate_up.weight", "dkf", (h.shape[-1], 2, spec.ffn))
    pair = b.op("linear", "mlp.gate_up", h, weight, out="bskf", family="mlp_up")
    if spec.bias:
        pair = b.op("bias_add", "mlp.up_bias", pair, b.param("mlp.gate_up.bias", "kf", (2, spec.ffn)), out="bskf")
    return b.op(GATED_KINDS[spec.activation], "mlp.act", pair, out="bsf")


def _plain(b: Builder, h: Tensor, spec: Mlp) -> Tensor:
    weight = b.param("mlp.up.weight", "df", (h.shape[-1], spec.ffn))
    up = b.op("linear", "mlp.up", h, weight, out="bsf", family="mlp_up")
    if spec.bias:
        up = b.op("bias_add", "mlp.up_bias", up, b.param("mlp.up.bias", "f", (spec.ffn,)), out="bsf")
    return b.op(PLAIN_KINDS[spec.activation], "mlp.act", up, out="bsf")
