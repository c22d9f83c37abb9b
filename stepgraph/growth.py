"""Growth: which costs of a micro-batch grow faster than the micro-batch itself, and what that could mean."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

import attrs

from stepgraph.passes.buckets import Buckets

TOLERANCE = 0.02
"""By which share a cost may exceed linear growth."""

VISIBLE_SHARE = 1e-3
"""Part of a micro-batch's time below which a cost is not worth a word."""


@attrs.frozen
class MicroBatchCost:
    """What one micro-batch costs on one rank: the step's buckets over the number of micro-batches.

    compute: GEMMs, attention and HBM ops; tp, ep, cp: exposed collectives; pp: activations on the link and waiting in
    pipeline calls; idle: launches and waiting for the step to end. Units: s.
    """

    compute: float
    tp: float
    ep: float
    cp: float
    pp: float
    idle: float

    @property
    def total(self) -> float:
        """Their sum: (step - data parallel - optimizer) / n."""
        return float(sum(getattr(self, name) for name in NAMES))


NAMES = tuple(field.name for field in attrs.fields(MicroBatchCost))
"""Costs of a micro-batch, in order."""


@attrs.frozen
class StepPart:
    """What runs once per step, whatever the micro-batch. Units: s."""

    dp: float
    optimizer: float


@attrs.frozen
class Growth:
    """A cost that grew faster than linear: `times` as long for `linear` times the sequences of `since`.

    times: None where it was nothing before. meaning: what to suspect.
    """

    cost: str
    since: int
    times: float | None
    linear: float
    meaning: str


_MEANINGS = MappingProxyType(
    {
        "compute": "kernels became less efficient: a threshold of their shapes, or the slowdown of long GEMMs",
        "tp": "a threshold of the collectives' protocol",
        "ep": "a threshold of the all-to-all's protocol, or of load balance",
        "cp": "a threshold of the collectives' protocol",
        "pp": "waiting: fewer micro-batches share the pipeline's fill and drain",
        "idle": "fewer micro-batches share the pipeline's fill and drain",
    }
)


_LESS_HIDDEN = MappingProxyType(
    dict.fromkeys(("tp", "ep", "cp"), "less of it is hidden: fewer micro-batches or less computation beside it")
)


def split_buckets(buckets: Buckets, microbatches: int) -> tuple[MicroBatchCost, StepPart]:
    """A rank's step as the cost of one micro-batch and the rest, which runs once.

    Formula: step = n x total + dp + optimizer. Source: How to Think About Asymptotic Times, section 11.
    """
    each = buckets * (1 / microbatches)
    cost = MicroBatchCost(
        compute=each.gemm + each.attention + each.hbm,
        tp=each.tp,
        ep=each.ep,
        cp=each.cp,
        pp=each.pp_transfer + each.pp_wait,
        idle=each.launch + each.idle,
    )
    return cost, StepPart(buckets.dp, buckets.optimizer)


def faster_than_linear(
    before: int, smaller: MicroBatchCost, after: int, larger: MicroBatchCost, *, overlapped: bool = False
) -> tuple[Growth, ...]:
    """Costs that grew by more than the sizes did, from micro-batch `before` to `after`.

    overlapped: whether what is shown of a communicator is what computation does not hide.

    Formula: larger > (1 + TOLERANCE) x after / before x smaller, if `larger` is worth a word. Slower growth is what an
    amortised overhead looks like and no reason for one. Source: How to Think About Asymptotic Times, section 11.
    """
    found = tuple(_found(before, smaller, after, larger))
    if not overlapped:
        return found
    return tuple(attrs.evolve(growth, meaning=_LESS_HIDDEN.get(growth.cost, growth.meaning)) for growth in found)


def _found(before: int, smaller: MicroBatchCost, after: int, larger: MicroBatchCost) -> Iterator[Growth]:
    linear = after / before
    for name in NAMES:
        old, new = getattr(smaller, name), getattr(larger, name)
        if new > VISIBLE_SHARE * larger.total and new > (1 + TOLERANCE) * linear * old:
            yield Growth(name, before, new / old if old else None, linear, _MEANINGS[name])
