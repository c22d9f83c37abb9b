"""Finding a pattern in a graph, from its result backwards, and saying how near a miss was."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from itertools import permutations
from types import MappingProxyType

import attrs

from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op
from stepgraph.ir.rows import Rule
from stepgraph.ir.table import CONVERSIONS, row_of
from stepgraph.ir.tensor import Tensor
from stepgraph.passes.fusing.findings import Bound, Found, Gap, Miss, behind, kinds_handed_over
from stepgraph.passes.fusing.pattern import FusionRule
from stepgraph.passes.fusing.recorder import Node, Var

NOWHERE: Mapping[str, frozenset[str]] = MappingProxyType({})

MOST_ATTEMPTS = 20_000
"""Bindings that are tried from one op; symmetric patterns with many results could go on for ever."""


class Matcher:
    """Matches one rule against one graph. Keeps the nearest miss of the last attempt.

    handed_over: kinds whose results go to the next stage, so that a match cut by a stage boundary is known as one.
    beyond: for tensors that enter the graph, kinds that make them in the layers before it. taken: ops that are in
    kernels already; whoever makes kernels while matching goes on may change it.
    """

    def __init__(
        self,
        graph: Graph,
        rule: FusionRule,
        handed_over: frozenset[str] | None = None,
        beyond: Mapping[str, frozenset[str]] = NOWHERE,
        taken: Container[str] = (),
    ) -> None:
        self.graph = graph
        self.rule = rule
        self.handed_over = kinds_handed_over([graph]) if handed_over is None else handed_over
        self.beyond = beyond
        self.taken = taken
        self.miss = Miss(-1, "", "")
        self._free_only = False
        self._over_gaps = False
        self._attempts = 0
        self._met: set[str] = set()  # what stopped the attempt: "taken" ops, possible "gaps"

    def candidates(self) -> Iterator[Op]:
        """Ops that could be the pattern's first result, in program order."""
        there = self.graph.kinds
        if any(root.kinds.isdisjoint(there) for root in self.rule.roots):
            return iter(())
        kinds = self.rule.roots[0].kinds
        return (op for op in self.graph.ops if op.kind in kinds)

    def at(self, op: Op) -> Found | None:
        """The first match with its first result made by `op`, or None; then `miss` says why."""
        return next(self.every(op), None)

    def every(self, op: Op) -> Iterator[Found]:
        """Matches with their first result made by `op`, those of free ops first.

        Where there is none: those of ops that are taken; failing these, those that a gap keeps apart. Each is tried only
        where such an op or gap was met.
        """
        self.miss = Miss(-1, op.name, "")
        self._met = set()
        self._attempts = 0
        for obstacle, free_only, over_gaps in (("", True, False), ("taken", False, False), ("gap", False, True)):
            if obstacle and obstacle not in self._met:
                continue
            none = True
            for found in self._matches(op, free_only, over_gaps):
                none = False
                yield found
            if not none:
                return

    def _matches(self, op: Op, free_only: bool, over_gaps: bool) -> Iterator[Found]:
        self._free_only, self._over_gaps = free_only, over_gaps
        for bound in self._node(self.rule.roots[0], op, Bound({}, {})):
            yield from map(self._found, self._other_roots(bound, 1))

    def _found(self, bound: Bound) -> Found:
        position = self.graph.positions
        members = sorted(bound.present, key=lambda op: position[op.name])
        return Found(tuple(members), bound.tensors, bound.gaps)

    def _other_roots(self, bound: Bound, index: int) -> Iterator[Bound]:
        """Further results are found by climbing from what is bound already, never by trying all ops."""
        if index == len(self.rule.roots):
            yield bound
            return
        root = self.rule.roots[index]
        if bound.ops.get(id(root)) is not None:  # it is inside what leads to an earlier result
            yield from self._other_roots(bound, index + 1)
            return
        for op in self._neighbours(bound, _depth(root)):
            for further in self._node(root, op, bound):
                yield from self._other_roots(further, index + 1)

    def _neighbours(self, bound: Bound, depth: int) -> list[Op]:
        """Ops that are at most `depth` readers away from what is bound, or from what is made beside it."""
        made = [t for op in bound.present for t in op.outputs]
        makers = {op.name: op for t in bound.tensors.values() if (op := self.graph.producer(t)) is not None}
        beside = [t for op in makers.values() for t in op.outputs]
        found: dict[str, Op] = {}
        tensors = [*bound.tensors.values(), *beside, *made]
        for _ in range(depth):
            new = {op.name: op for t in tensors for op in self.graph.users(t) if op.name not in found}
            found |= new
            tensors = [t for op in new.values() for t in op.outputs]
        return sorted(found.values(), key=lambda op: self.graph.positions[op.name])

    def _node(self, node: Node, op: Op, bound: Bound) -> Iterator[Bound]:
        """Bind a node to an op and its operands to the op's, in any order where the kind is commutative."""
        if id(node) in bound.ops:
            if bound.ops[id(node)] is op:
                yield bound
            return
        self._attempts += 1
        if self._attempts > MOST_ATTEMPTS or not self._fits(node, op, bound):
            return
        started = Bound(bound.tensors, {**bound.ops, id(node): op}, bound.gaps)
        for operands in _orders(op, len(node.args)):
            yield from self._operands(op, node.args, operands, started)

    def _fits(self, node: Node, op: Op, bound: Bound) -> bool:
        if op.kind not in node.kinds:
            return self._missed(bound, op, f"is {op.kind}, expected {node}")
        if len(node.args) > len(op.inputs):
            return self._missed(bound, op, f"has {len(op.inputs)} operands, the pattern gives {node} {len(node.args)}")
        for name, value in node.attrs:
            if op.attr(name) != value:
                return self._missed(bound, op, f"has {name} = {op.attr(name)!r}, expected {value!r}")
        if self._free_only and op.name in self.taken:
            self._met.add("taken")
            return False
        if any(op is other for other in bound.ops.values()):
            return self._missed(bound, op, f"stands for another part of the pattern already, expected one more {node}")
        return True

    def _missed(self, bound: Bound, op: Op, reason: str) -> bool:
        if bound.depth > self.miss.depth and not self._over_gaps:
            self.miss = Miss(bound.depth, op.name, reason)
        return False

    def _operands(
        self, reader: Op, args: tuple[Var | Node, ...], tensors: tuple[Tensor, ...], bound: Bound
    ) -> Iterator[Bound]:
        if not args:
            yield bound
            return
        for further in self._operand(reader, args[0], tensors[0], bound):
            yield from self._operands(reader, args[1:], tensors[1:], further)

    def _operand(self, reader: Op, arg: Var | Node, tensor: Tensor, bound: Bound) -> Iterator[Bound]:
        if isinstance(arg, Node):
            yield from self._produced(reader, arg, tensor, bound)
            return
        known = bound.tensors.get(arg.name)
        if known is None:
            yield Bound({**bound.tensors, arg.name: tensor}, bound.ops, bound.gaps)
        elif known.name == tensor.name:
            yield bound
        else:
            self._missed(bound, reader, f"reads %{tensor.name}, expected %{known.name}, which {arg.name!r} is already")

    def _produced(self, reader: Op, node: Node, tensor: Tensor, bound: Bound) -> Iterator[Bound]:
        """The op that makes the tensor has to be the node's, and the tensor its first result."""
        producer = self.graph.producer(tensor)
        if producer is not None and producer.kind in node.kinds and producer.outputs[0].name == tensor.name:
            yield from self._node(node, producer, bound)
        elif self._over_gaps:
            yield from self._across(reader, node, producer, tensor, bound)
        elif not node.optional:
            self._explain(reader, node, producer, tensor, bound)
        if not self._over_gaps and (producer is None or producer.kind in CONVERSIONS or _is_handed_over(producer)):
            self._met.add("gap")
        if node.optional and bound.ops.get(id(node)) is None:
            absent = Bound(bound.tensors, {**bound.ops, id(node): None}, bound.gaps)
            yield from self._operand(reader, node.args[0], tensor, absent)

    def _across(self, reader: Op, node: Node, producer: Op | None, tensor: Tensor, bound: Bound) -> Iterator[Bound]:
        """The match as it would be without what keeps its parts apart."""
        if producer is None:
            if node.kinds & self.beyond.get(tensor.name, frozenset()):
                text = f"reads %{tensor.name}, which the layer before both makes: expected {node}"
                yield _with_gap(bound, node, Gap("scope", reader.name, text))
            return
        if _is_handed_over(producer) and node.kinds & self.handed_over:
            text = f"reads %{tensor.name}, which another stage sends: expected {node}"
            yield _with_gap(bound, node, Gap("stage", reader.name, text))
            return
        source = behind(self.graph, producer)
        if source is not None and source is not producer and source.kind in node.kinds:
            gap = Gap("collective", producer.name, f"({producer.kind}) lies between {source.name} and {reader.name}")
            yield from self._node(node, source, attrs.evolve(bound, gaps=(*bound.gaps, gap)))

    def _explain(self, reader: Op, node: Node, producer: Op | None, tensor: Tensor, bound: Bound) -> None:
        if producer is None:
            self._missed(bound, reader, f"reads %{tensor.name}, which enters the graph, expected {node}")
            return
        made = f"made by {producer.name} ({producer.kind})"
        if producer.kind in node.kinds:
            made = f"which is not the first result of {producer.name}"
        self._missed(bound, reader, f"reads %{tensor.name}, {made}, expected {node}")


def _is_handed_over(producer: Op) -> bool:
    """Whether what an op yields was made on another stage."""
    return row_of(producer.kind).rule is Rule.POINT_TO_POINT


def _with_gap(bound: Bound, node: Node, gap: Gap) -> Bound:
    return attrs.evolve(bound, ops={**bound.ops, id(node): None}, gaps=(*bound.gaps, gap))


def _orders(op: Op, count: int) -> Iterator[tuple[Tensor, ...]]:
    """The operands that a node's stand for: the first ones, or any of them where their order says nothing."""
    if not row_of(op.kind).commutative:
        yield op.inputs[:count]
        return
    orders = {tuple(t.name for t in chosen): chosen for chosen in permutations(op.inputs, count)}
    yield from orders.values()


def _depth(node: Node) -> int:
    """Ops on the longest way from what enters to a node's result."""
    return 1 + max((_depth(arg) for arg in node.args if isinstance(arg, Node)), default=0)
