"""The HBM traffic of a fused kernel, by subtraction from its members'.

Nobody types the cost of a fusion. A kernel moves what its members move, minus one read for each internal edge, minus
one read for each further member that reads the same outer tensor (never more than the profile counted), minus one
write for each internal tensor that nobody outside reads; of one whose views are read outside, those are still written.
So a kernel of one op changes nothing, and norm after residual add saves exactly one pass, in either profile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from stepgraph.ir.graph import Graph, Group
from stepgraph.ir.op import Op
from stepgraph.ir.table import row_of
from stepgraph.ir.tensor import Tensor
from stepgraph.passes.profiles import Profile, kernels_of, operand_bytes, passes_of, pieces_of


@attrs.frozen
class Saving:
    """One pass that a kernel no longer makes: over which tensor, and why. Units: bytes on one rank."""

    tensor: str
    why: str  # "read inside", "read once for all", "never written"
    op: str
    bytes: int


def savings(graph: Graph, group: Group, profile: Profile) -> tuple[Saving, ...]:
    """What the kernel stopped reading and writing, tensor by tensor."""
    members = [graph.by_name[name] for name in group.members]
    made = _made_inside(members)
    return (
        *_inner_reads(members, made, profile),
        *_shared_reads(members, made, profile),
        *_writes(graph, members, profile),
    )


def group_bytes(graph: Graph, group: Group, profile: Profile) -> int:
    """HBM bytes of the kernel: its members' minus the savings."""
    members = (graph.by_name[name] for name in group.members)
    return sum(operand_bytes(op, profile[op.kind]) for op in members) - sum(
        saving.bytes for saving in savings(graph, group, profile)
    )


def _made_inside(members: Sequence[Op]) -> dict[str, float]:
    """Which part of each member's results is made inside, by tensor name.

    A view makes nothing: of its result so much is inside as of what it looks at, by bytes.
    """
    made: dict[str, float] = {}
    for op in members:
        part = 1.0
        if row_of(op.kind).is_view:
            whole = sum(t.nbytes for t in op.inputs)
            part = sum(made.get(t.name, 0.0) * t.nbytes for t in op.inputs) / whole if whole else 0.0
        made |= {t.name: part for t in op.outputs}
    return made


def _reads(op: Op, profile: Profile) -> Iterator[tuple[Tensor, float]]:
    """Each operand of an op with its passes, at most one: a fused kernel saves one read, not two sweeps."""
    row = profile[op.kind]
    return ((t, min(1.0, passes)) for t, passes in zip(op.inputs, passes_of(row.reads, op.inputs), strict=True))


def _inner_reads(members: Sequence[Op], made: Mapping[str, float], profile: Profile) -> Iterator[Saving]:
    for op in members:
        for tensor, passes in _reads(op, profile):
            saved = int(passes * tensor.nbytes * made.get(tensor.name, 0.0))
            if saved:
                yield Saving(tensor.name, "read inside", op.name, saved)


def _shared_reads(members: Sequence[Op], made: Mapping[str, float], profile: Profile) -> Iterator[Saving]:
    """One member reads an outer tensor for all; the one that reads most of it is kept."""
    readers: dict[str, dict[str, tuple[Tensor, float]]] = {}
    for op in members:
        for tensor, passes in _reads(op, profile):
            if made.get(tensor.name, 0.0) < 1 and passes:
                readers.setdefault(tensor.name, {})[op.name] = (tensor, passes)
    for name, found in readers.items():
        kept = max(found, key=lambda reader: found[reader][1])
        for reader, (tensor, passes) in found.items():
            if reader != kept:
                yield Saving(name, "read once for all", reader, int(passes * tensor.nbytes * (1 - made.get(name, 0.0))))


def _writes(graph: Graph, members: Sequence[Op], profile: Profile) -> Iterator[Saving]:
    names = {op.name for op in members}
    inside = {t.name for op in members for t in op.inputs}
    for op in members:
        for tensor, passes in zip(op.outputs, passes_of(profile[op.kind].writes, op.outputs), strict=True):
            if tensor.name not in inside or not passes:
                continue
            kept = sum(seen.nbytes for seen in _seen_outside(graph, tensor, names))
            saved = int(min(1.0, passes) * max(0, tensor.nbytes - kept))
            if saved:
                yield Saving(tensor.name, "never written", op.name, saved)


def _seen_outside(graph: Graph, tensor: Tensor, members: set[str]) -> Iterator[Tensor]:
    """What somebody outside reads of a tensor: all of it, or the views that members make of it and hand out."""
    readers = graph.users(tensor)
    if tensor.name in graph.output_names or any(op.name not in members for op in readers):
        yield tensor
        return
    for op in readers:
        for view in op.outputs if row_of(op.kind).is_view else ():
            yield from _seen_outside(graph, view, members)


def launches(graph: Graph, group: Group, profile: Profile) -> int:
    """Launches of a kernel: the rule's, per piece that a member is cut into (an expert, a chunk of parameters).

    Never more than its members had; an op by itself stays as it was.
    """
    ops = [graph.by_name[name] for name in group.members]
    before = sum(kernels_of(op, profile[op.kind]) for op in ops)
    pieces = max(pieces_of(op, profile[op.kind]) for op in ops)
    return before if len(ops) == 1 else min(group.kernels * pieces, before)
