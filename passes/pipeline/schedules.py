"""The pipeline schedules by name."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from stepgraph.errors import did_you_mean, refuse
from stepgraph.passes.pipeline.breadthfirst import gpipe, looped_bfs
from stepgraph.passes.pipeline.onefoneb import (
    COMBINED_REPEATS,
    INTERLEAVED_REPEATS,
    ONE_F_ONE_B_REPEATS,
    combined_interleaved,
    combined_one_f_one_b,
    group_size,
    interleaved,
    one_f_one_b,
)
from stepgraph.passes.pipeline.schedule import Schedule
from stepgraph.passes.pipeline.vshaped import DUALPIPEV_REPEATS, ZBV_REPEATS, dualpipev, zbv
from stepgraph.passes.pipeline.zerobubble import ZB_H1_REPEATS, zb_h1

__all__ = ["SCHEDULES", "Schedule", "schedule_of"]


def _equal_groups(ranks: int, chunks: int, microbatches: int) -> bool:
    return group_size(ranks, chunks, microbatches) > 0


def _multiple(ranks: int, chunks: int, microbatches: int) -> bool:
    return microbatches % ranks == 0


def _two_per_rank(ranks: int, chunks: int, microbatches: int) -> bool:
    return microbatches >= 2 * ranks


_TORCH = "pytorch/pytorch torch/distributed/pipelining/schedules.py"
_MEGATRON = "NVIDIA/Megatron-LM megatron/core/pipeline_parallel"
_ZERO_BUBBLE = "Qi et al. 2023, Zero Bubble Pipeline Parallelism"
_GROUPS = "a multiple of pp, or another number n that n // pp divides"

_ALL: Final = (
    Schedule(
        "gpipe",
        "GPipe",
        "loop",
        chunks=1,
        splits_backward=False,
        source="Huang et al. 2019, GPipe",
        rank_slots=gpipe,
        blocking=True,
    ),
    Schedule(
        "1f1b",
        "1F1B",
        "loop",
        chunks=1,
        splits_backward=False,
        source=f"Narayanan et al. 2021, section 2.2; {_MEGATRON}/schedules.py",
        rank_slots=one_f_one_b,
        repeating=ONE_F_ONE_B_REPEATS,
        blocking=True,
        combined=Schedule(
            "1f1b",
            "combined 1F1B",
            "loop",
            chunks=1,
            splits_backward=False,
            source=f"{_MEGATRON}/combined_1f1b.py",
            rank_slots=combined_one_f_one_b,
            pairs=True,
            repeating=COMBINED_REPEATS,
            most_ranks=1,
        ),
    ),
    Schedule(
        "interleaved",
        "interleaved 1F1B",
        "loop",
        chunks=0,
        splits_backward=False,
        source=f"Narayanan et al. 2021, section 2.2; {_MEGATRON}/schedules.py; {_TORCH} (ScheduleInterleaved1F1B)",
        rank_slots=interleaved,
        repeating=INTERLEAVED_REPEATS,
        aligned=True,
        takes=_equal_groups,
        takes_text=_GROUPS,
        combined=Schedule(
            "interleaved",
            "combined interleaved 1F1B",
            "loop",
            chunks=0,
            splits_backward=False,
            source=f"{_MEGATRON}/combined_1f1b.py",
            rank_slots=combined_interleaved,
            pairs=True,
            repeating=COMBINED_REPEATS,
            fewest_chunks=2,
            aligned=True,
            takes=_multiple,
            takes_text="a multiple of pp",
        ),
    ),
    Schedule(
        "zb-h1",
        "ZB-H1",
        "loop",
        chunks=0,
        splits_backward=True,
        source=f"{_ZERO_BUBBLE}, section 2; {_TORCH} (ScheduleInterleavedZeroBubble)",
        rank_slots=zb_h1,
        repeating=ZB_H1_REPEATS,
        takes=_equal_groups,
        takes_text=_GROUPS,
    ),
    Schedule(
        "zbv",
        "ZB-V",
        "v",
        chunks=2,
        splits_backward=True,
        source=f"{_ZERO_BUBBLE}, section 6; {_TORCH} (ScheduleZBVZeroBubble)",
        rank_slots=zbv,
        repeating=ZBV_REPEATS,
    ),
    Schedule(
        "dualpipev",
        "DualPipeV",
        "v",
        chunks=2,
        splits_backward=True,
        source=f"deepseek-ai/DualPipe dualpipe/dualpipev.py; {_TORCH} (ScheduleDualPipeV)",
        rank_slots=dualpipev,
        pairs=True,
        repeating=DUALPIPEV_REPEATS,
        takes=_two_per_rank,
        takes_text="2 pp or more",
    ),
    Schedule(
        "looped-bfs",
        "looped breadth-first",
        "loop",
        chunks=0,
        splits_backward=False,
        source=f"Lamy-Poirier 2023, Breadth-First Pipeline Parallelism; {_TORCH} (ScheduleLoopedBFS)",
        rank_slots=looped_bfs,
    ),
)

SCHEDULES: Final = MappingProxyType({schedule.name: schedule for schedule in _ALL})
"""Every schedule by its name."""


def schedule_of(name: str) -> Schedule:
    """The schedule of that name, in any case.

    Raises: InputError (pipeline-schedule) with a suggestion.
    """
    schedule = SCHEDULES.get(name.lower())
    if schedule is None:
        fix = did_you_mean(name.lower(), SCHEDULES)
        raise refuse("pipeline-schedule", "schedule", f"unknown schedule {name[:40]!r}", " or ".join(SCHEDULES), fix)
    return schedule
