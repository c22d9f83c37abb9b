"""How the order of a schedule repeats itself in its steady state, so that a long step need not be walked in full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import attrs

from stepgraph.passes.pipeline.actions import Slot

Turn: TypeAlias = tuple[int, int]
"""Where a rank's steady state begins, and how many slots one period of it has."""


@attrs.frozen
class Repeating:
    """The steady state of a schedule, by (ranks, chunks).

    period: micro-batches that one period takes in. settled: the fewest micro-batches with two whole periods on every
    rank. turn: by (ranks, chunks, rank), its `Turn`; it is the same for all n = settled + k period.

    For each such n, slots a of a rank in order(n), and its turn (start, length):
        a[start : start + length] and a[start + length : start + 2 length] differ only by `period` micro-batches, and
        order(n + period) holds for that rank a[: start + length], then a[start:] with `period` more micro-batches.
    """

    period: Callable[[int, int], int]
    settled: Callable[[int, int], int]
    turn: Callable[[int, int, int], Turn]


def shifted(slots: Sequence[Slot], microbatches: int) -> list[Slot]:
    """The same slots for micro-batches that come `microbatches` later."""
    return [tuple((kind, stage, which + microbatches) for kind, stage, which in slot) for slot in slots]


def every_microbatch(ranks: int, chunks: int) -> int:
    """A period of one micro-batch."""
    return 1
