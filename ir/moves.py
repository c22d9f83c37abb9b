"""Checks of the ops that only move data: every conversion changes exactly what its kind says."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from stepgraph.ir.faults import Fault, op_fault, shown
from stepgraph.ir.graph import Graph
from stepgraph.ir.nests import Problem, moves_data
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.table import CONVERSIONS
from stepgraph.ir.tensor import Kind, Placement

INNER = "inner"
"""Role of the collectives that an op with a split inner letter pays: they act on a partial result inside the op."""


EXPECTED = MappingProxyType(
    {
        "slice": "replicated to split",
        "reduce_scatter": "pending to split",
        "all_reduce": "pending to replicated",
        "all_to_all": "split to split elsewhere",
        "all_gather": "split to replicated",
    }
)
"""What each conversion does on an axis of its group."""


def conversions_convert(graph: Graph) -> Iterator[Fault]:
    """group: what moves data names axes, each once. at: it splits no letter.

    conversion: on every axis of the group the placement changes as the kind says, and nothing else changes.
    param-moved: in forward and backward no parameter is converted; its home axes act in the step.
    """
    for i, op in enumerate(graph.ops):
        if moves_data(op):
            yield from (op_fault(graph, i, code, what) for code, what in _problems(graph, op))


def _problems(graph: Graph, op: Op) -> Iterator[Problem]:
    names = [axis.name for axis in op.group]
    if not names or len(set(names)) != len(names):
        yield "group", f"has the group {op.group_name or 'none'}, expected one or more axes, each once"
        return
    if op.at:
        yield "at", f"splits {dict(op.at)}, expected no letter: the op computes nothing"
    if op.kind not in CONVERSIONS:
        return
    yield from _change_problems(graph, op)
    if op.inputs[0].kind is Kind.PARAM and op.phase is not Phase.STEP:
        yield "param-moved", f"converts the parameter {shown(op.inputs[0])}, expected it to stay where it lives"


def _change_problems(graph: Graph, op: Op) -> Iterator[Problem]:
    before, after = op.inputs[0], op.outputs[0]
    if (before.dims, before.shape, before.dtype) != (after.dims, after.shape, after.dtype):
        yield "conversion", f"turns {shown(before)} into {shown(after)}, expected the same letters, sizes and type"
        return
    inner = _role(graph, op) == INNER
    axes = {p.axis.name: p.axis for p in (*before.place, *after.place)} | {axis.name: axis for axis in op.group}
    group = {axis.name for axis in op.group}
    for axis in axes.values():
        old, new = before.on(axis), after.on(axis)
        if axis.name in group and not _is_right(op.kind, old, new, inner):
            expected = "replicated to replicated" if inner else EXPECTED[op.kind]
            what = f"{axis.name} {_state(old)} to {_state(new)}, expected {expected}"
            yield "conversion", f"turns {shown(before)} into {shown(after)}: {what}"
        if axis.name not in group and old != new:
            yield "conversion", f"turns {shown(before)} into {shown(after)}, expected {axis.name} as it was"


def _is_right(kind: str, old: Placement | None, new: Placement | None, inner: bool) -> bool:
    if inner:
        return kind == "all_reduce" and old is None and new is None
    change = f"{_state(old)} to {_state(new)}"
    if kind == "all_to_all":
        return change == "split to split" and old != new
    return change == EXPECTED[kind]


def _state(placement: Placement | None) -> str:
    if placement is None:
        return "replicated"
    return "pending" if placement.dim is None else "split"


def _role(graph: Graph, op: Op) -> str:
    """The op's role; of a recomputed copy, that of its original."""
    original = graph.by_name.get(op.of)
    return original.role if op.role == "recompute" and original else op.role
