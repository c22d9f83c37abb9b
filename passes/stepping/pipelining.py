"""pipelining: how the stages of a program share a pipeline, and the run of their times through it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import attrs

from stepgraph.errors import InputError, refuse
from stepgraph.passes.overlap.policychecks import PAIRING
from stepgraph.passes.pipeline.accounts import PipelineRun
from stepgraph.passes.pipeline.modes import ASYNC, BLOCKING, Mode, refuse_without_pairs
from stepgraph.passes.pipeline.schedule import Schedule
from stepgraph.passes.pipeline.schedules import schedule_of
from stepgraph.passes.pipeline.simulation import simulate_schedule
from stepgraph.passes.pipeline.timing import Timing
from stepgraph.passes.stepping.parts import StageCost, joined_chunks

MOST_SLOTS = 150_000
"""Stages x micro-batches that are simulated one by one, a few seconds; with a steady state a step may be longer."""


@attrs.frozen
class Pipelining:
    """The schedule's name, the rank of every stage in the order of the stream, and how transfers are issued.

    mode: None is what the framework that the schedule comes from does by default. combined: forwards and backwards run
    as pairs where the schedule has a form for that.
    """

    schedule: str
    owners: tuple[int, ...]
    mode: Mode | None = None
    combined: bool = False

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return max(self.owners) + 1

    @property
    def chunks(self) -> int:
        """Virtual stages per rank."""
        return len(self.owners) // self.ranks

    @property
    def transfers(self) -> Mode:
        """The mode in effect."""
        return self.mode or usual_transfers(self.schedule)

    def order_of(self) -> Schedule:
        """The schedule, in its combined form where that is asked for.

        Raises: InputError (overlap-expert-comm) when it pairs nothing.
        """
        schedule = schedule_of(self.schedule)
        if not self.combined:
            return schedule
        if self.transfers.joint:
            what = f"{self.transfers} gives pairs a time, which this policy derives from their ops"
            raise refuse("overlap-expert-comm", "--overlap", what, "one of the two", "leave out --p2p-mode")
        if schedule.combined is not None:
            return schedule.combined
        if not schedule.pairs:
            what = f"schedule {self.schedule} never runs a forward and a backward together"
            expected = "--schedule 1f1b" if self.ranks == 1 else f"--schedule {' or '.join(PAIRING)}"
            raise refuse("overlap-expert-comm", "--overlap", what, expected)
        return schedule

    def run(self, microbatches: int, timing: Timing) -> PipelineRun:
        """Simulate. Raises: InputError (too-many-micro-batches, pipeline-microbatches, pipeline-mode)."""
        schedule = self.order_of()
        refuse_without_pairs(self.transfers, self.schedule, pairs=schedule.pairs, where="--p2p-mode")
        try:
            return simulate_schedule(
                schedule, self.ranks, self.chunks, microbatches, timing, self.transfers, most_slots=MOST_SLOTS
            )
        except InputError as refused:
            raise self._for_users(refused) from None

    def _for_users(self, refused: InputError) -> InputError:
        """A refusal of the simulation in terms of a layout."""
        code = refused.problems[0].code
        if code == "pipeline-deadlock":
            what = f"transfers that are {self.transfers} lock under schedule {self.schedule}: ranks wait for each other"
            return refuse(code, "--p2p-mode", what, "async", "leave --p2p-mode out")
        if code != "pipeline-size":
            return refused
        return InputError(
            attrs.evolve(problem, code="too-many-micro-batches", where="global_batch", fix="raise the micro-batch")
            for problem in refused.problems
        )

    def received_s(self, timing: Timing) -> tuple[float, ...]:
        """Seconds in which the links carry what each rank receives for one micro-batch."""
        found = [0.0] * self.ranks
        for boundary, (before, after) in enumerate(pairwise(self.owners)):
            if before != after:
                found[after] += timing.hop_forward_s[boundary]
                found[before] += timing.hop_backward_s[boundary]
        return tuple(found)

    def joined(self, stages: Iterable[StageCost]) -> tuple[StageCost, ...]:
        """What each rank runs, its chunks together."""
        chunks: dict[int, list[StageCost]] = {rank: [] for rank in range(self.ranks)}
        for rank, stage in zip(self.owners, stages, strict=True):
            chunks[rank].append(stage)
        return tuple(joined_chunks(own) for own in chunks.values())


def usual_transfers(schedule: str) -> Mode:
    """How transfers are issued if nobody says it: Megatron-LM's batched calls for GPipe and 1F1B, else sends that never
    block.

    Megatron-LM's interleaved schedule hides its transfers in the steady state (mode overlap). With equal stages and hops
    shorter than a chunk's forward that takes as long as sends that never block, which are simulated four times as fast.
    """
    return BLOCKING if schedule_of(schedule).blocking else ASYNC


def timing_of(stages: Sequence[StageCost], hops_forward_s: Sequence[float], hops_backward_s: Sequence[float]) -> Timing:
    """Seconds of every computation and transfer of a pipeline."""
    return Timing(
        forward_s=[stage.forward.time_s for stage in stages],
        backward_s=[stage.backward.time_s for stage in stages],
        weight_s=[min(stage.weight_s, stage.backward.time_s) for stage in stages],
        hop_forward_s=hops_forward_s,
        hop_backward_s=hops_backward_s,
    )
