"""Graphs: a tuple of ops in program order, and what can be asked of it.

A graph is a value. Passes return new graphs, results of analyses live beside them, and the position of an op is the
index of every array. Program order is a topological order; the verifier says so when it is not.
"""

from __future__ import annotations

from functools import cached_property
from types import MappingProxyType

import attrs

from stepgraph.errors import did_you_mean
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.tensor import Axis, Kind, Tensor


@attrs.frozen
class Ports:
    """How a template meets its neighbours, by tensor name; empty where it has no such neighbour.

    enters, leaves: the residual stream. grad_enters: the gradient of `leaves`; grad_leaves: that of `enters`.
    """

    enters: str = ""
    leaves: str = ""
    grad_enters: str = ""
    grad_leaves: str = ""


@attrs.frozen
class Group:
    """A fused kernel: ops that run as one. They stay in the graph, so what no longer crosses memory can be derived.

    name: unique among the graph's groups; rule: which fusion rule made it; members: op names in program order;
    kernels: launches; efficiency: part of the reachable HBM rate that the kernel gets.
    """

    name: str
    rule: str
    members: tuple[str, ...]
    kernels: int = 1
    efficiency: float = 1.0


@attrs.frozen
class Graph:
    """Ops in program order, forward before backward before step.

    outputs: tensors that somebody outside reads (the stream, its gradient, parameter gradients, new state).
    facts: which lowering steps have run ("placed", "backward", "recompute"). groups: fused kernels, disjoint.
    """

    name: str
    ops: tuple[Op, ...]
    outputs: tuple[Tensor, ...] = ()
    ports: Ports = Ports()
    facts: frozenset[str] = frozenset()
    groups: tuple[Group, ...] = ()

    @cached_property
    def by_name(self) -> MappingProxyType[str, Op]:
        """Ops by name."""
        return MappingProxyType({op.name: op for op in self.ops})

    def __getitem__(self, name: str) -> Op:
        """The op of that name. Raises: KeyError with a suggestion."""
        op = self.by_name.get(name)
        if op is None:
            raise KeyError(f"no op {name!r} in graph {self.name!r}; {did_you_mean(name, self.by_name)}")
        return op

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Kinds of the ops that it has."""
        return frozenset(op.kind for op in self.ops)

    @cached_property
    def producers(self) -> MappingProxyType[str, Op]:
        """The op that makes each tensor, by tensor name; tensors that enter the graph are absent."""
        return MappingProxyType({t.name: op for op in self.ops for t in op.outputs})

    @cached_property
    def readers(self) -> MappingProxyType[str, tuple[Op, ...]]:
        """The ops that read each tensor, in program order, by tensor name."""
        found: dict[str, list[Op]] = {}
        for op in self.ops:
            for name in dict.fromkeys(t.name for t in op.inputs):
                found.setdefault(name, []).append(op)
        return MappingProxyType({name: tuple(ops) for name, ops in found.items()})

    def producer(self, tensor: Tensor) -> Op | None:
        """The op that makes the tensor, or None when it enters the graph."""
        return self.producers.get(tensor.name)

    def users(self, tensor: Tensor) -> tuple[Op, ...]:
        """The ops that read the tensor."""
        return self.readers.get(tensor.name, ())

    def backward_of(self, name: str) -> tuple[Op, ...]:
        """Backward ops that belong to the forward op of that name."""
        return tuple(op for op in self.ops if op.of == name)

    def phase(self, phase: Phase) -> tuple[Op, ...]:
        """Ops of one phase, in program order."""
        return tuple(op for op in self.ops if op.phase is phase)

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """Tensors that are read and not made here, in order of first use."""
        read = {t.name: t for op in self.ops for t in op.inputs}
        return tuple(t for name, t in read.items() if name not in self.producers)

    @cached_property
    def params(self) -> tuple[Tensor, ...]:
        """Parameters that the graph reads, in order of first use."""
        return tuple(t for t in self.inputs if t.kind is Kind.PARAM)

    @cached_property
    def saved(self) -> tuple[Tensor, ...]:
        """Activations kept for backward: there in forward, read in backward. Derived, so it cannot rot."""
        backward = {t.name for op in self.phase(Phase.BACKWARD) for t in op.inputs}
        forward = {t.name: t for op in self.phase(Phase.FORWARD) for t in (*op.inputs, *op.outputs)}
        return tuple(t for name, t in forward.items() if name in backward and t.kind is Kind.ACT)

    @cached_property
    def output_names(self) -> frozenset[str]:
        """Names of the tensors that somebody outside reads."""
        return frozenset(t.name for t in self.outputs)

    @cached_property
    def group_of(self) -> MappingProxyType[str, Group]:
        """The fused kernel of each op that is in one, by op name."""
        return MappingProxyType({name: group for group in self.groups for name in group.members})

    @cached_property
    def positions(self) -> MappingProxyType[str, int]:
        """Position of each op by name."""
        return MappingProxyType({op.name: i for i, op in enumerate(self.ops)})

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """Mesh axes that appear in the graph, outermost first."""
        placed = {p.axis.name: p.axis for op in self.ops for t in (*op.inputs, *op.outputs) for p in t.place}
        grouped = {axis.name: axis for op in self.ops for axis in op.group}
        return tuple(sorted({**placed, **grouped}.values(), key=lambda axis: -axis.stride))


SHARED_PREFIX = "embedding."
"""Parameters of the input tables keep one name wherever they are read: a tied head reads the same table."""


def param_identity(graph: Graph, param: Tensor) -> str:
    """Which parameter of the model this is: templates share input tables by name, everything else is their own."""
    return param.name if param.name.startswith(SHARED_PREFIX) else f"{graph.name}.{param.name}"
