"""Rewrites: changes of what a graph computes with, made while a model is lowered, and the tools to write them.

A rewrite is any function from a graph to a graph that computes the same. It acts before autograd, so the backward pass
of what it leaves follows from the op table; a fusion, by contrast, changes no op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from stepgraph.errors import refuse
from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Attr, Op
from stepgraph.ir.tensor import Kind, Tensor

LOGICAL = "logical"
PLACED = "placed"
TIMES = (LOGICAL, PLACED)
"""When a rewrite acts: on logical forward ops, or once they are placed and have their collectives."""

INHERITED = ("family",)
"""Attributes that the ops which replace another take over from it."""


def _known_time(record: object, field: object, value: str) -> None:
    if value not in TIMES:
        raise refuse("rewrite-at", "Rewrite.at", f"a rewrite at {value!r}", " or ".join(TIMES), "choose one of them")


@attrs.frozen
class Rewrite:
    """A named change of the graphs that lowering makes.

    name: says who made an op (its `origin`). at: "logical" (blocks' forward ops, no parallelism in sight) or "placed"
    (with placements and collectives, still forward only). apply: Graph -> Graph, the same object where nothing changed;
    it sees one template after the other, and those of the step, which have one form only, last.

    Raises: InputError (rewrite-at) for another time.
    """

    name: str
    at: str = attrs.field(validator=_known_time)
    apply: Callable[[Graph], Graph]


class Parts:
    """Collects the ops that replace one op. Lives for one replacement.

    Every new op takes over phase, module, splits and family of the old one; its `origin` is the rewrite's name. New
    tensors are named after the old op: `attn.norm.square`. The old op's results keep their names: emit them as they are.
    """

    def __init__(self, old: Op, origin: str) -> None:
        self.old = old
        self.origin = origin
        self.ops: list[Op] = []

    def like(self, tensor: Tensor, part: str, **changes: Any) -> Tensor:
        """A new value that differs from `tensor` in name, and in what `changes` says (dtype, dims, shape)."""
        return attrs.evolve(tensor, **{"name": f"{self.old.name}.{part}", "kind": Kind.ACT, **changes})

    def emit(self, kind: str, out: Tensor, *inputs: Tensor, name: str = "", **attributes: Attr) -> Tensor:
        """Append an op with one result."""
        return self.many(kind, (out,), *inputs, name=name, **attributes)[0]

    def many(
        self, kind: str, outs: Sequence[Tensor], *inputs: Tensor, name: str = "", **attributes: Attr
    ) -> tuple[Tensor, ...]:
        """Append an op with some results. name: the first result's, unless given."""
        kept = {key: value for key, value in self.old.attrs if key in INHERITED}
        pairs = tuple(sorted({**kept, **attributes}.items()))
        new = attrs.evolve(self.old, name=name or outs[0].name, kind=kind, inputs=inputs, outputs=tuple(outs))
        self.ops.append(attrs.evolve(new, attrs=pairs, origin=self.origin))
        return tuple(outs)


def replace_ops(graph: Graph, made: Mapping[str, Sequence[Op]]) -> Graph:
    """The graph with some ops replaced, each by several or by none; the same object when `made` is empty.

    made: new ops by the name of the op in whose place they stand. Everything else stays as it is, in its order.

    Raises: ValueError when a name is not an op's, or is one in a fused kernel: rewrites come before fusion.
    """
    if not made:
        return graph
    unknown = sorted(made.keys() - graph.by_name.keys())
    fused = sorted(name for name in made if name in graph.group_of)
    if unknown or fused:
        raise ValueError(f"graph {graph.name!r}: {unknown} are no ops of it, {fused} are in fused kernels")
    ops = [new for op in graph.ops for new in made.get(op.name, (op,))]
    return attrs.evolve(graph, ops=tuple(ops))


def expand(graph: Graph, origin: str, how: Mapping[str, Callable[[Op, Parts], None]]) -> Graph:
    """The graph with every op of some kinds replaced by what `how` emits for it.

    how: by kind, a function that writes the new ops into the given parts; one that emits nothing leaves the op alone.
    """
    made: dict[str, Sequence[Op]] = {}
    for op in graph.ops:
        if op.kind not in how:
            continue
        parts = Parts(op, origin)
        how[op.kind](op, parts)
        if parts.ops:
            made[op.name] = tuple(parts.ops)
    return replace_ops(graph, made)
