"""Stage costs: every template costed once, times how often a stage runs it, plus what its seams and its host change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import zip_longest

import attrs
import numpy as np

from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Phase
from stepgraph.ir.program import Program, Run, SeamGroups, Stage, seam_graph
from stepgraph.ir.rows import Rule
from stepgraph.ir.table import row_of
from stepgraph.passes.base import Setting
from stepgraph.passes.buckets import Buckets, gather_buckets
from stepgraph.passes.costing import Costs, Floats, costs
from stepgraph.passes.launch import Launching, Stretch, in_a_row, stretch_of
from stepgraph.passes.overlap.templates import schedule_phase
from stepgraph.passes.pipeline.schedules import schedule_of
from stepgraph.passes.stepping.parts import Part, StageCost, counted, part_of


@attrs.frozen
class Pass:
    """One pass (forward or backward) over a template: its part, and how its launches hold it up."""

    part: Part
    stretch: Stretch


@attrs.frozen
class TemplateCost:
    """A template: forward, backward, the step up to and after the gradient norm.

    weight_s, weight_issue_s: seconds of backward on which the gradient that leaves does not depend, and what the host
    needs to issue them.
    """

    forward: Pass
    backward: Pass
    before_norm: Part
    after_norm: Part
    weight_s: float = 0.0
    weight_issue_s: float = 0.0


_TRAVELS = (Rule.COLLECTIVE, Rule.POINT_TO_POINT)

_Seams = Mapping[tuple[str, str], TemplateCost]


def cost_stages(program: Program, costed: Mapping[str, Costs], setting: Setting) -> tuple[StageCost, ...]:
    """Stage totals, one per virtual stage; equal stages are summed once.

    Time of a pass = sum over its ops, plus the time in which the host's queue runs dry. The host begins each pass of a
    micro-batch together with the device: a pipeline's blocking calls, a loss that is read and a router's token counts
    all make it wait.
    """
    split = schedule_of(program.schedule).splits_backward
    found = {name: cost_template(cost, setting, split=split) for name, cost in costed.items()}
    seams = {(seam.left, seam.right): _seam_cost(program, seam, setting, split=split) for seam in program.seam_groups}
    totals = {stage: _stage(stage, found, seams) for stage in dict.fromkeys(program.stages)}
    return tuple(totals[stage] for stage in program.stages)


def cost_template(cost: Costs, setting: Setting, *, split: bool = False) -> TemplateCost:
    """What one execution of a template costs. split: whether weight gradients run apart, after all others."""
    ops = cost.graph.ops
    norm = max((i for i, op in enumerate(ops) if row_of(op.kind).awaited), default=len(ops))
    step = positions(cost.graph, Phase.STEP)
    weights = weight_positions(cost.graph)
    op_s = spent_s(cost, setting, split=split)
    return TemplateCost(
        _pass(cost, Phase.FORWARD, op_s, setting),
        _pass(cost, Phase.BACKWARD, op_s, setting),
        part_of(cost, [i for i in step if i <= norm], setting),
        part_of(cost, [i for i in step if i > norm], setting),
        float(op_s[weights].sum()),
        int(cost.kernels[weights].sum()) * setting.launching.issue_s,
    )


def weight_positions(graph: Graph) -> list[int]:
    """Positions of the backward ops on which the gradient that leaves the graph does not depend.

    They make gradients of weights, and may run when nothing else is waited for. Recomputed forward ops are none of them:
    they come first, whoever reads them.
    """
    wanted = {graph.ports.grad_leaves}
    found = []
    for position, op in reversed(list(enumerate(graph.ops))):
        if op.phase is not Phase.BACKWARD:
            continue
        first = op.role == "recompute" or row_of(op.kind).rule is Rule.POINT_TO_POINT
        if first or any(tensor.name in wanted for tensor in op.outputs):
            wanted.update(tensor.name for tensor in op.inputs)
        else:
            found.append(position)
    return found[::-1]


def positions(graph: Graph, phase: Phase) -> list[int]:
    """Positions of the ops of one phase."""
    return [i for i, op in enumerate(graph.ops) if op.phase is phase]


def _pass(cost: Costs, phase: Phase, op_s: Floats, setting: Setting) -> Pass:
    """One pass, of which each op takes what it adds: see `spent_s`."""
    chosen = positions(cost.graph, phase)
    overlaps = setting.overlap.overlaps
    part = spent_part(cost, chosen, op_s, setting) if overlaps else part_of(cost, chosen, setting)
    return Pass(part, stretch_of(cost.kernels[chosen], op_s[chosen], setting.launching))


def spent_s(cost: Costs, setting: Setting, *, split: bool = False) -> Floats:
    """What each op adds to its phase, launches included: under a policy, only what shows of a collective.

    split: whether weight gradients run apart, after all others, so that no collective hides under them.
    """
    spent: Floats = cost.time_s + cost.kernels * setting.launching.gap_s
    if not setting.overlap.overlaps:
        return spent
    alone_s = spent.tolist()
    for phase, last in ((Phase.FORWARD, []), (Phase.BACKWARD, weight_positions(cost.graph) if split else [])):
        chosen = positions(cost.graph, phase)
        spent[chosen] = schedule_phase(cost.graph, phase, alone_s, setting.overlap, setting, last).op_s[chosen]
    return spent


def spent_part(cost: Costs, chosen: list[int], op_s: Floats, setting: Setting) -> Part:
    """A part whose ops take what a schedule says.

    Of a collective's launch as much shows as of the collective; what does not show of the collective is hidden.
    """
    ops = [cost.graph.ops[i] for i in chosen]
    gaps = cost.kernels * setting.launching.gap_s
    alone_s = cost.time_s + gaps
    shown = np.divide(op_s, alone_s, out=np.ones_like(op_s), where=alone_s > 0)
    launch_s = gaps * np.minimum(shown, 1.0)
    own_s = op_s - launch_s
    buckets = gather_buckets(ops, own_s[chosen].tolist()) + Buckets(launch=float(launch_s[chosen].sum()))
    travels = [i for i in chosen if row_of(cost.graph.ops[i].kind).rule in _TRAVELS]
    hidden_s = np.maximum(cost.time_s - own_s, 0.0)
    hidden = gather_buckets([cost.graph.ops[i] for i in travels], hidden_s[travels].tolist())
    return counted(cost, chosen, buckets, hidden)


def _seam_cost(program: Program, seam: SeamGroups, setting: Setting, *, split: bool) -> TemplateCost:
    """What the kernels across a seam change: both layers with them, minus both layers without."""
    fused = seam_graph(program, seam.left, seam.right)
    joined = seam_graph(attrs.evolve(program, seam_groups=()), seam.left, seam.right)
    after, before = (cost_template(costs(graph, setting), setting, split=split) for graph in (fused, joined))
    return TemplateCost(
        _change(after.forward, before.forward, setting.launching),
        _change(after.backward, before.backward, setting.launching),
        after.before_norm + before.before_norm * -1,
        after.after_norm + before.after_norm * -1,
        after.weight_s - before.weight_s,
        after.weight_issue_s - before.weight_issue_s,
    )


def _change(after: Pass, before: Pass, launch: Launching) -> Pass:
    """A difference moves both clocks; it holds nothing up by itself."""
    part = after.part + before.part * -1
    return Pass(part, Stretch(part.kernels * launch.issue_s, part.time_s))


def _stage(stage: Stage, found: Mapping[str, TemplateCost], seams: _Seams) -> StageCost:
    """Sum of the stage's layers, plus what kernels across its seams change, plus the waits for the host."""
    parts = [(found[name], count) for name, count in _counts(stage.runs).items()]
    for seam in stage.seams if seams else ():
        change = seams.get((seam.left, seam.right))
        if change is not None:
            parts.append((change, seam.count))
    forward = sum((cost.forward.part * count for cost, count in parts), Part())
    backward = sum((cost.backward.part * count for cost, count in parts), Part())
    weight_s = max(0.0, sum(cost.weight_s * count for cost, count in parts))
    dry_s = [_dry_s(stage.runs, found, seams, back=back) for back in (False, True)]
    issue_s = sum(cost.weight_issue_s * count for cost, count in parts)
    weight_s += min(dry_s[1], max(0.0, issue_s - weight_s))  # where the host is late, it is so in weight gradients too
    step = found[stage.step]
    return StageCost(
        forward + Part(Buckets(launch=dry_s[0])),
        backward + Part(Buckets(launch=dry_s[1])),
        step.before_norm,
        step.after_norm,
        weight_s,
        *dry_s,
    )


def _counts(runs: Sequence[Run]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for run in runs:
        counts[run.template] += run.count
    return counts


def _dry_s(runs: Sequence[Run], found: Mapping[str, TemplateCost], seams: _Seams, *, back: bool) -> float:
    """Seconds that a whole pass of a stage waits for its host.

    Layers come in the order in which the pass meets them, each together with the change of the seam behind it.
    """

    @cache
    def stretch(template: str, after: str, count: int) -> Stretch:
        pair = (after, template) if back else (template, after)
        cost, seam = found[template], seams.get(pair)
        unit = (cost.backward if back else cost.forward).stretch
        if seam is not None:
            unit = in_a_row((unit, (seam.backward if back else seam.forward).stretch))
        return unit.times(count)

    ordered = runs[::-1] if back else runs
    stretches: list[Stretch] = []
    for here, after in zip_longest(ordered, ordered[1:]):
        if here.count > 1:
            stretches.append(stretch(here.template, here.template, here.count - 1))
        stretches.append(stretch(here.template, after.template if after else "", 1))
    return in_a_row(stretches).dry_s
