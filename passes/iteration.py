"""iteration: a costed program becomes the time of one step, by the source's closed form and by simulation."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from stepgraph.ir.program import Program
from stepgraph.passes.base import Setting
from stepgraph.passes.buckets import Buckets
from stepgraph.passes.costing import costs
from stepgraph.passes.pipeline.accounts import PipelineRun, RankRun
from stepgraph.passes.pipeline.modes import Mode
from stepgraph.passes.pipeline.timing import Timing
from stepgraph.passes.seating import seat
from stepgraph.passes.stepping.hops import hops_s
from stepgraph.passes.stepping.overlapped import Change, CostedStages, run_overlapped
from stepgraph.passes.stepping.parts import Part, StageCost
from stepgraph.passes.stepping.pipelining import Pipelining, timing_of
from stepgraph.passes.stepping.stagecosts import cost_stages


@attrs.frozen
class Iteration:
    """The time of one step.

    step_s: simulated. closed_form_s: see `closed_form_s`. stages: what every virtual stage costs; ranks: the same per
    pipeline rank, its chunks together. pipeline: the run; mode: how its transfers were issued. buckets: seconds by cause
    for every rank; each adds up to step_s. hidden: seconds of communication under computation, likewise. changes: what a
    policy changed per rank.
    """

    step_s: float
    closed_form_s: float
    bubble_closed_form: float
    bubble_simulated: float
    stages: tuple[StageCost, ...]
    ranks: tuple[StageCost, ...]
    pipeline: PipelineRun
    mode: Mode
    buckets: tuple[Buckets, ...]
    hidden: tuple[Buckets, ...]
    changes: tuple[Change, ...] = ()

    @property
    def slowest(self) -> int:
        """The pipeline rank with the most work per micro-batch: the one that the others wait for."""
        return max(range(len(self.ranks)), key=lambda i: (self.ranks[i].micro_batch.time_s, -i))


@attrs.frozen(eq=False)
class CostedStep(CostedStages):
    """A program costed once; `at` puts it through the pipeline with any number of micro-batches."""

    def at(self, microbatches: int) -> Iteration:
        """The step with so many micro-batches. Raises: InputError when the pipeline cannot run them."""
        run, changes = run_overlapped(self, microbatches)
        return finish_step(self.stages, self.timing, run, microbatches, self.how, changes)


def cost_step(program: Program, setting: Setting) -> CostedStep:
    """Cost what does not depend on the number of micro-batches."""
    setting = seat(setting, program)
    costed = {graph.name: costs(graph, setting) for graph in program.templates}
    stages = cost_stages(program, costed, setting)
    timing = timing_of(stages, *hops_s(program, costed, setting))
    owners = tuple(stage.rank for stage in program.stages)
    how = Pipelining(program.schedule, owners, setting.p2p, setting.overlap.expert_comm)
    return CostedStep(program, costed, stages, timing, how, setting)


def iterate(program: Program, setting: Setting) -> Iteration:
    """Cost a program and put its stages through the pipeline.

    Source: How to Think About Asymptotic Times, section 8 (closed form); Narayanan et al. 2021 (arXiv:2104.04473)
    for 1F1B; NVIDIA/Megatron-LM megatron/core/pipeline_parallel/p2p_communication.py for blocking batched calls.
    """
    return cost_step(program, setting).at(program.microbatches)


def time_step(
    stages: Sequence[StageCost],
    microbatches: int,
    hops_forward_s: Sequence[float],
    hops_backward_s: Sequence[float],
    pipelining: Pipelining | None = None,
) -> Iteration:
    """Put costed stages through a pipeline (1F1B, one stage per rank, unless told) and the step that follows it."""
    how = pipelining or Pipelining("1f1b", tuple(range(len(stages))))
    timing = timing_of(stages, hops_forward_s, hops_backward_s)
    return finish_step(stages, timing, how.run(microbatches, timing), microbatches, how)


def finish_step(
    stages: Sequence[StageCost],
    timing: Timing,
    run: PipelineRun,
    microbatches: int,
    how: Pipelining,
    changes: Sequence[Change] = (),
) -> Iteration:
    """A simulated pipeline and the step that follows it.

    step = max over ranks of (pipeline end + before the norm), then the longest part after the norm. changes: what a
    policy changes per rank; none given means none.
    """
    ranks = how.joined(stages)
    changes = changes or [Change()] * len(ranks)
    rows = list(zip(ranks, run.ranks, changes, strict=True))
    norm_s = max(own.end_s + _time_s(cost.before_norm, change.before_norm) for cost, own, change in rows)
    step_s = norm_s + max(_time_s(cost.after_norm, change.after_norm) for cost, _, change in rows)
    busiest = max(own.compute_s for own in run.ranks)
    work = [cost.micro_batch * microbatches + cost.step + change.total for cost, _, change in rows]
    links_s = how.received_s(timing)
    return Iteration(
        step_s,
        closed_form_s(ranks, microbatches, how.chunks, changes),
        (how.ranks - 1) / (microbatches * how.chunks),
        max(0.0, run.makespan_s / busiest - 1),
        tuple(stages),
        ranks,
        run,
        how.transfers,
        tuple(_fill(part.buckets, own, step_s) for part, own in zip(work, run.ranks, strict=True)),
        tuple(
            part.hidden + Buckets(pp_transfer=max(0.0, microbatches * link_s - own.transfer_s))
            for part, own, link_s in zip(work, run.ranks, links_s, strict=True)
        ),
        tuple(changes),
    )


def _time_s(part: Part, change: Part) -> float:
    return max(0.0, part.time_s + change.time_s)


def closed_form_s(
    ranks: Sequence[StageCost], microbatches: int, chunks: int = 1, changes: Sequence[Change] = ()
) -> float:
    """The source's sum: n t + (P - 1) t / V + what a step does once, with t the mean time of a micro-batch on a rank.

    It spreads all layers evenly and knows no transfers, so it equals the simulation only for equal stages without, under
    the schedules whose bubble it is. changes: what a policy changes per rank; of data parallelism only what shows counts.
    """
    changes = changes or [Change()] * len(ranks)
    mean = sum(rank.micro_batch.time_s for rank in ranks) / len(ranks)
    inside = sum(change.inside.time_s for change in changes) / len(ranks)
    once = max(
        _time_s(rank.step, change.before_norm + change.after_norm) for rank, change in zip(ranks, changes, strict=True)
    )
    return (microbatches + (len(ranks) - 1) / chunks) * mean + inside + once


def _fill(work: Buckets, rank: RankRun, step_s: float) -> Buckets:
    busy = work + Buckets(pp_transfer=rank.transfer_s, pp_wait=rank.wait_s)
    return busy + Buckets(idle=max(0.0, step_s - busy.total))
