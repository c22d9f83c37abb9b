"""Checks of fused kernels: what a group may hold, and that the kernels of a graph or program can run in some order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise

from stepgraph.errors import did_you_mean
from stepgraph.ir.contraction import ContractionError, contracted_order
from stepgraph.ir.faults import Fault, graph_fault, op_fault
from stepgraph.ir.graph import Graph, Group
from stepgraph.ir.joining import LEFT, RIGHT
from stepgraph.ir.op import Op
from stepgraph.ir.program import Program, SeamGroups, Stage, seam_graph, unroll
from stepgraph.ir.rows import Rule
from stepgraph.ir.table import row_of

MOVES = (Rule.COLLECTIVE, Rule.POINT_TO_POINT)
"""What never runs inside a fused kernel: it waits for other ranks. Views may be in one."""


def members_fit(graph: Graph) -> Iterator[Fault]:
    """group-members: a group has a name of its own and one member or more: ops of the graph in program order, in no other.

    group-launch: one launch or more, at a rate above 0 and at most 1 of what the memory reaches.
    """
    names: set[str] = set()
    taken: dict[str, str] = {}
    for group in graph.groups:
        for what in chain(_name_problems(group, names), _member_problems(graph, group, taken)):
            yield _fault(graph, group, "group-members", what)
        names.add(group.name)
        taken.update(dict.fromkeys(group.members, group.name))
        if group.kernels < 1 or not 0 < group.efficiency <= 1:
            what = f"{group.kernels} launches at {group.efficiency} of the rate, expected 1 or more at 0 to 1"
            yield _fault(graph, group, "group-launch", what)


def _fault(graph: Graph, group: Group, code: str, what: str) -> Fault:
    return graph_fault(graph, f"kernel {group.name}", code, what)


def _name_problems(group: Group, names: set[str]) -> Iterator[str]:
    if not group.name or group.name in names:
        yield f"the name {group.name!r} is taken or empty, expected a name of its own"
    if not group.members:
        yield "has no member, expected one or more"


def _member_problems(graph: Graph, group: Group, taken: dict[str, str]) -> Iterator[str]:
    unknown = [name for name in group.members if name not in graph.by_name]
    for name in unknown:
        yield f"no op {name!r}; {did_you_mean(name, graph.by_name)}"
    for name in group.members:
        if name in taken:
            yield f"{name} is in kernel {taken[name]} already, expected each op in one kernel"
    positions = [graph.positions[name] for name in group.members if name not in unknown]
    if any(left >= right for left, right in pairwise(positions)):
        yield f"members {', '.join(group.members)}, expected each once, in program order"


def phases_unmixed(graph: Graph) -> Iterator[Fault]:
    """group-phase: the members of a group run in one phase; recomputed ops, which repeat forward, stay by themselves."""
    for group in graph.groups:
        first = _part(graph[group.members[0]])
        other = next((name for name in group.members if _part(graph[name]) != first), None)
        if other:
            what = f"is {_part(graph[other])} in kernel {group.name}, expected {first} as {group.members[0]}"
            yield op_fault(graph, graph.positions[other], "group-phase", what)


def _part(op: Op) -> str:
    return "recomputed" if op.role == "recompute" else op.phase.value


def nothing_moves_inside(graph: Graph) -> Iterator[Fault]:
    """group-collective: no member is a collective, a send or a receive."""
    for group in graph.groups:
        for name in group.members:
            rule = row_of(graph[name].kind).rule
            if rule in MOVES:
                what = f"is in kernel {group.name}, expected no {rule.value} in one: it waits for other ranks"
                yield op_fault(graph, graph.positions[name], "group-collective", what)


def kernels_can_run(graph: Graph) -> Iterator[Fault]:
    """group-cycle: with each group drawn together into one node the graph has no cycle; the first one is shown."""
    try:
        contracted_order(graph)
    except ContractionError as error:
        first = graph.group_of[next(k for k in error.cycle if k[0] in graph.group_of)[0]]
        what = f"{error.story}; expected kernels of which one can run first"
        yield op_fault(graph, graph.positions[first.members[0]], "group-cycle", what)


def seams_fused(program: Program) -> Iterator[Fault]:
    """group-seam: seam groups name a pair that is adjacent in a stage, once, and have members on both sides.

    What holds for the groups of a graph holds for those of the seam's graph, and of every stage written out: there a
    layer meets both neighbours, whose kernels may want the same op.
    """
    if not program.seam_groups:
        return
    problems = [
        Fault("group-seam", _place(seam), what)
        for seam in program.seam_groups
        for what in _seam_problems(program, seam)
    ]
    problems = problems or [
        f for seam in program.seam_groups for f in _group_faults(seam_graph(program, seam.left, seam.right))
    ]
    yield from problems
    if not problems:
        yield from _stage_faults(program)


def _place(seam: SeamGroups) -> str:
    return f"{seam.left} -> {seam.right}"


def _seam_problems(program: Program, seam: SeamGroups) -> Iterator[str]:
    adjacent = dict.fromkeys((s.left, s.right) for stage in program.stages for s in stage.seams)
    if (seam.left, seam.right) not in adjacent:
        pairs = ", ".join(f"{left} -> {right}" for left, right in adjacent)
        yield f"are neighbours in no stage, expected one of {pairs or 'none: there are no neighbours'}"
    if sum(_place(other) == _place(seam) for other in program.seam_groups) > 1:
        yield "stands twice, expected the groups of a seam in one place"
    for group in seam.groups:
        if {name.startswith(LEFT) for name in group.members} != {True, False}:
            yield f"kernel {group.name} has members on one side, expected {LEFT}NAME and {RIGHT}NAME"


def _group_faults(graph: Graph) -> list[Fault]:
    """Of the checks above, those that find something first: later ones rely on earlier ones."""
    found = list(members_fit(graph))
    if found:
        return found
    return [fault for check in (phases_unmixed, nothing_moves_inside, kernels_can_run) for fault in check(graph)]


def _stage_faults(program: Program) -> Iterator[Fault]:
    different: dict[tuple[object, ...], Stage] = {(stage.runs, stage.step): stage for stage in reversed(program.stages)}
    for stage in reversed(different.values()):
        index = program.stages.index(stage)
        yield from _group_faults(unroll(program, stage, f"stage {index}"))
