"""ZB-H1: 1F1B with backward cut in two, so that weight gradients fill the bubble; no more memory than 1F1B's rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from stepgraph.passes.pipeline.actions import INPUT_GRAD, WEIGHT_GRAD, Slot
from stepgraph.passes.pipeline.onefoneb import enough, group_period, group_size, passes
from stepgraph.passes.pipeline.repeating import Repeating, Turn


def zb_h1(ranks: int, chunks: int, microbatches: int, rank: int) -> Iterator[Slot]:
    """Rank r: (V - 1) g + P - 1 - r warm-up forwards, then forward and input gradient; weight gradients r steps behind.

    So every rank holds as many micro-batches as rank 0 of 1F1B. With several chunks they take groups of g
    micro-batches by turns, as in interleaved 1F1B.
    Source: Qi et al. 2023 (Zero Bubble Pipeline Parallelism), section 2; pytorch/pytorch
    torch/distributed/pipelining/schedules.py, ScheduleInterleavedZeroBubble.
    """
    forwards, inputs = passes(ranks, chunks, microbatches, rank, INPUT_GRAD)
    weights = [(WEIGHT_GRAD, stage, which) for _, stage, which in inputs]
    warm = (chunks - 1) * group_size(ranks, chunks, microbatches) + ranks - 1 - rank
    yield from zip(forwards[:warm])
    for step, input_grad in enumerate(inputs):
        yield from zip(forwards[warm + step : warm + step + 1])
        yield (input_grad,)
        yield from zip(weights[step - rank : step - rank + 1] if step >= rank else ())
    yield from zip(weights[max(len(inputs) - rank, 0) :])


def _settled(ranks: int, chunks: int) -> int:
    """Every rank has begun its weight gradients after (V - 1) g + P - 1 forwards."""
    period = group_period(ranks, chunks)
    return enough((chunks - 1) * period + ranks - 1, chunks, period)


def _turn(ranks: int, chunks: int, rank: int) -> Turn:
    """After the warm-up and `rank` pairs: forward, input gradient, weight gradient."""
    period = group_period(ranks, chunks)
    return (chunks - 1) * period + ranks - 1 + rank, 3 * period * chunks


ZB_H1_REPEATS: Final = Repeating(group_period, _settled, _turn)
