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
from stepgraph.passes.overlap.gradients import bucketed_tasks
from stepgraph.passes.overlap.policies import SMS
from stepgraph.passes.overlap.streams import COMPUTE, Task, schedule
from stepgraph.passes.overlap.templates import sms_of
from stepgraph.passes.pipeline.accounts import PipelineRun
from stepgraph.passes.pipeline.schedule import Schedule
from stepgraph.passes.stepping.gradsync import (
    Piece,
    Travel,
    gathers,
    layer_of,
    pieces_of,
    reductions,
    travels_of,
    without_copies,
)
from stepgraph.passes.stepping.parts import StageCost


@attrs.frozen
class RankSync:
    """What one rank moves per step: its buffers, and the parameters of its chunks, in the order of the stream.

    stages: the virtual stage of each chunk.
    """

    rank: int
    travels: tuple[Travel, ...]
    chunks: tuple[tuple[Piece, ...], ...]
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
        counts = [_elements(pieces, travel) for pieces in self.chunks]
        part = counts[chunk] / sum(counts) if any(counts) else 0.0
        return attrs.evolve(travel, reduce_s=travel.reduce_s * part, gather_s=travel.gather_s * part)


def _elements(pieces: Sequence[Piece], travel: Travel) -> int:
    return sum(piece.elements for piece in pieces if piece.of_experts is travel.of_experts)


@attrs.frozen
class Beside:
    """What computation waits for, and what it loses to contention, where collectives run beside it."""

    exposed_s: float = 0.0
    slowdown_s: float = 0.0

    @property
    def added_s(self) -> float:
        """Both together: how much longer computation takes."""
        return max(0.0, self.exposed_s + self.slowdown_s)  # rounding may leave less than nothing


def syncs_of(
    program: Program, costed: Mapping[str, Costs], stages: Sequence[StageCost], setting: Setting
) -> tuple[RankSync, ...]:
    """What every pipeline rank moves."""
    used = dict.fromkeys(run.template for stage in program.stages for run in stage.runs)
    layers = {name: layer_of(costed[name], setting) for name in used}
    found = []
    for rank in range(1 + max(stage.rank for stage in program.stages)):
        own = tuple(index for index, stage in enumerate(program.stages) if stage.rank == rank)
        step = costed[program.stages[own[0]].step]
        chunks = without_copies([tuple(pieces_of(program.stages[i], stages[i], layers)) for i in own])
        found.append(RankSync(rank, travels_of(step), chunks, own))
    return tuple(found)


def reduced(sync: RankSync, run: PipelineRun, stages: Sequence[StageCost], setting: Setting, order: Schedule) -> Beside:
    """Gradient collectives of a rank whose last backward ends when `run` says.

    Rank 0, if it has one chunk, reduces bucket by bucket in its last backward, unless the order splits backwards. All
    others reduce a chunk when its last backward is done; with one chunk that is in their bubble. In an aligned order rank
    r waits for r backwards of the chunk that follows, so that all ranks begin together; the first chunk, which comes last,
    is never late.
    """
    end_s = run.ranks[sync.rank].end_s
    if len(sync.chunks) == 1 and sync.rank == 0 and not order.splits_backward:
        begin = end_s - stages[sync.stages[0]].backward.time_s
        calls = [(begin + at, own) for travel in sync.travels for at, own in reductions(sync.chunks[0], travel)]
    else:
        calls = [_whole(sync, chunk, run, stages, aligned=order.aligned) for chunk in range(len(sync.chunks))]
    calls = sorted((min(max(at, 0.0), end_s), own) for at, own in calls)
    marks = [0.0, *(at for at, _ in calls), end_s]
    pieces = [max(0.0, after - before) for before, after in pairwise(marks)]
    line = schedule(bucketed_tasks(pieces, [own for _, own in calls]), sms_of(setting.overlap, setting))
    return Beside(line.total_exposed_s, line.slowdown_s)


def _whole(
    sync: RankSync, chunk: int, run: PipelineRun, stages: Sequence[StageCost], *, aligned: bool
) -> tuple[float, float]:
    """(issued, seconds) of the gradients of one whole chunk."""
    late = sync.rank * stages[sync.stages[chunk - 1]].backward.time_s if aligned and chunk else 0.0
    return run.last_backward_s[sync.stages[chunk]] + late, sum(travel.reduce_s for travel in sync.shares(chunk))


def gathered(sync: RankSync, stages: Sequence[StageCost], setting: Setting) -> Beside:
    """What the first forward of a rank's only chunk waits for its parameters, and loses to gathers beside it.

    Rank 0 gathers each buffer bucket by bucket, the next one while it computes: c_0 + sum of max(0, c_(k+1) - f_k). The
    others gather everything in front of their first forward, once its input has arrived.
    """
    if sync.rank:
        return Beside(sync.gather_s)
    chains = [gathers(sync.chunks[0], travel) for travel in sync.travels]
    line = schedule(gather_chains(chains, stages[sync.stages[0]].forward.time_s), sms_of(setting.overlap, setting))
    return Beside(line.total_exposed_s, line.slowdown_s)


def gather_chains(chains: Sequence[Sequence[tuple[float, float]]], forward_s: float) -> list[Task]:
    """One forward whose parameters are gathered one bucket ahead, each chain (needed, seconds) of buckets by itself.

    Where a bucket is needed it is issued if it was not, waited for, and the next of its chain is issued.
    """
    needs = sorted((at, chain, k) for chain, own in enumerate(chains) for k, (at, _) in enumerate(own))
    tasks: list[Task] = []
    issued: dict[tuple[int, int], int] = {}
    waited: tuple[int, ...] = ()

    def issue(chain: int, k: int, after: tuple[int, ...]) -> None:
        if k < len(chains[chain]) and (chain, k) not in issued:
            issued[chain, k] = len(tasks)
            tasks.append(("dp", chains[chain][k][1], after, SMS["nccl"]))

    for (at, chain, k), (until, *_) in pairwise([*needs, (max(forward_s, *(at for at, *_ in needs), 0.0), 0, 0)]):
        issue(chain, k, waited)
        waited = (*waited[:1], issued[chain, k])
        issue(chain, k + 1, waited)
        tasks.append((COMPUTE, until - at, waited, 0))
        waited = (len(tasks) - 1,)
    return tasks


def arrivals_s(sync: RankSync, run: PipelineRun, stages: Sequence[StageCost]) -> tuple[float, ...]:
    """When the first forward of each of a rank's several chunks may begin without waiting for parameters on the way.

    Chunk 0 is issued at the start of the step, on rank 0 in buckets, chunk 1 behind it, chunk c + 1 when chunk c begins;
    rank r issues that r forwards earlier, so that all ranks begin together. run: the pipeline without any of this.
    """
    free = sum(travel.gather_s for travel in sync.shares(0))
    found = [free if sync.rank else _begin(sync)]
    for chunk, before in enumerate(sync.stages[:-1], start=1):
        early = run.first_forward_s[before] - sync.rank * stages[before].forward.time_s
        issued = 0.0 if chunk == 1 else max(0.0, early)
        free = max(free, issued) + sum(travel.gather_s for travel in sync.shares(chunk))
        found.append(free)
    return tuple(found)


def _begin(sync: RankSync) -> float:
    """From when on no bucket of chunk 0, all issued at once, arrives too late for its need."""
    arrived = begin = 0.0
    for needed, seconds in sorted(call for travel in sync.shares(0) for call in gathers(sync.chunks[0], travel)):
        arrived += seconds
        begin = max(begin, arrived - needed)
    return begin


def held_s(plain: PipelineRun, run: PipelineRun) -> tuple[float, ...]:
    """By how much more the first forward of each stage is late than that of the stage before it.

    plain: the same pipeline with all parameters there.
    """
    late = [after - before for before, after in zip(plain.first_forward_s, run.first_forward_s, strict=True)]
    return tuple(max(0.0, own - before) for before, own in zip([0.0, *late], late, strict=False))
