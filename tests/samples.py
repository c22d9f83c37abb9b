"""Small graphs written by hand."""

from __future__ import annotations

from stepgraph.ir.graph import Graph, Ports
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.tensor import Axis, Kind, Placement, Tensor

DP = Axis("dp", 2, 4)
TP = Axis("tp", 4, 1)


def small() -> Graph:
    """A norm and a column-parallel projection under sequence parallelism, forward and backward."""
    batch, sequence, heads = Placement(DP, 0), Placement(TP, 1), Placement(TP, 2)
    x = Tensor("x", "bsd", (2, 8, 16), place=(batch, sequence))
    weight = Tensor("norm.weight", "d", (16,), kind=Kind.PARAM)
    y = Tensor("norm", "bsd", (2, 8, 16), place=(batch, sequence))
    rms = Tensor("norm.rms", "bs", (2, 8), "fp32", place=(batch, sequence))
    whole = Tensor("norm.all_gather", "bsd", (2, 8, 16), place=(batch,))
    w = Tensor("qkv.weight", "dh", (16, 32), kind=Kind.PARAM, place=(Placement(TP, 1),))
    qkv = Tensor("qkv", "bsh", (2, 8, 32), place=(batch, heads))
    dy = Tensor("qkv.dy", "bsh", (2, 8, 32), kind=Kind.GRAD, place=(batch, heads))
    again = Tensor("norm.regather", "bsd", (2, 8, 16), place=(batch,))
    dx = Tensor("qkv.dx", "bsd", (2, 8, 16), kind=Kind.GRAD, place=(batch, Placement(TP, None)))
    dw = Tensor("qkv.dw", "dh", (16, 32), "fp32", Kind.GRAD, (Placement(DP, None), Placement(TP, 1)))
    at = (("dp", "b"), ("tp", "h"))
    ops = (
        Op("norm", "rmsnorm", (x, weight), (y, rms), (("eps", 1e-05),), (("dp", "b"), ("tp", "s")), module="attn"),
        Op("norm.all_gather", "all_gather", (y,), (whole,), group=(TP,), module="attn", origin="collectives"),
        Op("qkv", "linear", (whole, w), (qkv,), (("family", "qkv"), ("packed", True)), at, module="attn"),
        Op("norm.regather", "all_gather", (y,), (again,), (), (), Phase.BACKWARD, "norm", "regather", (TP,)),
        Op("qkv.dx", "linear_dx", (dy, w), (dx,), (), at, Phase.BACKWARD, "qkv", "dx"),
        Op("qkv.dw", "linear_dw", (dy, again), (dw,), (), at, Phase.BACKWARD, "qkv", "dw"),
        Op("dw.sum", "all_reduce", (dw,), (), (), (), Phase.STEP, group=(DP, TP)),
    )
    ports = Ports(enters="x", leaves="qkv", grad_enters="qkv.dy", grad_leaves="qkv.dx")
    return Graph("small", ops, (qkv, dx, dw), ports, frozenset({"placed", "backward"}))
