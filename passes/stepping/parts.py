"""Parts of a step: what one phase of a template, a stage or a rank costs, added up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import add

import attrs
import numpy as np

from stepgraph.passes.base import Setting
from stepgraph.passes.buckets import Buckets, gather_buckets
from stepgraph.passes.costing import Costs


@attrs.frozen
class Part:
    """What one phase of a template (or of a stage) costs: seconds by bucket, and counts.

    hidden: seconds of communication that run under computation; they are in no bucket of `buckets`.
    """

    buckets: Buckets = Buckets()
    kernels: int = 0
    flops: int = 0
    hbm_bytes: int = 0
    comm_bytes: int = 0
    roofline_s: float = 0.0
    hidden: Buckets = Buckets()

    @property
    def time_s(self) -> float:
        """Seconds, launches included."""
        return self.buckets.total

    def __add__(self, other: Part) -> Part:
        return Part(*map(add, _fields(self), _fields(other)))

    def __mul__(self, times: int) -> Part:
        return Part(*[value * times for value in _fields(self)])


def _fields(part: Part) -> tuple:  # type: ignore[type-arg]  # of Buckets, int and float, each with + and *
    return (
        part.buckets,
        part.kernels,
        part.flops,
        part.hbm_bytes,
        part.comm_bytes,
        part.roofline_s,
        part.hidden,
    )


@attrs.frozen
class StageCost:
    """One stage: forward and backward of a micro-batch, and the step before and after the gradient norm.

    All stages wait for each other at the norm, so what lies before it and after it is kept apart. weight_s: seconds of
    `backward` that make gradients of weights only, which no other stage waits for. dry_forward_s, dry_backward_s: seconds
    of each pass in which the device waits for its host; they are in the bucket `launch`.
    """

    forward: Part
    backward: Part
    before_norm: Part
    after_norm: Part
    weight_s: float = 0.0
    dry_forward_s: float = 0.0
    dry_backward_s: float = 0.0

    @property
    def dry_s(self) -> float:
        """Waits for the host in both passes."""
        return self.dry_forward_s + self.dry_backward_s

    @property
    def micro_batch(self) -> Part:
        """Forward and backward together."""
        return self.forward + self.backward

    @property
    def step(self) -> Part:
        """What runs once per step."""
        return self.before_norm + self.after_norm


def joined_chunks(chunks: Iterable[StageCost]) -> StageCost:
    """What one rank runs: all its chunks once per micro-batch, and its step once."""
    first, *others = chunks
    for chunk in others:
        first = attrs.evolve(
            first,
            forward=first.forward + chunk.forward,
            backward=first.backward + chunk.backward,
            weight_s=first.weight_s + chunk.weight_s,
            dry_forward_s=first.dry_forward_s + chunk.dry_forward_s,
            dry_backward_s=first.dry_backward_s + chunk.dry_backward_s,
        )
    return first


def part_of(cost: Costs, chosen: Sequence[int], setting: Setting) -> Part:
    """Sum the costs of some ops of a graph, by position, one after the other."""
    index = np.array(chosen, dtype=np.int64)
    kernels = int(cost.kernels[index].sum())
    gaps = Buckets(launch=kernels * setting.launching.gap_s)
    return counted(
        cost, chosen, gather_buckets([cost.graph.ops[i] for i in chosen], cost.time_s[index].tolist()) + gaps
    )


def counted(cost: Costs, chosen: Sequence[int], buckets: Buckets, hidden: Buckets = Buckets()) -> Part:
    """The counts of some ops beside the seconds that are given for them."""
    index = np.array(chosen, dtype=np.int64)
    columns = (cost.kernels, cost.flops, cost.hbm_bytes, cost.comm_bytes)
    kernels, flops, hbm, comm = (sum(column[index].tolist()) for column in columns)  # Python's integers do not wrap
    return Part(buckets, kernels, flops, hbm, comm, float(cost.roofline_s[index].sum()), hidden)
