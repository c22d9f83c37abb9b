"""The seconds of every single computation and transfer of a step, as rows by micro-batch: what the engines read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import attrs

from stepgraph.passes.pipeline.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Order
from stepgraph.passes.pipeline.modes import Mode
from stepgraph.passes.pipeline.steps import (
    AWAIT,
    HOLD,
    PAIR,
    PAIRED_BACKWARD,
    PAIRED_INPUT_GRAD,
    RECV_BACKWARD,
    RECV_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    is_one_op,
    pair_of,
)
from stepgraph.passes.pipeline.timing import Timing

Row: TypeAlias = list[float]
"""Seconds by micro-batch."""
Noise: TypeAlias = Callable[[Row], Row]
"""What becomes of a row of equal times."""


@attrs.frozen
class Durations:
    """Rows of seconds, and when the first forwards may start.

    rows: by kind of step (see `steps`), then by stage or boundary; empty where a kind is not used. hold_s: by stage.
    """

    rows: tuple[Sequence[Row], ...]
    hold_s: tuple[float, ...]


def as_they_are(row: Row) -> Row:
    """No noise: every micro-batch takes what the timing says."""
    return row


def durations(order: Order, timing: Timing, mode: Mode, microbatches: int, noise: Noise = as_they_are) -> Durations:
    """Write the times out: one row per kind and stage, per boundary, and per pair that runs as one op.

    input gradient = backward - weight gradient; a joint pair takes x (forward + backward).
    """

    def written(seconds: Sequence[float]) -> list[Row]:
        return [noise([each] * microbatches) for each in seconds]

    stages = timing.stages
    weight_s = timing.weight_s or (0.0,) * stages
    rows: list[Sequence[Row]] = [[]] * (PAIR + stages)
    rows[FORWARD] = _with_extra(written(timing.forward_s), timing.first_extra_s)
    rows[BACKWARD] = written(timing.backward_s)
    rows[INPUT_GRAD] = written([whole - part for whole, part in zip(timing.backward_s, weight_s, strict=True)])
    rows[WEIGHT_GRAD] = written(weight_s)
    rows[SEND_FORWARD] = rows[RECV_FORWARD] = written(_hops(order, timing.hop_forward_s))
    rows[SEND_BACKWARD] = rows[RECV_BACKWARD] = written(_hops(order, timing.hop_backward_s))
    for kind in (HOLD, AWAIT, PAIRED_BACKWARD, PAIRED_INPUT_GRAD):
        rows[kind] = [[0.0] * microbatches] * stages
    for (forward, backward), seconds in _pairs(order, timing, mode).items():
        by_forward = list(rows[PAIR + backward]) or [[]] * stages
        by_forward[forward] = noise([seconds] * microbatches)
        rows[PAIR + backward] = by_forward
    return Durations(tuple(rows), timing.first_not_before_s or (0.0,) * stages)


def _with_extra(rows: list[Row], extra_s: Sequence[float]) -> list[Row]:
    """What only micro-batch 0 takes longer."""
    for row, extra in zip(rows, extra_s, strict=False):
        row[0] += extra
    return rows


def _hops(order: Order, hops_s: Sequence[float]) -> list[float]:
    """A boundary inside one rank is free."""
    inside = (before == after for before, after in pairwise(order.stage_rank))
    return [0.0 if free else seconds for free, seconds in zip(inside, hops_s, strict=True)]


def _pairs(order: Order, timing: Timing, mode: Mode) -> dict[tuple[int, int], float]:
    """The time of every pair of stages that some slot runs as one op."""
    found = {
        pair_of(slot) for slots in order.ranks for slot in slots if len(slot) > 1 and is_one_op(slot, timing, mode)
    }
    pairs = {(forward[1], backward[1]) for forward, backward in found}
    return {pair: _pair_s(*pair, timing, mode) for pair in pairs}


def _pair_s(forward: int, backward: int, timing: Timing, mode: Mode) -> float:
    """A time that is given for the pair counts first."""
    both = timing.forward_s[forward] + timing.backward_s[backward]
    return timing.pair_s.get((forward, backward), mode.joint * both)
