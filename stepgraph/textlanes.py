"""A pipeline run as lines of text: one per rank, time to the right."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import Final

from stepgraph.bars import LOWER, UPPER, Bar

MOST_COLUMNS: Final = 200
MOST_RANKS: Final = 16
IDLE: Final = "."
GOES_ON: Final = "="


def text_lanes(bars: Sequence[Bar], ranks: int, makespan_s: float) -> tuple[str, ...]:
    """One line per rank: `F0F1....B0==B1==`; empty where that would take too many lines or columns.

    A computation is its letter and its micro-batch, `=` while it goes on, `.` is everything else. Letters of a rank's
    odd chunks are in lower case. The shortest computation is as wide as its text, so lines show times to scale; the
    two actions of a pair that runs as one op stand one after the other, each in half of its time.
    """
    boxes = [_box(bar) for bar in bars if bar.letter and bar.end_s > bar.start_s]
    if not boxes or ranks > MOST_RANKS:
        return ()
    cell = max(len(label) for _, _, _, label in boxes)
    per_second = cell / min(end - start for _, start, end, _ in boxes)
    if not makespan_s * per_second <= MOST_COLUMNS:
        return ()
    lines = [[IDLE] * _column(makespan_s * per_second) for _ in range(ranks)]
    for rank, start, end, label in boxes:
        first, last = _column(start * per_second), _column(end * per_second)
        lines[rank][first:last] = _cut(label, last - first)
    return tuple("".join(line) for line in lines)


def _box(bar: Bar) -> tuple[int, float, float, str]:
    """(rank, start, end, label)."""
    middle = (bar.start_s + bar.end_s) / 2
    start = middle if bar.part == LOWER else bar.start_s
    end = middle if bar.part == UPPER else bar.end_s
    letter = bar.letter.lower() if bar.chunk % 2 else bar.letter
    return bar.rank, start, end, f"{letter}{bar.microbatch}"


def _column(place: float) -> int:
    """The nearest column; halves always go up, so that whole numbers of columns stay whole wherever they begin."""
    return floor(place + 0.5)


def _cut(label: str, columns: int) -> str:
    """The label, filled up; its letter alone where rounding has left no room, because half a number is a wrong one."""
    shown = label if len(label) <= columns else label[0]
    return shown.ljust(columns, GOES_ON)[:columns]
