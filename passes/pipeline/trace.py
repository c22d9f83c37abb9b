"""What an engine hands back: when each call of each rank ended, and how long those calls were held up."""

from __future__ import annotations

from typing import Final, TypeAlias

import attrs

from stepgraph.passes.pipeline.steps import Program

SEND: Final = 0
RECV: Final = 1

ROUNDING: Final = 1e-12
"""Times that differ by less than this part of the clock are taken to be equal: sums of many floats differ by less."""

Holdup: TypeAlias = tuple[int, float, float, int]
"""(index of the call, seconds of transfer, seconds of waiting, SEND or RECV): time in which a rank did not compute."""


@attrs.frozen
class RankTrace:
    """One rank: ends[i] is the end of program[i]; holdups come in the order of the calls.

    A holdup of a communication call is the call; one of a computation lies just before it. ends is shorter than the
    program where the rank got stuck.
    """

    program: Program
    ends: list[float]
    holdups: list[Holdup]


@attrs.frozen
class Trace:
    """All ranks, and per link the arrivals by micro-batch where links have a state of their own (else none)."""

    ranks: tuple[RankTrace, ...]
    stages: int
    arrivals: tuple[list[float], ...] = ()
