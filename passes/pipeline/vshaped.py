"""ZB-V and DualPipeV: two stages per rank, the stream goes down the ranks and comes back, so rank 0 has both ends.

"Down" is a rank's first stage, "up" its second. Each kind of action of a stage takes the micro-batches in order, so a
rank is written as a list of what to run; `_numbered` counts the micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

from stepgraph.passes.pipeline.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Slot
from stepgraph.passes.pipeline.repeating import Repeating, Turn, every_microbatch

# (kind, 0 for the stage on the way down and 1 for the one on the way up)
_Run: TypeAlias = tuple[int, int]
_Runs: TypeAlias = tuple[_Run, ...]

_F0: Final = ((FORWARD, 0),)
_F1: Final = ((FORWARD, 1),)
_B0: Final = ((BACKWARD, 0),)
_B1: Final = ((BACKWARD, 1),)
_I0: Final = ((INPUT_GRAD, 0),)
_I1: Final = ((INPUT_GRAD, 1),)
_W0: Final = ((WEIGHT_GRAD, 0),)
_W1: Final = ((WEIGHT_GRAD, 1),)
_F0_B1: Final = (*_F0, *_B1)
_F1_B0: Final = (*_F1, *_B0)


def zbv(ranks: int, chunks: int, microbatches: int, rank: int) -> Iterator[Slot]:
    """ZB-V: no bubble where forward, input gradient and weight gradient take equally long; the memory of 1F1B's rank 0.

    A step of fewer than 2 P - 1 micro-batches runs as one of 2 P - 1 with the others left out.
    Shapes: chunks = 2.
    Source: Qi et al. 2023 (Zero Bubble Pipeline Parallelism), section 6; pytorch/pytorch
    torch/distributed/pipelining/schedules.py, ScheduleZBVZeroBubble.
    """
    full = max(microbatches, 2 * ranks - 1)
    for slot in _numbered(_zbv_runs(ranks, full, rank), ranks, rank):
        if slot[0][2] < microbatches:
            yield slot


def dualpipev(ranks: int, chunks: int, microbatches: int, rank: int) -> Iterator[Slot]:
    """DualPipeV: in the steady state the forward of one stage and the backward of the other run as one slot.

    Shapes: chunks = 2, microbatches at least 2 P.
    Source: deepseek-ai/DualPipe dualpipe/dualpipev.py; pytorch/pytorch torch/distributed/pipelining/schedules.py,
    ScheduleDualPipeV.
    """
    return _numbered(_dualpipev_runs(ranks, microbatches, rank), ranks, rank)


def _zbv_runs(ranks: int, microbatches: int, rank: int) -> Iterator[_Runs]:
    """Fill down, fill both, first backwards; then all six; then the micro-batches that are still on their way."""
    below = ranks - rank
    steady = microbatches - 2 * ranks + 1 + rank
    yield from (_F0,) * (2 * below - 1)
    yield from (_F1, _F0) * rank
    yield from (_F1, _I1, _W1) * below
    yield from (_F0, _I0, _W0, _F1, _I1, _W1) * steady
    yield from (_I0, _W0, _F1, _I1, _W1) * (below - 1)
    yield from (_I0, _I1) * rank
    yield from (_I0, _W0) * below
    yield from (_W1,) * rank
    yield from (_W0,) * rank


def _dualpipev_runs(ranks: int, microbatches: int, rank: int) -> Iterator[_Runs]:
    """The eight steps of the source; "in the middle" of the backwards the weight gradients begin to be put off."""
    last, below = rank == ranks - 1, ranks - 1 - rank
    together = microbatches - 2 * ranks + rank + 1
    yield from (_F0,) * (2 * below)
    yield from (_F0, _F1) * (rank + 1)
    yield from (_I1, _W1, _F1) * below
    # the last rank has nothing to hide in its first pair
    yield from (_F0, _B1, _F1_B0) if last else (_F0_B1, _F1_B0)
    yield from (_F0_B1, _F1_B0) * (together - 1)
    yield from (_B1, _F1_B0) * below
    yield from _dualpipev_end(below, rank)


def _dualpipev_end(below: int, rank: int) -> Iterator[_Runs]:
    """Backwards of both stages; from the middle on only input gradients, whose weight gradients fill the rest."""
    whole = rank + 1  # of 2 (rank + 1) backwards
    both = (_B1, _B0) * (rank + 1)
    split = (_I1, _I0) * (rank + 1)
    backwards = (*both[:whole], *split[whole:])
    put_off = [_W1 if run == _I1 else _W0 for run in split[whole:]]
    yield from backwards
    for done in range(below):
        yield put_off[done]
        yield _I0
        put_off.append(_W0)
    yield from put_off[below:]


def _numbered(runs: Iterable[_Runs], ranks: int, rank: int) -> Iterator[Slot]:
    """Slots of a rank, every kind of every stage with its micro-batches 0, 1, 2, ...; a whole backward counts as both."""
    stages = (rank, 2 * ranks - 1 - rank)
    counts = [[0, 0] for _ in (FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD)]

    def number(kind: int, side: int) -> Action:
        which = counts[INPUT_GRAD if kind == BACKWARD else kind][side]
        for counted in (INPUT_GRAD, WEIGHT_GRAD) if kind == BACKWARD else (kind,):
            counts[counted][side] = which + 1
        return kind, stages[side], which

    for run in runs:
        yield tuple(number(kind, side) for kind, side in run)


def _zbv_settled(ranks: int, chunks: int) -> int:
    return 2 * ranks + 1


def _zbv_turn(ranks: int, chunks: int, rank: int) -> Turn:
    return 2 * ranks - 1 + 3 * (ranks - rank), 6


def _dualpipev_settled(ranks: int, chunks: int) -> int:
    """Two periods after the first pair, which the last rank does not run together."""
    return 2 * ranks + 2


def _dualpipev_turn(ranks: int, chunks: int, rank: int) -> Turn:
    below = ranks - 1 - rank
    return 5 * below + 2 * (rank + 1) + 2, 2


ZBV_REPEATS: Final = Repeating(every_microbatch, _zbv_settled, _zbv_turn)
DUALPIPEV_REPEATS: Final = Repeating(every_microbatch, _dualpipev_settled, _dualpipev_turn)
