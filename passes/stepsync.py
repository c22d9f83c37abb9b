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


def gathered(sync: RankSync, stages: Sequence[StageCost], setting: Setting) -> Beside:
    """What the first forward of a rank's only chunk waits for its parameters, and loses to gathers beside it.

    Rank 0 gathers bucket by bucket, the next one while it computes: c_0 + sum of max(0, c_(k+1) - f_k). The others gather
    everything in front of their first forward, once its input has arrived.
    """
    if sync.rank:
        return Beside(sync.gather_s)
    needs = sorted(call for travel in sync.travels for call in gathers(sync.chunks[0], travel))
    marks = [*(at for at, _ in needs), max(stages[sync.stages[0]].forward.time_s, *(at for at, _ in needs), 0.0)]
    pieces = [after - before for before, after in pairwise(marks)]
    line = schedule(gather_tasks([own for _, own in needs], pieces), sms_of(setting.overlap, setting))
    return Beside(line.total_exposed_s, line.slowdown_s)


def arrivals_s(sync: RankSync, run: PipelineRun, stages: Sequence[StageCost]) -> tuple[float, ...]:
    """When the first forward of each of a rank's several chunks may begin without waiting for parameters on the way.

    The buckets of chunk 0 are all issued at the start of the step, chunk 1 behind them, chunk c + 1 when chunk c begins,
    on rank r after r forwards more, so that all ranks begin together. run: the pipeline without any of this.
    """
    free, begin = _queued(sync)
    found = [begin]
    for chunk, before in enumerate(sync.stages[:-1], start=1):
        issued = 0.0 if chunk == 1 else run.first_forward_s[before] + sync.rank * stages[before].forward.time_s
        free = max(free, issued) + sum(travel.gather_s for travel in sync.shares(chunk))
        found.append(free)
    return tuple(found)


def _queued(sync: RankSync) -> tuple[float, float]:
    """Gathers of chunk 0, issued at once: when all have arrived, and from when on none is too late for its need."""
    arrived = begin = 0.0
    for needed, seconds in sorted(call for travel in sync.shares(0) for call in gathers(sync.chunks[0], travel)):
        arrived += seconds
        begin = max(begin, arrived - needed)
    return arrived, begin


def held_s(plain: PipelineRun, run: PipelineRun) -> tuple[float, ...]:
    """By how much more the first forward of each stage is late than that of the stage before it.

    plain: the same pipeline with all parameters there.
    """
    late = [after - before for before, after in zip(plain.first_forward_s, run.first_forward_s, strict=True)]
    return tuple(max(0.0, own - before) for before, own in zip([0.0, *late], late, strict=False))
