"""Packed projections as PyTorch eager runs them: a linear of its own for q, k and v, and for gate and up.

Every part reads the input by itself, and its input gradients are summed; no view has to be taken or undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import attrs

from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op
from stepgraph.ir.rewriting import Parts, replace_ops
from stepgraph.ir.tensor import Tensor


@attrs.frozen
class Packing:
    """One way to pack projections. split: the kind that takes the parts apart; parts: what their names end with.

    letter: the letter of the weight that packs; a part has its own size of it, or lacks it.
    """

    split: str
    suffix: str
    parts: tuple[str, ...]
    letter: str
    keeps_letter: bool


PACKINGS: Mapping[str, Packing] = MappingProxyType(
    {
        "qkv": Packing("split_qkv", "qkv", ("q", "k", "v"), "h", keeps_letter=True),
        "gate_up": Packing("split_gate_up", "gate_up", ("gate", "up"), "k", keeps_letter=False),
    }
)
"""Packings by the name under which they are asked for."""


def unpack(graph: Graph, packing: Packing, origin: str) -> Graph:
    """The graph with a linear for every part of the packed projections; FLOPs and parameters stay as many.

    Left alone: experts' grouped projections, which PyTorch packs too, and what somebody else reads whole.
    """
    made: dict[str, Sequence[Op]] = {}
    for split in graph.ops:
        packed = _packed(graph, split) if split.kind == packing.split else ()
        if packed:
            made.update((op.name, ()) for op in packed)
            made[split.name] = [
                op for i in range(len(packing.parts)) for op in _part(packed, split, packing, i, origin)
            ]
    return replace_ops(graph, made)


def _packed(graph: Graph, split: Op) -> tuple[Op, ...]:
    """The linear, and its bias if it has one, of which the op takes views and nobody reads anything else."""
    found: tuple[Op, ...] = ()
    reader = split
    for kind in ("bias_add", "linear"):
        op = graph.producer(reader.inputs[0])
        if op and op.kind == kind and graph.users(op.outputs[0]) == (reader,):
            found, reader = (op, *found), op
    return found if found and found[0].kind == "linear" else ()


def _part(packed: tuple[Op, ...], split: Op, packing: Packing, index: int, origin: str) -> list[Op]:
    linear, *biases = packed
    name = linear.name.removesuffix(packing.suffix) + packing.parts[index]
    out = split.outputs[index]
    own = _narrower(packing, out)
    parts = Parts(linear, origin)
    made = attrs.evolve(out, name=name) if biases else out
    parts.emit("linear", made, linear.inputs[0], own(linear.inputs[1], f"{name}.weight"), name=name)
    ops = parts.ops
    for bias in biases:
        more = Parts(bias, origin)
        more.emit("bias_add", out, made, own(bias.inputs[1], f"{name}.bias"), name=f"{name}_bias")
        ops = [*ops, *more.ops]
    return ops


def _narrower(packing: Packing, out: Tensor) -> Callable[[Tensor, str], Tensor]:
    """How a packed parameter becomes that of one part."""

    def own(param: Tensor, name: str) -> Tensor:
        dim = param.dims.index(packing.letter)
        sizes = (out.shape[out.dims.index(packing.letter)],) if packing.keeps_letter else ()
        dims = param.dims if packing.keeps_letter else param.dims.replace(packing.letter, "")
        return attrs.evolve(param, name=name, dims=dims, shape=(*param.shape[:dim], *sizes, *param.shape[dim + 1 :]))

    return own
