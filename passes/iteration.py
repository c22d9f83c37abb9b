"""iteration: a costed program becomes the time of one step, by the source's closed form and by simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from stepgraph.errors import refuse
from stepgraph.ir.op import Phase
from stepgraph.ir.program import Program, SeamGroups, Stage, seam_graph
from stepgraph.ir.table import row_of
from stepgraph.passes.base import Setting
from stepgraph.passes.buckets import Buckets, gather_buckets
from stepgraph.passes.collective import hop_s
from stepgraph.passes.costing import Costs, costs
from stepgraph.passes.launch import launch_s
from stepgraph.passes.pipeline.accounts import PipelineRun, RankRun
from stepgraph.passes.pipeline.modes import BLOCKING
from stepgraph.passes.pipeline.schedules import schedule_of
from stepgraph.passes.pipeline.simulation import simulate_schedule
from stepgraph.passes.pipeline.timing import Timing
from stepgraph.passes.seating import seat

MOST_SLOTS = 400_000
"""Stages x micro-batches that are simulated event by event; about three seconds."""


@attrs.frozen
class Part:
    """What one phase of a template (or of a stage) costs: seconds by bucket, and counts."""

    buckets: Buckets = Buckets()
    kernels: int = 0
    flops: int = 0
    hbm_bytes: int = 0
    comm_bytes: int = 0
    roofline_s: float = 0.0

    @property
    def time_s(self) -> float:
        """Seconds, launches included."""
        return self.buckets.total

    def __add__(self, other: Part) -> Part:
        return Part(
            self.buckets + other.buckets,
            self.kernels + other.kernels,
            self.flops + other.flops,
            self.hbm_bytes + other.hbm_bytes,
            self.comm_bytes + other.comm_bytes,
            self.roofline_s + other.roofline_s,
        )

    def __mul__(self, times: int) -> Part:
        return Part(
            self.buckets * times,
            self.kernels * times,
            self.flops * times,
            self.hbm_bytes * times,
            self.comm_bytes * times,
            self.roofline_s * times,
        )


@attrs.frozen
class StageCost:
    """One stage: forward and backward of a micro-batch, and the step before and after the gradient norm.

    All stages wait for each other at the norm, so what lies before it and after it is kept apart.
    """

    forward: Part
    backward: Part
    before_norm: Part
    after_norm: Part

    @property
    def micro_batch(self) -> Part:
        """Forward and backward together."""
        return self.forward + self.backward

    @property
    def step(self) -> Part:
        """What runs once per step."""
        return self.before_norm + self.after_norm


@attrs.frozen
class Iteration:
    """The time of one step.

    step_s: simulated. closed_form_s: (n + P - 1) x mean stage time + the longest step part. pipeline: the run.
    buckets: seconds by cause for every stage; each adds up to step_s.
    """

    step_s: float
    closed_form_s: float
    bubble_closed_form: float
    bubble_simulated: float
    stages: tuple[StageCost, ...]
    pipeline: PipelineRun
    buckets: tuple[Buckets, ...]

    @property
    def slowest(self) -> int:
        """The stage with the most work per micro-batch: the one that the others wait for."""
        return max(range(len(self.stages)), key=lambda i: (self.stages[i].micro_batch.time_s, -i))


def iterate(program: Program, setting: Setting) -> Iteration:
    """Cost a program and put its stages through the pipeline.

    Source: How to Think About Asymptotic Times, section 8 (closed form); Narayanan et al. 2021 (arXiv:2104.04473)
    for 1F1B; NVIDIA/Megatron-LM megatron/core/pipeline_parallel/p2p_communication.py for blocking batched calls.
    """
    setting = seat(setting, program)
    costed = {graph.name: costs(graph, setting) for graph in program.templates}
    stages = cost_stages(program, costed, setting)
    forward, backward = _hops(program, costed, setting)
    return time_step(stages, program.microbatches, forward, backward)


def cost_stages(program: Program, costed: Mapping[str, Costs], setting: Setting) -> tuple[StageCost, ...]:
    """Stage totals: every template once, times how often the stage runs it."""
    parts = {name: _template_parts(cost, setting) for name, cost in costed.items()}
    seams = {(seam.left, seam.right): _seam_parts(program, seam, setting) for seam in program.seam_groups}
    totals = {stage: _stage(stage, parts, seams) for stage in dict.fromkeys(program.stages)}
    return tuple(totals[stage] for stage in program.stages)


_Parts = tuple[Part, Part, Part, Part]


def _stage(stage: Stage, parts: Mapping[str, _Parts], seams: Mapping[tuple[str, str], _Parts]) -> StageCost:
    """Sum of the stage's layers, plus what kernels across its seams change."""
    forward = backward = Part()
    for run in stage.runs:
        forward += parts[run.template][0] * run.count
        backward += parts[run.template][1] * run.count
    for seam in stage.seams if seams else ():
        change = seams.get((seam.left, seam.right))
        if change is not None:
            forward += change[0] * seam.count
            backward += change[1] * seam.count
    return StageCost(forward, backward, *parts[stage.step][2:])


def _seam_parts(program: Program, seam: SeamGroups, setting: Setting) -> _Parts:
    """What the kernels across a seam change: both layers with them, minus both layers without."""
    fused = seam_graph(program, seam.left, seam.right)
    joined = seam_graph(attrs.evolve(program, seam_groups=()), seam.left, seam.right)
    after, before = _template_parts(costs(fused, setting), setting), _template_parts(costs(joined, setting), setting)
    return (
        after[0] + before[0] * -1,
        after[1] + before[1] * -1,
        after[2] + before[2] * -1,
        after[3] + before[3] * -1,
    )


def _template_parts(cost: Costs, setting: Setting) -> _Parts:
    """Forward, backward, and the step up to and after the gradient norm."""
    ops = cost.graph.ops
    norm = max((i for i, op in enumerate(ops) if row_of(op.kind).awaited), default=len(ops))
    forward = [i for i, op in enumerate(ops) if op.phase is Phase.FORWARD]
    backward = [i for i, op in enumerate(ops) if op.phase is Phase.BACKWARD]
    step = [i for i, op in enumerate(ops) if op.phase is Phase.STEP]
    before, after = [i for i in step if i <= norm], [i for i in step if i > norm]
    return (
        part_of(cost, forward, setting),
        part_of(cost, backward, setting),
        part_of(cost, before, setting),
        part_of(cost, after, setting),
    )


def part_of(cost: Costs, chosen: Sequence[int], setting: Setting) -> Part:
    """Sum the costs of some ops of a graph, by position."""
    ops = [cost.graph.ops[i] for i in chosen]
    index = np.array(chosen, dtype=np.int64)
    kernels = int(cost.kernels[index].sum())
    buckets = gather_buckets(ops, cost.time_s[index].tolist()) + Buckets(launch=launch_s(kernels, setting.target))
    columns = (cost.flops, cost.hbm_bytes, cost.comm_bytes)
    flops, hbm, comm = (sum(column[index].tolist()) for column in columns)  # Python's integers do not wrap
    return Part(buckets, kernels, flops, hbm, comm, float(cost.roofline_s[index].sum()))


def _hops(program: Program, costed: Mapping[str, Costs], setting: Setting) -> tuple[list[float], list[float]]:
    """Seconds of every stage boundary, forwards and backwards."""
    boundaries = len(program.stages) - 1
    if not boundaries:
        return [], []
    send = costed["send"]
    return (
        [_hop(send, 0, index, setting) for index in range(boundaries)],
        [_hop(send, 1, index, setting) for index in range(boundaries)],
    )


def _hop(cost: Costs, position: int, boundary: int, setting: Setting) -> float:
    return hop_s(cost.graph.ops[position], int(cost.comm_bytes[position]), setting.target, boundary)


def time_step(
    stages: Sequence[StageCost], microbatches: int, hops_forward_s: Sequence[float], hops_backward_s: Sequence[float]
) -> Iteration:
    """Put costed stages through 1F1B and the step that follows it.

    step = max over stages of (pipeline end + before the norm), then the longest part after the norm.
    """
    if len(stages) * microbatches > MOST_SLOTS:
        what = f"{microbatches} micro-batches on {len(stages)} stages"
        limit = MOST_SLOTS // len(stages)
        raise refuse(
            "too-many-micro-batches", "global_batch", what, f"at most {limit} micro-batches", "raise the micro-batch"
        )
    forward = [stage.forward.time_s for stage in stages]
    backward = [stage.backward.time_s for stage in stages]
    timing = Timing(forward, backward, hops_forward_s, hops_backward_s)
    run = simulate_schedule(schedule_of("1f1b"), len(stages), 1, microbatches, timing, BLOCKING)
    norm_s = max(rank.end_s + stage.before_norm.time_s for rank, stage in zip(run.ranks, stages, strict=True))
    step_s = norm_s + max(stage.after_norm.time_s for stage in stages)
    return Iteration(
        step_s,
        closed_form_s(stages, microbatches),
        (len(stages) - 1) / microbatches,
        max(0.0, run.makespan_s / (microbatches * max(map(sum, zip(forward, backward, strict=True)))) - 1),
        tuple(stages),
        run,
        tuple(_fill(stage, rank, microbatches, step_s) for stage, rank in zip(stages, run.ranks, strict=True)),
    )


def closed_form_s(stages: Sequence[StageCost], microbatches: int) -> float:
    """The source's sum: n t + (P - 1) t + the step, with t the mean stage time of a micro-batch.

    It spreads all layers evenly and knows no transfers, so it equals the simulation only for equal stages.
    """
    mean = sum(stage.micro_batch.time_s for stage in stages) / len(stages)
    return (microbatches + len(stages) - 1) * mean + max(stage.step.time_s for stage in stages)


def _fill(stage: StageCost, rank: RankRun, microbatches: int, step_s: float) -> Buckets:
    work = stage.micro_batch.buckets * microbatches + stage.step.buckets
    pipeline = Buckets(pp_transfer=rank.transfer_s, pp_wait=rank.wait_s)
    busy = work + pipeline
    return busy + Buckets(idle=max(0.0, step_s - busy.total))
