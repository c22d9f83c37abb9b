"""What becomes of a pipeline when no two computations take equally long: mean and range over some runs.

A pipeline waits for the slowest of several ranks, so noise makes it slower on average, and single calls much longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Final

import attrs

from stepgraph.errors import InputError, Problem
from stepgraph.passes.pipeline.accounts import PipelineRun, account
from stepgraph.passes.pipeline.actions import Order
from stepgraph.passes.pipeline.checks import check_order
from stepgraph.passes.pipeline.durations import Noise, Row, durations
from stepgraph.passes.pipeline.modes import ASYNC, Mode
from stepgraph.passes.pipeline.running import programs_of, run
from stepgraph.passes.pipeline.timing import Timing

LEAST: Final = 0.01
"""No computation takes less than this part of its time."""


@attrs.frozen
class Range:
    """Mean, lowest and highest of some runs. Units: seconds."""

    mean_s: float
    low_s: float
    high_s: float


@attrs.frozen
class Spread:
    """What noise makes of a step; send, recv and longest_recv by rank, as in `RankRun`."""

    makespan: Range
    send: tuple[Range, ...]
    recv: tuple[Range, ...]
    longest_recv: tuple[Range, ...]


def jittered(
    order: Order, timing: Timing, mode: Mode = ASYNC, *, relative: float = 0.1, seed: int = 0, runs: int = 20
) -> Spread:
    """Run an order several times, every computation and every transfer with its own noise.

    time x max(LEAST, 1 + relative z), z standard normal; one seed gives the same runs again.

    Raises: InputError as `simulate`, and pipeline-jitter for a negative `relative` or no runs.
    """
    _check(relative, runs)
    microbatches = check_order(order, timing)
    programs, noise = programs_of(order, timing, mode), _noise(relative, seed)
    every = [
        account(order, run(programs, durations(order, timing, mode, microbatches, noise), mode, microbatches))
        for _ in range(runs)
    ]
    return Spread(
        _range(each.makespan_s for each in every),
        *(_by_rank(every, name) for name in ("send_s", "recv_s", "longest_recv_s")),
    )


def _noise(relative: float, seed: int) -> Noise:
    """One generator for all rows of all runs. numpy is imported here: what simulates without noise does not need it."""
    import numpy as np

    generator = np.random.default_rng(seed)

    def noisy(row: Row) -> Row:
        factors = np.maximum(LEAST, 1 + relative * generator.standard_normal(len(row)))
        noisy_row: Row = (np.array(row) * factors).tolist()
        return noisy_row

    return noisy


def _by_rank(runs: Sequence[PipelineRun], name: str) -> tuple[Range, ...]:
    ranks = zip(*(each.ranks for each in runs), strict=True)
    return tuple(_range(getattr(rank, name) for rank in same) for same in ranks)


def _range(seconds: Iterable[float]) -> Range:
    values = list(seconds)
    return Range(sum(values) / len(values), min(values), max(values))


def _check(relative: float, runs: int) -> None:
    problems = []
    if not (isfinite(relative) and relative >= 0):
        problems.append(Problem("pipeline-jitter", "relative", f"{relative}", "a finite number, zero or more"))
    if runs < 1:
        problems.append(Problem("pipeline-jitter", "runs", f"{runs}", "1 or more"))
    if problems:
        raise InputError(problems)
