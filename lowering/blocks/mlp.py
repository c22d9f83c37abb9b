"""The dense feed-forward block: up projection(s), activation, down projection."""

from __future__ import annotations

from types import MappingProxyType

from stepgraph.ir.tensor import Tensor
from stepgraph.lowering.builder import Builder
from stepgraph.lowering.model import Mlp

GATED_KINDS = MappingProxyType({"silu": "swiglu", "gelu": "geglu", "relu": "reglu"})
PLAIN_KINDS = MappingProxyType({"gelu": "gelu", "relu": "relu", "silu": "silu"})
"""Op kind of each activation that the reader lets through."""


def mlp(
    b: Builder, h: Tensor, spec: Mlp, name: str = "mlp", families: tuple[str, str] = ("mlp_up", "mlp_down")
) -> Tensor:
    """Gated or plain MLP, from the normed input to the projected output, which under TP is a pending sum.

    name: prefix of its ops; families: of its two matmuls. Shapes: h [b s d] -> [b s d]. FLOPs: 2 m d (2 f) + 2 m f d
    gated (one packed up projection), 2 m d f + 2 m f d plain.
    Source: How to Think About Asymptotic Times, section 4; Shazeer 2020 (arXiv:2002.05202) for the gate.
    """
    up, down = families
    hidden = h.shape[-1]
    act = up_and_activate(b, h, spec, name, up, "linear", "")
    weight = b.param(f"{name}.down.weight", "fd", (spec.ffn, hidden))
    y = b.op("linear", f"{name}.down", act, weight, out="bsd", family=down)
    if not spec.bias:
        return y
    return b.op("bias_add", f"{name}.down_bias", b.pin(y), b.param(f"{name}.down.bias", "d", (hidden,)), out="bsd")


def up_and_activate(
    b: Builder, h: Tensor, spec: Mlp, name: str, family: str, kind: str, experts: str, n_experts: tuple[int, ...] = ()
) -> Tensor:
    """The up projection (gate and up packed) and the activation; with `experts` = "E", of every expert.

    Shapes: h [b s d] -> [b s f], or [E b s d] -> [E b s f].
    """
    letters, sizes, part = ("kf", (2, spec.ffn), "gate_up") if spec.gated else ("f", (spec.ffn,), "up")
    width = h.dims[-1]
    weight = b.param(f"{name}.{part}.weight", f"{experts}{width}{letters}", (*n_experts, h.shape[-1], *sizes))
    up = b.op(kind, f"{name}.{part}", h, weight, out=f"{experts}bs{letters}", family=family)
    if spec.bias:
        bias = b.param(f"{name}.{part}.bias", f"{experts}{letters}", (*n_experts, *sizes))
        up = b.op("bias_add", f"{name}.{part}_bias", up, bias, out=up.dims)
    activation = (GATED_KINDS if spec.gated else PLAIN_KINDS)[spec.activation]
    return b.op(activation, f"{name}.act", up, out=f"{experts}bsf")
