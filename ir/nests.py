"""Checks of one op against its row: operands, letters, sizes, and the placements that follow from its letters.

Placements are computed again by the one rule from (loop nest, at) and compared; nothing that made the graph is trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepgraph.ir.faults import Fault, op_fault, shown
from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op
from stepgraph.ir.placement import PENDING, operand_place, result_place
from stepgraph.ir.rows import Row, Rule, spec_of
from stepgraph.ir.table import CONVERSIONS, row_of
from stepgraph.ir.tensor import Axis, Place, Tensor, describe

GROUPED = "h"
"""Letters of fixed loop nests whose size may differ between operands: grouped queries have fewer key heads."""

Problem = tuple[str, str]
"""Code and message."""


def operands_fit(graph: Graph) -> Iterator[Fault]:
    """arity: as many operands and results as the row says.

    letters: as many dimensions per tensor as the loop nest has letters, and no result letter from nowhere.
    sizes: a letter has one size in all tensors of an op.
    """
    for i, op in enumerate(graph.ops):
        row = row_of(op.kind)
        for check in (_arity, _letters, _sizes):
            problems = list(check(op, row))
            yield from (op_fault(graph, i, code, what) for code, what in problems)
            if problems:
                break


def _arity(op: Op, row: Row) -> Iterator[Problem]:
    found = len(op.inputs), len(op.outputs)
    least, exact = _counts(op, row)
    if found != least if exact else (found[0] < least[0] or found[1] < least[1]):
        word = "" if exact else "at least "
        what = f"{found[0]} operands and {found[1]} results, expected {word}{least[0]} and {least[1]}"
        yield "arity", what


def _counts(op: Op, row: Row) -> tuple[tuple[int, int], bool]:
    """Operands and results that the row speaks of, and whether there may be no others."""
    if row.rule is Rule.POINT_TO_POINT:
        return ((1, 0) if op.kind == "send" else (0, 1)), True
    if op.kind in CONVERSIONS:
        return (1, 1), True
    if row.spec:
        reads, writes = spec_of(op, row)
        return (len(reads), len(writes)), True
    refs = [ref for grad in row.grads for ref in grad.reads]
    operands = [*row.passes, *(i for grad in row.grads for i in grad.of), *_indices(refs, "x")]
    return (1 + max(operands, default=0), 1 + max(_indices(refs, "y"), default=0)), False


def _indices(refs: Sequence[str], prefix: str) -> list[int]:
    return [int(ref[1:]) for ref in refs if ref.startswith(prefix)]


def _letters(op: Op, row: Row) -> Iterator[Problem]:
    reads, writes = spec_of(op, row)
    for letters, tensor in zip(reads + writes, op.inputs + op.outputs, strict=False):
        if len(letters) != len(tensor.dims):
            yield "letters", f"{shown(tensor)}, expected {len(letters)} letters as in the loop nest {letters!r}"
    known = {letter for letters in reads for letter in letters}
    if row.spec or row.spreads or not reads:
        return
    for letters, tensor in zip(writes, op.outputs, strict=True):
        if not known.issuperset(letters):
            yield (
                "letters",
                f"{shown(tensor)} has a letter of no operand, expected letters out of {''.join(sorted(known))}",
            )


def _sizes(op: Op, row: Row) -> Iterator[Problem]:
    reads, writes = spec_of(op, row)
    free = GROUPED if row.spec else ""
    known: dict[str, tuple[int, str]] = {}
    for letters, tensor in zip(reads + writes, op.inputs + op.outputs, strict=False):
        for letter, size in zip(letters, tensor.shape, strict=False):
            first, where = known.setdefault(letter, (size, tensor.name))
            if size != first and letter not in free:
                yield "sizes", f"{letter} = {size} in %{tensor.name}, expected {first} as in %{where}"


def placements_follow(graph: Graph) -> Iterator[Fault]:
    """Placements are what the one rule makes of the letters that the axes split.

    group: only collectives, point-to-point ops and slices have one. at: an axis that exists splits one letter of the op.
    whole: it splits none that must stay whole. pending: a pending sum is read by linear ops (and conversions) only.
    operand-place, result-place: the rule.
    """
    if "placed" not in graph.facts:
        return
    axes = {axis.name: axis for axis in graph.axes}  # outermost first, as placements are
    for i, op in enumerate(graph.ops):
        if not moves_data(op):
            yield from (op_fault(graph, i, code, what) for code, what in _place_problems(op, axes))


def moves_data(op: Op) -> bool:
    """Whether the op only moves a tensor between ranks: a conversion or a hop between stages."""
    return op.kind in CONVERSIONS or row_of(op.kind).rule is Rule.POINT_TO_POINT


def _place_problems(op: Op, axes: dict[str, Axis]) -> list[Problem]:
    """The first rule that the op breaks; those behind it would only repeat it."""
    row = row_of(op.kind)
    for check in (_group, _at, _whole, _pending, _operands, _results):
        problems = list(check(op, row, axes))
        if problems:
            return problems
    return []


def _group(op: Op, row: Row, axes: dict[str, Axis]) -> Iterator[Problem]:
    if op.group:
        yield "group", f"has the group {op.group_name}, expected none: the op computes"


def _at(op: Op, row: Row, axes: dict[str, Axis]) -> Iterator[Problem]:
    reads, writes = spec_of(op, row)
    letters = {letter for group in reads + writes for letter in group} | ({PENDING} if row.linear else set())
    if len(dict(op.at)) != len(op.at):
        yield "at", f"an axis is named twice in {dict(op.at)}, expected one letter per axis"
    for axis, letter in op.at:
        if axis not in axes:
            yield "at", f"the axis {axis!r} splits nothing in the graph, expected one of {', '.join(axes) or 'none'}"
        if letter not in letters:
            yield "at", f"{axis} splits {letter!r}, expected one of {''.join(sorted(letters))}"


def _whole(op: Op, row: Row, axes: dict[str, Axis]) -> Iterator[Problem]:
    for axis, letter in op.at:
        if letter in row.whole:
            yield "whole", f"{axis} splits {letter}, expected it whole on every rank"


def _pending(op: Op, row: Row, axes: dict[str, Axis]) -> Iterator[Problem]:
    for t in () if row.linear else op.inputs:
        if any(p.dim is None for p in t.place):
            yield "pending", f"reads {shown(t)}, expected a finished sum: the kind is not linear"


def _operands(op: Op, row: Row, axes: dict[str, Axis]) -> Iterator[Problem]:
    for letters, t in zip(spec_of(op, row)[0], op.inputs, strict=False):
        yield from _compared(op, "operand-place", t, operand_place(letters, dict(op.at), tuple(axes.values())))


def _results(op: Op, row: Row, axes: dict[str, Axis]) -> Iterator[Problem]:
    for letters, t in zip(spec_of(op, row)[1], op.outputs, strict=False):
        place = result_place(letters, dict(op.at), tuple(axes.values()), row.inner)
        yield from _compared(op, "result-place", t, place)


def _compared(op: Op, code: str, tensor: Tensor, place: Place) -> Iterator[Problem]:
    if tensor.place != place:
        wanted = Tensor("", tensor.dims, tensor.shape, place=place)
        splits = " ".join(f"{axis}:{letter}" for axis, letter in op.at) or "nothing split"
        yield code, f"{shown(tensor)}, expected {describe(wanted)} at {splits}"
