"""1F1B, interleaved 1F1B and the combined form of both: warm-up forwards, then one forward and one backward in turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from stepgraph.passes.pipeline.actions import BACKWARD, FORWARD, Action, Slot
from stepgraph.passes.pipeline.repeating import Repeating, Turn, every_microbatch


def one_f_one_b(ranks: int, chunks: int, microbatches: int, rank: int) -> Iterator[Slot]:
    """1F1B: rank r warms up with P - 1 - r forwards, so that its first backward finds its input soonest.

    Shapes: one stage per rank (chunks = 1).
    Source: Narayanan et al. 2021 (Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM),
    section 2.2; NVIDIA/Megatron-LM megatron/core/pipeline_parallel/schedules.py, get_pp_rank_microbatches.
    """
    forwards, backwards = passes(ranks, chunks, microbatches, rank, BACKWARD)
    return _in_turn(forwards, backwards, ranks - 1 - rank)


def interleaved(ranks: int, chunks: int, microbatches: int, rank: int) -> Iterator[Slot]:
    """Interleaved 1F1B: chunks take groups of g micro-batches by turns; (V - 1) g + 2 (P - 1 - r) warm-up forwards.

    Source: as for 1F1B; pytorch/pytorch torch/distributed/pipelining/schedules.py, ScheduleInterleaved1F1B.
    """
    forwards, backwards = passes(ranks, chunks, microbatches, rank, BACKWARD)
    return _in_turn(forwards, backwards, _interleaved_warm_up(ranks, chunks, microbatches, rank))


def combined_one_f_one_b(ranks: int, chunks: int, microbatches: int, rank: int) -> Iterator[Slot]:
    """Without a pipeline: the backward of a micro-batch runs as one with the forward of the next. F0, F1 B0, F2 B1, ...

    Shapes: ranks = chunks = 1.
    Source: NVIDIA/Megatron-LM megatron/core/pipeline_parallel/combined_1f1b.py,
    combined_1f1b_schedule_for_no_pipelining.
    """
    forwards, backwards = passes(ranks, chunks, microbatches, rank, BACKWARD)
    return _paired(forwards, backwards, 1)


def combined_interleaved(ranks: int, chunks: int, microbatches: int, rank: int) -> Iterator[Slot]:
    """Interleaved 1F1B whose forward and backward run as one slot; a warm-up forward more keeps the two independent.

    Source: NVIDIA/Megatron-LM megatron/core/pipeline_parallel/schedules.py, get_pp_rank_microbatches (flag
    --overlap-moe-expert-parallel-comm).
    """
    forwards, backwards = passes(ranks, chunks, microbatches, rank, BACKWARD)
    return _paired(forwards, backwards, _interleaved_warm_up(ranks, chunks, microbatches, rank) + 1)


def passes(ranks: int, chunks: int, microbatches: int, rank: int, backward: int) -> tuple[list[Action], list[Action]]:
    """A rank's forwards and backwards, each in its own order: group by group, in a group chunk by chunk.

    backward: the kind of the second list. Backward takes the chunks from the last to the first.
    """
    stages = range(rank, ranks * chunks, ranks)
    size = group_size(ranks, chunks, microbatches)
    groups = [range(first, first + size) for first in range(0, microbatches, size)]
    forwards = [(FORWARD, stage, which) for group in groups for stage in stages for which in group]
    backwards = [(backward, stage, which) for group in groups for stage in reversed(stages) for which in group]
    return forwards, backwards


def group_size(ranks: int, chunks: int, microbatches: int) -> int:
    """How many micro-batches a chunk takes before the next chunk has its turn; 0 where equal groups are impossible.

    The micro-batches n are dealt to max(1, n // P) equal groups, so that a group has at least P of them where n >= P.
    With one chunk, groups make no difference and any n will do.
    Source: pytorch/pytorch torch/distributed/pipelining/schedules.py, ScheduleInterleaved1F1B (number_of_rounds).
    Megatron-LM by default takes multiples of P only, in these groups too.
    """
    if chunks == 1:
        return microbatches
    rounds = max(1, microbatches // ranks)
    return 0 if microbatches % rounds else microbatches // rounds


def group_period(ranks: int, chunks: int) -> int:
    """Micro-batches after which the order of a rank's passes repeats: one group, which has P once n is large."""
    return 1 if chunks == 1 else ranks


def enough(passes_before: int, chunks: int, period: int) -> int:
    """The fewest micro-batches, in whole periods, whose passes hold two periods after the first `passes_before`."""
    periods = -(-passes_before // (period * chunks)) + 2
    return periods * period


def _interleaved_warm_up(ranks: int, chunks: int, microbatches: int, rank: int) -> int:
    return (chunks - 1) * group_size(ranks, chunks, microbatches) + 2 * (ranks - 1 - rank)


def _in_turn(forwards: list[Action], backwards: list[Action], warm: int) -> Iterator[Slot]:
    """`warm` forwards, then a forward and a backward in turn, then the backwards that are left."""
    yield from zip(forwards[:warm])
    for forward, backward in zip(forwards[warm:], backwards, strict=False):
        yield (forward,)
        yield (backward,)
    yield from zip(backwards[max(len(forwards) - warm, 0) :])


def _paired(forwards: list[Action], backwards: list[Action], warm: int) -> Iterator[Slot]:
    """As `_in_turn`, with each forward and the backward after it in one slot."""
    yield from zip(forwards[:warm])
    yield from zip(forwards[warm:], backwards, strict=False)
    yield from zip(backwards[max(len(forwards) - warm, 0) :])


def _settled_one_f_one_b(ranks: int, chunks: int) -> int:
    return enough(ranks - 1, 1, 1)


def _turn_one_f_one_b(ranks: int, chunks: int, rank: int) -> Turn:
    return ranks - 1 - rank, 2


def _settled_interleaved(ranks: int, chunks: int) -> int:
    period = group_period(ranks, chunks)
    return enough((chunks - 1) * period + 2 * (ranks - 1), chunks, period)


def _turn_interleaved(ranks: int, chunks: int, rank: int) -> Turn:
    period = group_period(ranks, chunks)
    return (chunks - 1) * period + 2 * (ranks - 1 - rank), 2 * period * chunks


def _settled_combined(ranks: int, chunks: int) -> int:
    period = group_period(ranks, chunks)
    return enough((chunks - 1) * period + 2 * (ranks - 1) + 1, chunks, period)


def _turn_combined(ranks: int, chunks: int, rank: int) -> Turn:
    start, length = _turn_interleaved(ranks, chunks, rank)
    return start + 1, length // 2


ONE_F_ONE_B_REPEATS: Final = Repeating(every_microbatch, _settled_one_f_one_b, _turn_one_f_one_b)
INTERLEAVED_REPEATS: Final = Repeating(group_period, _settled_interleaved, _turn_interleaved)
COMBINED_REPEATS: Final = Repeating(group_period, _settled_combined, _turn_combined)
