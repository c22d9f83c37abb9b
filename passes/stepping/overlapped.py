"""overlapped: a pipeline run under a policy, and what the policy changes of each rank's account."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from stepgraph.ir.program import Program
from stepgraph.passes.base import Setting
from stepgraph.passes.buckets import Buckets
from stepgraph.passes.costing import Costs
from stepgraph.passes.pipeline.accounts import PipelineRun
from stepgraph.passes.pipeline.timing import Timing
from stepgraph.passes.stepping.pairs import Pair, count_pairs, joint_changes, pair_changes, pair_s
from stepgraph.passes.stepping.parts import Part, StageCost
from stepgraph.passes.stepping.pipelining import Pipelining
from stepgraph.passes.stepping.stepsync import Beside, RankSync, arrivals_s, gathered, held_s, reduced, syncs_of


@attrs.frozen
class Change:
    """What a policy changes of one rank's step: in the pipeline, before the gradient norm, after it."""

    inside: Part = Part()
    before_norm: Part = Part()
    after_norm: Part = Part()

    @property
    def total(self) -> Part:
        """All of it."""
        return self.inside + self.before_norm + self.after_norm


@attrs.frozen(eq=False)
class CostedStages:
    """A program's stages, costed, and how they share a pipeline. setting: with the seats that the program's groups take."""

    program: Program
    costed: Mapping[str, Costs]
    stages: tuple[StageCost, ...]
    timing: Timing
    how: Pipelining
    setting: Setting


def run_overlapped(step: CostedStages, microbatches: int) -> tuple[PipelineRun, tuple[Change, ...]]:
    """The pipeline under the setting's policy, and what that changes per rank.

    Pairs come first, because they change what a micro-batch takes; then gathers, which change when it begins; then
    reductions, which begin when the pipeline lets them.
    """
    step, changes = _with_pairs(step, microbatches)
    run = step.how.run(microbatches, step.timing)
    policy = step.setting.overlap
    if not (policy.grad_reduce or policy.param_gather):
        return run, tuple(changes)
    syncs = syncs_of(step.program, step.costed, step.stages, step.setting)
    if policy.param_gather and any(sync.gather_s for sync in syncs):
        gather = _gathered_first if step.how.chunks == 1 else _gathered_ahead
        run, inside = gather(step, syncs, run, microbatches)
        changes = [_gathers(*found) for found in zip(changes, syncs, inside, strict=True)]
    if policy.grad_reduce:
        order = step.how.order_of()
        beside = [reduced(sync, run, step.stages, step.setting, order) for sync in syncs]
        changes = [_reductions(*found) for found in zip(changes, syncs, beside, strict=True)]
    return run, tuple(changes)


def _with_pairs(step: CostedStages, microbatches: int) -> tuple[CostedStages, list[Change]]:
    """Forwards and backwards as pairs, by the policy or by the mode; and what all pairs of a step change, per rank."""
    how, found = step.how, dict[Pair, Part]()
    if how.combined:
        found = pair_changes(step.program, step.costed, step.stages, step.setting)
        step = attrs.evolve(step, timing=attrs.evolve(step.timing, pair_s=pair_s(found, step.stages)))
    elif how.transfers.joint:
        found = joint_changes(step.stages, how.owners, how.transfers.joint)
    if not found:
        return step, [Change()] * how.ranks
    counts = count_pairs(how.order_of(), how.ranks, how.chunks, microbatches)
    sums = (sum((found[pair] * times for pair, times in own.items()), Part()) for own in counts)
    return step, [Change(inside=own) for own in sums]


def _gathered_first(
    step: CostedStages, syncs: Sequence[RankSync], run: PipelineRun, microbatches: int
) -> tuple[PipelineRun, list[Buckets]]:
    """One chunk per rank: its first forward takes longer."""
    extra = [gathered(sync, step.stages, step.setting) for sync in syncs]
    later = step.how.run(microbatches, attrs.evolve(step.timing, first_extra_s=[own.added_s for own in extra]))
    return later, [Buckets(dp=own.exposed_s, gemm=own.slowdown_s) for own in extra]


def _gathered_ahead(
    step: CostedStages, syncs: Sequence[RankSync], run: PipelineRun, microbatches: int
) -> tuple[PipelineRun, list[Buckets]]:
    """Several chunks: gathers are issued at the start of the step; a first forward that is early waits for its own."""
    ready = [0.0] * len(step.stages)
    for sync in syncs:
        for stage, at in zip(sync.stages, arrivals_s(sync, run, step.stages), strict=True):
            ready[stage] = at
    later = step.how.run(microbatches, attrs.evolve(step.timing, first_not_before_s=ready))
    held = held_s(run, later)
    waits = [min(sum(held[stage] for stage in sync.stages), later.ranks[sync.rank].wait_s) for sync in syncs]
    return later, [Buckets(dp=wait, pp_wait=-wait) for wait in waits]


def _gathers(change: Change, sync: RankSync, inside: Buckets) -> Change:
    """Parameters are no longer gathered after the norm, but in front of the first forwards, as far as that shows."""
    part = Part(inside, hidden=Buckets(dp=max(0.0, sync.gather_s - inside.dp)))
    after = Part(Buckets(dp=-sync.gather_s))
    return attrs.evolve(change, inside=change.inside + part, after_norm=change.after_norm + after)


def _reductions(change: Change, sync: RankSync, found: Beside) -> Change:
    hidden = max(0.0, sync.reduce_s - found.exposed_s)
    part = Part(Buckets(dp=-hidden, gemm=found.slowdown_s), hidden=Buckets(dp=hidden))
    return attrs.evolve(change, before_norm=change.before_norm + part)
