"""Contraction: the graph with every fused kernel drawn together into one node, and an order in which its nodes can run.

Fusing two ops that are fine by themselves can make kernels wait for each other: a group encloses an op that is not in
it (the group is not convex), or two convex groups each read what the other makes. So the order is looked for on the
whole contracted graph and not group by group. Source: pytorch/pytorch issue 86159 (fused partitions that form a cycle
together); Tarjan 1972 (SIAM J. Comput. 1) for depth-first order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from stepgraph.ir.graph import Graph

Kernel = tuple[str, ...]
"""What runs as one: the members of a group in program order, or a single op."""


class ContractionError(ValueError):
    """Kernels that wait for each other, so that none can run first.

    cycle: the kernels, each needing what the next one makes, the last what the first one makes. groups: the names of
    the fused ones among them, in that order.
    """

    def __init__(self, graph: Graph, cycle: Sequence[Kernel]) -> None:
        self.cycle = tuple(cycle)
        found = [graph.group_of.get(kernel[0]) for kernel in self.cycle]
        self.groups = tuple(group.name for group in found if group)
        names = [f"kernel {group.name}" if group else kernel[0] for group, kernel in zip(found, cycle, strict=True)]
        self.story = "; ".join(f"{one} needs what {other} makes" for one, other in pairwise([*names, names[0]]))
        super().__init__(f"no order for graph {graph.name!r}: {self.story}")


def contracted_order(graph: Graph) -> tuple[Kernel, ...]:
    """Groups and single ops in an order that is valid for the contracted graph.

    A kernel stands where its last member does, or earlier when something before that needs it; so without groups the
    order is the program's. Phases stay in order as long as no group mixes them. Linear in ops and operands. Groups are
    taken to be disjoint and to name ops of the graph, which `verify` says.

    Raises: ContractionError with the kernels of one cycle; KeyError for a member that is not in the graph.
    """
    unit_of = unit_positions(graph)
    fused = {unit_of[graph.positions[group.members[0]]]: group.members for group in graph.groups}
    try:
        order = _order(unit_of, _needs(graph, unit_of))
    except _Circle as circle:
        cycle = [fused.get(unit) or (graph.ops[unit].name,) for unit in circle.units]
        raise ContractionError(graph, cycle) from None
    return tuple([fused.get(unit) or (graph.ops[unit].name,) for unit in order])


def unit_positions(graph: Graph) -> list[int]:
    """By op position: which kernel the op is in, as the position of that kernel's last member (its own if alone)."""
    unit_of = list(range(len(graph.ops)))
    for group in graph.groups:
        positions = [graph.positions[name] for name in group.members]
        last = max(positions)
        for position in positions:
            unit_of[position] = last
    return unit_of


def _needs(graph: Graph, unit_of: list[int]) -> dict[int, list[int]]:
    """By unit: the units that make what it reads, some of them several times; units that need none are absent."""
    maker = {t.name: unit for unit, op in zip(unit_of, graph.ops, strict=True) for t in op.outputs}
    needs: dict[int, list[int]] = {}
    for unit, op in zip(unit_of, graph.ops, strict=True):
        found = [maker[t.name] for t in op.inputs if maker.get(t.name, unit) != unit]
        if found:
            needs.setdefault(unit, []).extend(found)
    return needs


class _Circle(Exception):
    """A way back to where it began, in units."""

    def __init__(self, units: list[int]) -> None:
        self.units = units


_OPEN, _DONE = 1, 2


def _order(unit_of: list[int], needs: dict[int, list[int]]) -> list[int]:
    """Units, each after what it needs and otherwise in the order of their positions. Raises: _Circle."""
    state = bytearray(len(unit_of))
    order: list[int] = []
    for position, unit in enumerate(unit_of):
        if position != unit or state[unit] == _DONE:
            continue
        if min(map(state.__getitem__, needs.get(unit, ())), default=_DONE) == _DONE:
            state[unit] = _DONE  # nearly always: but for groups, positions are a topological order already
            order.append(unit)
        else:
            _append_after_needs(unit, needs, state, order)
    return order


def _append_after_needs(head: int, needs: dict[int, list[int]], state: bytearray, order: list[int]) -> None:
    """Append what `head` still needs, the deepest need first, then itself; a loop, because chains are long."""
    path, rest = [head], [iter(needs.get(head, ()))]
    state[head] = _OPEN
    while path:
        need = next((unit for unit in rest[-1] if state[unit] != _DONE), None)
        if need is None:
            rest.pop()
            state[path[-1]] = _DONE
            order.append(path.pop())
        elif state[need] == _OPEN:
            raise _Circle(path[path.index(need) :])
        else:
            state[need] = _OPEN
            path.append(need)
            rest.append(iter(needs.get(need, ())))
