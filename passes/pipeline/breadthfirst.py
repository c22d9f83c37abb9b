"""Schedules that run all forwards before the first backward: GPipe and looped breadth-first."""

from __future__ import annotations

from collections.abc import Iterator

from stepgraph.passes.pipeline.actions import BACKWARD, FORWARD, Slot


def gpipe(ranks: int, chunks: int, microbatches: int, rank: int) -> Iterator[Slot]:
    """All forwards, then all backwards, both in the order of the micro-batches.

    Shapes: one stage per rank (chunks = 1).
    Source: Huang et al. 2019 (GPipe), section 2.2; pytorch/pytorch torch/distributed/pipelining/schedules.py,
    ScheduleGPipe, which takes the micro-batches backward in this order too.
    """
    for kind in (FORWARD, BACKWARD):
        yield from (((kind, rank, microbatch),) for microbatch in range(microbatches))


def looped_bfs(ranks: int, chunks: int, microbatches: int, rank: int) -> Iterator[Slot]:
    """Every chunk runs all micro-batches before the next chunk begins; backward is the exact reverse.

    Source: Lamy-Poirier 2023 (Breadth-First Pipeline Parallelism), section 4; pytorch/pytorch
    torch/distributed/pipelining/schedules.py, ScheduleLoopedBFS.
    """
    order = [(stage, which) for stage in range(rank, ranks * chunks, ranks) for which in range(microbatches)]
    yield from (((FORWARD, stage, which),) for stage, which in order)
    yield from (((BACKWARD, stage, which),) for stage, which in reversed(order))
