"""overlapped: a pipeline run under a policy, and what the policy changes of each rank's account."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from stepgraph.ir.program import Program
from stepgraph.passes.base import Setting
from stepgraph.passes.buckets import Buckets
from stepgraph.passes.costing import Costs
from stepgraph.passes.pairs import Pair, count_pairs, joint_changes, pair_changes, pair_s
from stepgraph.passes.parts import Part, StageCost
from stepgraph.passes.pipeline.accounts import PipelineRun
from stepgraph.passes.pipeline.timing import Timing
from stepgraph.passes.pipelining import Pipelining
from stepgraph.passes.stepsync import Beside, RankSync, gathered, reduced, syncs_of


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


def run_overlapped(
    program: Program,
    costed: Mapping[str, Costs],
    stages: Sequence[StageCost],
    timing: Timing,
    how: Pipelining,
    setting: Setting,
) -> tuple[PipelineRun, tuple[Change, ...]]:
    """The pipeline under the setting's policy, and what that changes per rank."""
    found: dict[Pair, Part] = {}
    if how.combined:
        found = pair_changes(program, costed, setting)
        timing = attrs.evolve(timing, pair_s=pair_s(found, stages))
    elif how.transfers.joint:
        found = joint_changes(stages, how.owners, how.transfers.joint)
    changes = _of_pairs(found, how, program.microbatches)
    run = how.run(program.microbatches, timing)
    policy = setting.overlap
    if not (policy.grad_reduce or policy.param_gather):
        return run, tuple(changes)
    syncs = syncs_of(program, costed, setting)
    if policy.param_gather:
        extra = [gathered(sync, run, stages, setting) for sync in syncs]
        run = how.run(program.microbatches, attrs.evolve(timing, first_extra_s=_by_stage(syncs, extra)))
        changes = [_gathers(*found) for found in zip(changes, syncs, extra, strict=True)]
    if policy.grad_reduce:
        aligned = how.schedule == "interleaved"
        beside = [reduced(sync, run, stages, setting, aligned=aligned) for sync in syncs]
        changes = [_reductions(*found) for found in zip(changes, syncs, beside, strict=True)]
    return run, tuple(changes)


def _of_pairs(found: Mapping[Pair, Part], how: Pipelining, microbatches: int) -> list[Change]:
    """What all pairs of a step change, per rank."""
    if not found:
        return [Change()] * how.ranks
    counts = count_pairs(how.order_of(), how.ranks, how.chunks, microbatches)
    return [Change(inside=sum((found[pair] * times for pair, times in own.items()), Part())) for own in counts]


def _by_stage(syncs: Sequence[RankSync], extra: Sequence[Sequence[Beside]]) -> tuple[float, ...]:
    """Seconds per virtual stage, in the order of the stream."""
    placed = [
        (stage, own.added_s)
        for sync, found in zip(syncs, extra, strict=True)
        for stage, own in zip(sync.stages, found, strict=True)
    ]
    return tuple(seconds for _, seconds in sorted(placed))


def _gathers(change: Change, sync: RankSync, found: Sequence[Beside]) -> Change:
    """Parameters are no longer gathered after the norm, but in front of the first forwards, as far as that shows."""
    exposed, slow = sum(own.exposed_s for own in found), sum(own.slowdown_s for own in found)
    inside = Part(Buckets(dp=exposed, gemm=slow), hidden=Buckets(dp=max(0.0, sync.gather_s - exposed)))
    after = Part(Buckets(dp=-sync.gather_s))
    return attrs.evolve(change, inside=change.inside + inside, after_norm=change.after_norm + after)


def _reductions(change: Change, sync: RankSync, found: Beside) -> Change:
    hidden = max(0.0, sync.reduce_s - found.exposed_s)
    part = Part(Buckets(dp=-hidden, gemm=found.slowdown_s), hidden=Buckets(dp=hidden))
    return attrs.evolve(change, before_norm=change.before_norm + part)
