"""stepsync: a step whose gradients and parameters travel under computation, given when its pipeline ran what.

Both sides of the pipeline are touched: gathers lengthen the first forwards, reductions start before the last backward
has ended. What is left exposed stays in the bucket `dp`; what contention adds to compute goes to `gemm`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import attrs

from stepgraph.ir.program import Program
from stepgraph.passes.base import Setting
from stepgraph.passes.buckets import Buckets
from stepgraph.passes.costing import Costs
from stepgraph.passes.gradsync import Chunk, Travel, calls, chunk_of, travels_of
from stepgraph.passes.overlap.policies import SMS
from stepgraph.passes.parts import Part, StageCost
from stepgraph.passes.pipeline.accounts import PipelineRun


@attrs.frozen
class RankSync:
    """What one rank moves per step: its buffers, its chunks in the order of the stream and their stages."""

    rank: int
    travels: tuple[Travel, ...]
    chunks: tuple[Chunk, ...]
    stages: tuple[int, ...]

    def share_s(self, chunk: int, *, gather: bool) -> float:
        """Seconds of one chunk's part of every buffer."""
        return sum(
            (travel.gather_s if gather else travel.reduce_s) * self._share(chunk, travel.of_experts)
            for travel in self.travels
        )

    def _share(self, chunk: int, of_experts: bool) -> float:
        whole = sum(other.elements(of_experts) for other in self.chunks)
        return self.chunks[chunk].elements(of_experts) / whole if whole else 0.0

    @property
    def reduce_s(self) -> float:
        """Seconds of all gradient collectives."""
        return sum(travel.reduce_s for travel in self.travels)

    @property
    def gather_s(self) -> float:
        """Seconds of all parameter gathers."""
        return sum(travel.gather_s for travel in self.travels)


def syncs_of(program: Program, costed: Mapping[str, Costs], setting: Setting) -> tuple[RankSync, ...]:
    """What every pipeline rank moves."""
    gap_s = setting.launching.gap_s
    chunks = {stage: chunk_of(program, stage, costed, gap_s) for stage in dict.fromkeys(program.stages)}
    found = []
    for rank in range(max(stage.rank for stage in program.stages) + 1):
        own = tuple(index for index, stage in enumerate(program.stages) if stage.rank == rank)
        step = costed[program.stages[own[0]].step]
        found.append(RankSync(rank, travels_of(step), tuple(chunks[program.stages[i]] for i in own), own))
    return tuple(found)


def contention(setting: Setting) -> float:
    """Seconds that compute loses per second that a collective runs beside it: 1 - 1 / kappa, kappa = S / (S - n_sm).

    Source: see `stepgraph.passes.overlap.policies.SMS`.
    """
    return SMS["nccl"] / setting.target.compute.sms if setting.overlap.contention else 0.0


def gather_extra_s(sync: RankSync, run: PipelineRun, stages: Sequence[StageCost]) -> tuple[float, ...]:
    """Seconds by which the first forward of each chunk waits for its parameters.

    One chunk: rank 0 gathers bucket by bucket, the next one while it computes: c_0 + sum of max(0, c_(k+1) - f_k); the
    other ranks gather everything in front of it. Several chunks: those of chunks 0 and 1 are issued at the start of the
    step, that of chunk c + 1 when chunk c begins (rank r waits for r more micro-batches, to begin with the others).
    run: the pipeline without any of this.
    """
    if len(sync.chunks) == 1:
        return (_look_ahead_s(sync) if sync.rank == 0 else sync.gather_s,)
    extra, free = [_queued_s(sync)], sync.share_s(0, gather=True)
    for chunk, (before, stage) in enumerate(pairwise(sync.stages), start=1):
        issued = 0.0 if chunk == 1 else run.first_forward_s[before] + sync.rank * stages[before].forward.time_s
        free = max(free, issued) + sync.share_s(chunk, gather=True)
        extra.append(max(0.0, free - run.first_forward_s[stage] - extra[0]))
    return tuple(extra)


def _needs(sync: RankSync) -> list[tuple[float, float]]:
    """(needed at, seconds) of the gathers of the first chunk, in order of need."""
    first = sync.chunks[0]
    found = []
    for travel in sync.travels:
        pieces = first.forward[travel.of_experts]
        seconds = travel.gather_s * sync._share(0, travel.of_experts)
        found.extend(_first_needs(pieces, travel.buckets, seconds))
    return sorted(found)


def _first_needs(pieces: Sequence[tuple[int, float]], buckets: int, seconds: float) -> list[tuple[float, float]]:
    """As `calls`, but a bucket is needed when the first of its pieces is."""
    found, begin = [], pieces[0][1] if pieces else 0.0
    for end, taken in calls(pieces, buckets, seconds):
        found.append((begin, taken))
        begin = end
    return found


def _look_ahead_s(sync: RankSync) -> float:
    """c_0 + sum of max(0, c_(k+1) - f_k): the gather of the next bucket is issued when the one before has arrived."""
    needs = _needs(sync)
    exposed = needs[0][1] if needs else 0.0
    for (here, _), (after, seconds) in pairwise(needs):
        exposed += max(0.0, seconds - (after - here))
    return exposed


def _queued_s(sync: RankSync) -> float:
    """All gathers of the first chunk are issued at once; each is waited for where it is needed first."""
    arrived = late = 0.0
    for needed, seconds in _needs(sync):
        arrived += seconds
        late = max(late, arrived - needed)
    return late


def reduce_exposed_s(
    sync: RankSync, run: PipelineRun, stages: Sequence[StageCost], slow: float, *, aligned: bool
) -> tuple[float, float]:
    """Seconds of gradient collectives after a rank's last backward, and by how much they lengthen that backward.

    slow: see `contention`. aligned: chunks wait for the other ranks (rank r for r more micro-batches), as Megatron-LM's
    interleaved schedule has it.
    """
    end_s = run.ranks[sync.rank].end_s
    busy = 0.0
    for ready, seconds in sorted(_ready(sync, run, stages, end_s, aligned=aligned)):
        busy = max(busy, min(ready, end_s)) + seconds
    exposed = max(0.0, busy - end_s)
    hidden = sync.reduce_s - exposed
    slowdown = max(0.0, hidden) * slow
    return max(0.0, exposed - slowdown), slowdown


def _ready(
    sync: RankSync, run: PipelineRun, stages: Sequence[StageCost], end_s: float, *, aligned: bool
) -> list[tuple[float, float]]:
    """(ready at, seconds) of every gradient collective of a rank, on the clock of the step."""
    if len(sync.chunks) == 1 and sync.rank == 0:
        begin = end_s - stages[sync.stages[0]].backward.time_s
        pieces = sync.chunks[0].backward
        return [
            (begin + at, taken)
            for travel in sync.travels
            for at, taken in calls(pieces[travel.of_experts], travel.buckets, travel.reduce_s)
        ]
    found = []
    for chunk, stage in enumerate(sync.stages):
        late = sync.rank * stages[stage].backward.time_s if aligned and chunk else 0.0
        found.append((run.last_backward_s[stage] + late, sync.share_s(chunk, gather=False)))
    return found


def with_reductions(cost: StageCost, sync: RankSync, exposed_s: float, slowdown_s: float) -> StageCost:
    """A rank whose gradient collectives are exposed for so long only."""
    hidden = sync.reduce_s - exposed_s
    change = Part(Buckets(dp=-hidden, gemm=slowdown_s), hidden=Buckets(dp=hidden))
    return attrs.evolve(cost, before_norm=cost.before_norm + change)


def with_gathers(cost: StageCost, sync: RankSync, extra_s: float) -> StageCost:
    """A rank that gathers its parameters in front of its first forwards: `extra_s` of it is waited for there."""
    change = Part(Buckets(dp=-sync.gather_s), hidden=Buckets(dp=sync.gather_s - extra_s))
    return attrs.evolve(cost, after_norm=cost.after_norm + change)
