"""stepsync: gradients and parameters that travel beside computation, on the clock of a simulated pipeline.

Both ends of a step are touched: gathers lengthen the first forwards, reductions begin before the last backward has
ended. Only one micro-batch of each has anything to do with it.

Source: NVIDIA/Megatron-LM megatron/core/distributed/{distributed_data_parallel,param_and_grad_buffer}.py and
megatron/core/pipeline_parallel/schedules.py (grad_sync_func, param_sync_func).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import attrs

from stepgraph.ir.program import Program
from stepgraph.passes.base import Setting
from stepgraph.passes.costing import Costs
from stepgraph.passes.gradsync import Chunk, Travel, chunk_of, gathers, reductions, travels_of
from stepgraph.passes.overlap.gradients import bucketed_tasks, gather_tasks
from stepgraph.passes.overlap.streams import schedule
from stepgraph.passes.overlap.templates import sms_of
from stepgraph.passes.parts import StageCost
from stepgraph.passes.pipeline.accounts import PipelineRun


@attrs.frozen
class RankSync:
    """What one rank moves per step: its buffers, and its chunks with their stages, in the order of the stream."""

    rank: int
    travels: tuple[Travel, ...]
    chunks: tuple[Chunk, ...]
    stages: tuple[int, ...]

    @property
    def reduce_s(self) -> float:
        """Seconds of all gradient collectives."""
        return sum(travel.reduce_s for travel in self.travels)

    @property
    def gather_s(self) -> float:
        """Seconds of all parameter gathers."""
        return sum(travel.gather_s for travel in self.travels)

    def shares(self, chunk: int) -> tuple[Travel, ...]:
        """A chunk's part of every buffer."""
        return tuple(self._share(chunk, travel) for travel in self.travels)

    def _share(self, chunk: int, travel: Travel) -> Travel:
        whole = sum(other.elements(travel.of_experts) for other in self.chunks)
        part = self.chunks[chunk].elements(travel.of_experts) / whole if whole else 0.0
        return attrs.evolve(travel, reduce_s=travel.reduce_s * part, gather_s=travel.gather_s * part)


@attrs.frozen
class Beside:
    """What computation waits for, and what it loses to contention, where collectives run beside it."""

    exposed_s: float = 0.0
    slowdown_s: float = 0.0

    @property
    def added_s(self) -> float:
        """Both together: how much longer computation takes."""
        return self.exposed_s + self.slowdown_s


def syncs_of(program: Program, costed: Mapping[str, Costs], setting: Setting) -> tuple[RankSync, ...]:
    """What every pipeline rank moves."""
    gap_s = setting.launching.gap_s
    chunks = {stage: chunk_of(stage, costed, gap_s) for stage in dict.fromkeys(program.stages)}
    found = []
    for rank in range(1 + max(stage.rank for stage in program.stages)):
        own = tuple(index for index, stage in enumerate(program.stages) if stage.rank == rank)
        step = costed[program.stages[own[0]].step]
        found.append(RankSync(rank, travels_of(step), tuple(chunks[program.stages[i]] for i in own), own))
    return tuple(found)


def reduced(
    sync: RankSync, run: PipelineRun, stages: Sequence[StageCost], setting: Setting, *, aligned: bool
) -> Beside:
    """Gradient collectives of a rank whose last backward ends when `run` says.

    One chunk: rank 0 reduces bucket by bucket in its last backward; the others reduce everything after theirs, which is
    their bubble. Several chunks: each is reduced when its last backward is done. aligned: rank r waits for r backwards
    more, so that all ranks begin together, as Megatron-LM's interleaved schedule has it; the first chunk, which comes
    last, is never late.
    """
    end_s = run.ranks[sync.rank].end_s
    if len(sync.chunks) == 1 and sync.rank == 0:
        begin = end_s - stages[sync.stages[0]].backward.time_s
        calls = [(begin + at, own) for travel in sync.travels for at, own in reductions(sync.chunks[0], travel)]
    else:
        calls = [_late(sync, chunk, run, stages, aligned=aligned) for chunk in range(len(sync.chunks))]
    calls = sorted((min(max(at, 0.0), end_s), own) for at, own in calls)
    marks = [0.0, *(at for at, _ in calls), end_s]
    pieces = [max(0.0, after - before) for before, after in pairwise(marks)]
    line = schedule(bucketed_tasks(pieces, [own for _, own in calls]), sms_of(setting.overlap, setting))
    return Beside(line.total_exposed_s, line.slowdown_s)


def _late(
    sync: RankSync, chunk: int, run: PipelineRun, stages: Sequence[StageCost], *, aligned: bool
) -> tuple[float, float]:
    """(issued, seconds) of the gradients of one whole chunk."""
    stage = sync.stages[chunk]
    shift = sync.rank * stages[stage].backward.time_s if aligned and chunk else 0.0
    return run.last_backward_s[stage] + shift, sum(travel.reduce_s for travel in sync.shares(chunk))


def gathered(sync: RankSync, run: PipelineRun, stages: Sequence[StageCost], setting: Setting) -> tuple[Beside, ...]:
    """What the first forward of each chunk waits for its parameters, and loses to gathers that run beside it.

    One chunk: rank 0 gathers bucket by bucket, the next one while it computes; the others gather everything in front of
    their first forward. Several: the buckets of chunk 0 are all issued at the start of the step, chunk 1 behind them,
    chunk c + 1 when chunk c begins, on rank r after r forwards more. run: the pipeline without any of this.
    """
    if len(sync.chunks) == 1 and sync.rank:
        return (Beside(sync.gather_s),)
    needs = sorted(call for travel in sync.shares(0) for call in gathers(sync.chunks[0], travel))
    if len(sync.chunks) == 1:
        return (_looked_ahead(needs, stages[sync.stages[0]].forward.time_s, setting),)
    return (_queued(needs), *_behind(sync, run, stages))


def _looked_ahead(needs: Sequence[tuple[float, float]], forward_s: float, setting: Setting) -> Beside:
    marks = [*(at for at, _ in needs), max(forward_s, *(at for at, _ in needs))] if needs else []
    pieces = [after - before for before, after in pairwise(marks)]
    line = schedule(gather_tasks([own for _, own in needs], pieces), sms_of(setting.overlap, setting))
    return Beside(line.total_exposed_s, line.slowdown_s)


def _queued(needs: Sequence[tuple[float, float]]) -> Beside:
    """Gathers issued one behind the other; each is waited for where forward needs it."""
    arrived = late = 0.0
    for needed, seconds in needs:
        arrived += seconds
        late = max(late, arrived - needed)
    return Beside(late)


def _behind(sync: RankSync, run: PipelineRun, stages: Sequence[StageCost]) -> list[Beside]:
    """Chunks after the first; they have the forwards of those before them to hide under."""
    free = sum(travel.gather_s for travel in sync.shares(0))
    found = []
    for chunk, (before, stage) in enumerate(pairwise(sync.stages), start=1):
        issued = 0.0 if chunk == 1 else run.first_forward_s[before] + sync.rank * stages[before].forward.time_s
        free = max(free, issued) + sum(travel.gather_s for travel in sync.shares(chunk))
        found.append(Beside(max(0.0, free - run.first_forward_s[stage])))
    return found
