"""How many micro-batches' activations a rank holds at once, read off an order: no times are needed."""

from __future__ import annotations

from collections.abc import Iterable

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
    """The most chunks held: within a slot all forwards count first. A plain loop: it sees every action of a step."""
    held = most = 0
    for slot in slots:
        gone = 0
        for kind, _, _ in slot:
            if kind == FORWARD:
                held += 1
            elif kind != INPUT_GRAD:
                gone += 1
        most = max(most, held)
        held -= gone
    return most
