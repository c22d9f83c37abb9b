"""Writing a block: logical forward ops, one call per line, with no parallelism in sight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from stepgraph.ir.graph import Graph, Ports
from stepgraph.ir.op import Attr, Op
from stepgraph.ir.tensor import Kind, Tensor

PIN = "pin"
"""Pseudo-kind: what a block says about placement. `to`: "stream" (the tensor joins the residual stream here and is
placed like it) or "experts" (tokens go to the ranks of their experts). Placement resolves it."""


SHARED_PARAMS = ("embedding.weight", "embedding.positions.weight", "head.weight", "head.bias")
"""Tables that several blocks of a model read under one name."""


class Builder:
    """Collects the ops of one template. Lives for one lowering; blocks write to it.

    Sizes of letters are learnt from operands, so a call names letters and never repeats sizes.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.ops: list[Op] = []

    def param(self, name: str, dims: str, shape: tuple[int, ...]) -> Tensor:
        """A parameter."""
        return Tensor(name, dims, shape, self.dtype, Kind.PARAM)

    def tokens(self, name: str, batch: int, sequence: int) -> Tensor:
        """Token ids or labels, [b s]."""
        return Tensor(name, "bs", (batch, sequence), "int64", Kind.INPUT)

    def stream(self, name: str, batch: int, sequence: int, hidden: int) -> Tensor:
        """The residual stream as it enters a template, [b s d]."""
        return Tensor(name, "bsd", (batch, sequence, hidden), self.dtype)

    def op(self, kind: str, name: str, *inputs: Tensor, out: str, **attributes: Attr) -> Tensor:
        """Emit an op with one result, whose letters are `out`."""
        return self.many(kind, name, *inputs, outs=[self.like(name, out, inputs)], **attributes)[0]

    def many(
        self, kind: str, name: str, *inputs: Tensor, outs: Sequence[Tensor], **attributes: Attr
    ) -> tuple[Tensor, ...]:
        """Emit an op with the given results."""
        module = name.split(".")[0]
        pairs = tuple(sorted(attributes.items()))
        self.ops.append(Op(name, kind, inputs, tuple(outs), pairs, module=module, origin="block"))
        return tuple(outs)

    def like(self, name: str, dims: str, inputs: Sequence[Tensor], dtype: str = "") -> Tensor:
        """A result whose letters have the sizes that they have in the operands; the first operand counts.

        Results that keep the expert letter keep the operands' fraction.
        """
        sizes = {letter: size for t in reversed(inputs) for letter, size in zip(t.dims, t.shape, strict=True)}
        routed = next((t.fraction for t in inputs if t.fraction != (1, 1)), (1, 1)) if dims.startswith("E") else (1, 1)
        shape = tuple(sizes[letter] for letter in dims)
        return Tensor(name, dims, shape, dtype or self.dtype, fraction=routed)

    def pin(self, tensor: Tensor, to: str = "stream", name: str = "") -> Tensor:
        """Say that the tensor joins the residual stream here, or goes to its experts."""
        pinned = attrs.evolve(tensor, name=name or f"{tensor.name}.pinned")
        self.many(PIN, pinned.name, tensor, outs=[pinned], to=to)
        return pinned

    def absorb(self, other: Builder, prefix: str, entering: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take over another builder's ops under a prefix; returns its tensors by their old names.

        entering: what the other block's entering tensors are here. Input tables, tokens and the head's table keep
        their names, since both blocks read the same ones.
        """
        known = dict(entering)

        def renamed(t: Tensor) -> Tensor:
            if t.name not in known:
                shared = t.kind is Kind.INPUT or t.name in SHARED_PARAMS
                known[t.name] = t if shared else attrs.evolve(t, name=prefix + t.name)
            return known[t.name]

        for op in other.ops:
            inputs, outputs = tuple(map(renamed, op.inputs)), tuple(map(renamed, op.outputs))
            self.ops.append(attrs.evolve(op, name=prefix + op.name, inputs=inputs, outputs=outputs))
        return known

    def graph(self, name: str, enters: Tensor | None, leaves: Tensor | None) -> Graph:
        """The logical graph: what enters, what leaves."""
        ports = Ports(enters.name if enters else "", leaves.name if leaves else "")
        return Graph(name, tuple(self.ops), (leaves,) if leaves else (), ports)
