"""How many micro-batches' activations a rank holds at once, read off an order: no times are needed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from stepgraph.passes.pipeline.actions import FORWARD, INPUT_GRAD, Order, Slot


def peak_activations(order: Order) -> tuple[float, ...]:
    """Per rank the most activations held at once.

    A forward takes in one chunk's, its whole backward or its weight gradient lets them go; the weight gradient still
    reads the layers' inputs, so the little that an input gradient could free is not counted. In a slot of two actions,
    the forward's are there before the backward's are gone. Peak = max over slots of (forwards - releases) / V.

    Units: micro-batches (of all of the rank's layers).
    Source: Qi et al. 2023 (Zero Bubble Pipeline Parallelism), section 2, with M_B = M_W.
    """
    return tuple(_peak(slots) / order.chunks for slots in order.ranks)


def _peak(slots: Iterable[Slot]) -> int:
    """The most chunks held: within a slot all forwards count first."""
    changes = (change for slot in slots for change in _changes(slot))
    return max(accumulate(changes), default=0)


def _changes(slot: Slot) -> tuple[int, int]:
    """What a slot adds, then what it takes away."""
    kinds = [kind for kind, _, _ in slot]
    forwards = kinds.count(FORWARD)
    return forwards, forwards + kinds.count(INPUT_GRAD) - len(kinds)
