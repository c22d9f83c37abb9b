"""iteration: a costed program becomes the time of one step, by the source's closed form and by simulation."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from stepgraph.errors import refuse
from stepgraph.ir.program import Program
from stepgraph.passes.base import Setting
from stepgraph.passes.buckets import Buckets
from stepgraph.passes.costing import costs
from stepgraph.passes.hops import hops_s
from stepgraph.passes.parts import Part, StageCost, joined_chunks
from stepgraph.passes.pipeline.accounts import PipelineRun, RankRun
from stepgraph.passes.pipeline.modes import Mode, usual_mode
from stepgraph.passes.pipeline.schedules import schedule_of
from stepgraph.passes.pipeline.simulation import simulate_schedule
from stepgraph.passes.pipeline.timing import Timing
from stepgraph.passes.seating import seat
from stepgraph.passes.stagecosts import cost_stages

MOST_SLOTS = 400_000
"""Stages x micro-batches that are simulated event by event; about three seconds."""


@attrs.frozen
class Iteration:
    """The time of one step.

    step_s: simulated. closed_form_s: see `closed_form_s`. pipeline: the run. stages: what every virtual stage costs;
    ranks: the same per pipeline rank, its chunks together. buckets: seconds by cause for every rank; each adds up to
    step_s.
    """

    step_s: float
    closed_form_s: float
    bubble_closed_form: float
    bubble_simulated: float
    stages: tuple[StageCost, ...]
    ranks: tuple[StageCost, ...]
    pipeline: PipelineRun
    buckets: tuple[Buckets, ...]

    @property
    def slowest(self) -> int:
        """The pipeline rank with the most work per micro-batch: the one that the others wait for."""
        return max(range(len(self.ranks)), key=lambda i: (self.ranks[i].micro_batch.time_s, -i))


@attrs.frozen
class Pipelining:
    """How stages share a pipeline: the schedule's name, the rank of every stage, and how transfers are issued.

    mode: None takes what the framework that the schedule comes from does by default (`usual_mode`).
    """

    schedule: str
    owners: tuple[int, ...]
    mode: Mode | None = None

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return max(self.owners) + 1

    @property
    def chunks(self) -> int:
        """Virtual stages per rank."""
        return len(self.owners) // self.ranks


def iterate(program: Program, setting: Setting) -> Iteration:
    """Cost a program and put its stages through the pipeline.

    Source: How to Think About Asymptotic Times, section 8 (closed form); Narayanan et al. 2021 (arXiv:2104.04473)
    for 1F1B; NVIDIA/Megatron-LM megatron/core/pipeline_parallel/p2p_communication.py for blocking batched calls.
    """
    setting = seat(setting, program)
    costed = {graph.name: costs(graph, setting) for graph in program.templates}
    stages = cost_stages(program, costed, setting)
    forward, backward = hops_s(program, costed, setting)
    pipelining = Pipelining(program.schedule, tuple(stage.rank for stage in program.stages), setting.p2p)
    return time_step(stages, program.microbatches, forward, backward, pipelining)


def time_step(
    stages: Sequence[StageCost],
    microbatches: int,
    hops_forward_s: Sequence[float],
    hops_backward_s: Sequence[float],
    pipelining: Pipelining | None = None,
) -> Iteration:
    """Put costed stages through a pipeline (1F1B, one stage per rank, unless told) and the step that follows it.

    step = max over ranks of (pipeline end + before the norm), then the longest part after the norm.
    """
    how = pipelining or Pipelining("1f1b", tuple(range(len(stages))))
    _check_size(len(stages), microbatches)
    run = simulate_schedule(
        schedule_of(how.schedule),
        how.ranks,
        how.chunks,
        microbatches,
        timing_of(stages, hops_forward_s, hops_backward_s),
        how.mode or usual_mode(how.schedule),
    )
    ranks = [
        joined_chunks(stage for stage, owner in zip(stages, how.owners, strict=True) if owner == rank)
        for rank in range(how.ranks)
    ]
    norm_s = max(rank.end_s + cost.before_norm.time_s for rank, cost in zip(run.ranks, ranks, strict=True))
    step_s = norm_s + max(cost.after_norm.time_s for cost in ranks)
    busiest = microbatches * max(cost.micro_batch.time_s for cost in ranks)
    return Iteration(
        step_s,
        closed_form_s(ranks, microbatches, how.chunks),
        (how.ranks - 1) / (microbatches * how.chunks),
        max(0.0, run.makespan_s / busiest - 1),
        tuple(stages),
        tuple(ranks),
        run,
        tuple(_fill(cost, rank, microbatches, step_s) for cost, rank in zip(ranks, run.ranks, strict=True)),
    )


def timing_of(
    stages: Sequence[StageCost], hops_forward_s: Sequence[float], hops_backward_s: Sequence[float]
) -> Timing:
    """Seconds of every computation and transfer of a pipeline."""
    return Timing(
        forward_s=tuple(stage.forward.time_s for stage in stages),
        backward_s=tuple(stage.backward.time_s for stage in stages),
        weight_s=tuple(min(stage.weight_s, stage.backward.time_s) for stage in stages),
        hop_forward_s=tuple(hops_forward_s),
        hop_backward_s=tuple(hops_backward_s),
    )


def _check_size(stages: int, microbatches: int) -> None:
    """Raises: InputError (too-many-micro-batches)."""
    if stages * microbatches > MOST_SLOTS:
        what, limit = f"{microbatches} micro-batches on {stages} stages", MOST_SLOTS // stages
        raise refuse(
            "too-many-micro-batches", "global_batch", what, f"at most {limit} micro-batches", "raise the micro-batch"
        )


def closed_form_s(ranks: Sequence[StageCost], microbatches: int, chunks: int = 1) -> float:
    """The source's sum: n t + (P - 1) t / V + the step, with t the mean time of a micro-batch on a rank.

    It spreads all layers evenly and knows no transfers, so it equals the simulation only for equal stages, and for
    schedules whose bubble it is.
    """
    mean = sum(rank.micro_batch.time_s for rank in ranks) / len(ranks)
    bubble = (len(ranks) - 1) / chunks
    return (microbatches + bubble) * mean + max(rank.step.time_s for rank in ranks)


def _fill(cost: StageCost, rank: RankRun, microbatches: int, step_s: float) -> Buckets:
    work = cost.micro_batch.buckets * microbatches + cost.step.buckets
    pipeline = Buckets(pp_transfer=rank.transfer_s, pp_wait=rank.wait_s)
    busy = work + pipeline
    return busy + Buckets(idle=max(0.0, step_s - busy.total))
