"""The same totals by module: attention, MLP, experts, the ends, the step.

A kernel may span modules, such as a residual add and the norm of the next block. Its bytes and its time are then shared
out as its members move them, less what each stopped moving; its launches stand at its first member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import attrs
import numpy as np

from stepgraph.ir.graph import Graph, Group
from stepgraph.ir.program import Program, seam_graph
from stepgraph.passes.base import Setting
from stepgraph.passes.buckets import Buckets
from stepgraph.passes.comparison import Totals
from stepgraph.passes.costing import Costs, costs
from stepgraph.passes.fusing.programs import seam_counts, template_counts
from stepgraph.passes.pipeline.schedules import schedule_of
from stepgraph.passes.profiles import operand_bytes
from stepgraph.passes.stepping.parts import Part
from stepgraph.passes.stepping.stagecosts import cost_stages, spent_part, spent_s
from stepgraph.passes.traffic import savings

STREAM = "stream"
"""Where ops are counted that belong to no module: the sums at the residual stream between layers."""

HOST = "host"
"""Where the waits for the host are counted: they belong to a pass over a stage, not to any module of it."""

_Parts = Mapping[str, Part]


def module_totals(target: Graph | Program, setting: Setting) -> dict[str, Totals]:
    """Totals of a graph or of a program by module, in the order of first use; they add up to those of `compare`.

    A program is summed over all stages: one rank each, one micro-batch, the step once.
    """
    parts = _graph_parts(target, setting) if isinstance(target, Graph) else _program_parts(target, setting)
    saved = _graph_saved(target) if isinstance(target, Graph) else _program_saved(target)
    return {name: Totals.of(part, saved[name]) for name, part in parts.items()}


def _program_parts(program: Program, setting: Setting) -> dict[str, Part]:
    found: dict[str, Part] = {}
    split = schedule_of(program.schedule).splits_backward
    for name, count in _counted(program):
        _gather(found, _graph_parts(program[name], setting, split=split), count)
    spanned = {(seam.left, seam.right) for seam in program.seam_groups}
    bare = attrs.evolve(program, seam_groups=())
    for (left, right), count in seam_counts(program).items():
        if (left, right) in spanned:  # what the kernels across this seam change
            _gather(found, _graph_parts(seam_graph(program, left, right), setting, split=split), count)
            _gather(found, _graph_parts(seam_graph(bare, left, right), setting, split=split), -count)
    costed = {graph.name: costs(graph, setting) for graph in program.templates}
    dry_s = sum(stage.dry_s for stage in cost_stages(program, costed, setting))
    return found | ({HOST: Part(Buckets(launch=dry_s))} if dry_s else {})


def _counted(program: Program) -> list[tuple[str, int]]:
    """Templates that run, in the program's order, and how often."""
    counts = template_counts(program)
    return [(graph.name, counts[graph.name]) for graph in program.templates if counts[graph.name]]


def _gather(found: dict[str, Part], parts: _Parts, count: int) -> None:
    for name, part in parts.items():
        found[name] = found.get(name, Part()) + part * count


def _graph_parts(graph: Graph, setting: Setting, *, split: bool = False) -> dict[str, Part]:
    cost = costs(graph, setting)
    for group in graph.groups:
        if len({graph.by_name[name].module for name in group.members}) > 1:
            cost = _shared_out(cost, group, setting)
    positions: dict[str, list[int]] = {}
    for index, op in enumerate(graph.ops):
        positions.setdefault(op.module or STREAM, []).append(index)
    op_s = spent_s(cost, setting, split=split)
    return {name: spent_part(cost, chosen, op_s, setting) for name, chosen in positions.items()}


def _shared_out(cost: Costs, group: Group, setting: Setting) -> Costs:
    """A kernel's bytes and HBM seconds at the members that still move them, not all at one of them."""
    graph = cost.graph
    members = [graph.positions[name] for name in group.members]
    less: Counter[str] = Counter()
    for saving in savings(graph, group, setting.profile):
        less[saving.op] += saving.bytes
    ops = [graph.ops[i] for i in members]
    moved = np.array([operand_bytes(op, setting.profile[op.kind]) - less[op.name] for op in ops], dtype=np.int64)
    whole = int(moved.sum())
    if not whole:
        return cost
    hbm_bytes, hbm_s = cost.hbm_bytes.copy(), cost.hbm_s.copy()
    time_s = float(hbm_s[members].sum())
    hbm_bytes[members], hbm_s[members] = moved, time_s * moved / whole
    return attrs.evolve(cost, hbm_bytes=hbm_bytes, hbm_s=hbm_s)


def _program_saved(program: Program) -> Counter[str]:
    saved: Counter[str] = Counter()
    for name, count in _counted(program):
        for module, size in _graph_saved(program[name]).items():
            saved[module] += count * size
    return saved


def _graph_saved(graph: Graph) -> Counter[str]:
    """Bytes kept for backward, at the module that makes the tensor, or reads it first where it enters."""
    saved: Counter[str] = Counter()
    for tensor in graph.saved:
        op = graph.producer(tensor) or graph.users(tensor)[0]
        saved[op.module or STREAM] += tensor.nbytes
    return saved
