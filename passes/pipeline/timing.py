"""How long the parts of a pipeline take: the computations of every virtual stage, the hops between stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from types import MappingProxyType

import attrs

from stepgraph.errors import InputError, Problem


def _seconds(times: Sequence[float]) -> tuple[float, ...]:
    return tuple(times)


def _frozen(times: Mapping[tuple[int, int], float]) -> Mapping[tuple[int, int], float]:
    return MappingProxyType(dict(times))


@attrs.frozen
class Timing:
    """Times of one micro-batch on every virtual stage and over every boundary.

    backward_s: the whole backward; weight_s: the part of it that is the weight gradient, which matters to schedules
    that run it apart (none given: 0, all of it is the input's). Boundary b lies between the stages b and b + 1; where
    both lie on one rank, a hop costs nothing, whatever is said here. pair_s: time of a slot of two actions that runs
    as one op, by (stage of the forward, stage of the backward). first_extra_s and first_not_before_s: what the forward
    of micro-batch 0 takes longer on a stage, and when it can start soonest, because parameters are gathered first.

    Shapes: one entry per virtual stage; hop_*_s one per boundary (stages - 1); empty optional times mean none.
    Units: seconds.
    Raises: InputError (pipeline-times) with every time that is negative or not finite, and every wrong length.
    """

    forward_s: tuple[float, ...] = attrs.field(converter=_seconds)
    backward_s: tuple[float, ...] = attrs.field(converter=_seconds)
    hop_forward_s: tuple[float, ...] = attrs.field(converter=_seconds)
    hop_backward_s: tuple[float, ...] = attrs.field(converter=_seconds)
    weight_s: tuple[float, ...] = attrs.field(converter=_seconds, default=())
    pair_s: Mapping[tuple[int, int], float] = attrs.field(converter=_frozen, factory=dict)
    first_extra_s: tuple[float, ...] = attrs.field(converter=_seconds, default=())
    first_not_before_s: tuple[float, ...] = attrs.field(converter=_seconds, default=())

    def __attrs_post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise InputError(problems)

    @property
    def stages(self) -> int:
        """Virtual stages that have times."""
        return len(self.forward_s)


def uniform(
    stages: int, forward_s: float, backward_s: float, hop_s: float = 0.0, weight_s: float = 0.0, chunks: int = 1
) -> Timing:
    """Equal stages and hops: the times are those of a whole rank's micro-batch, and a chunk takes 1 / chunks of them.

    stages: virtual stages, ranks x chunks.
    Units: seconds.
    """
    hops = (hop_s,) * max(stages - 1, 0)
    forward, backward, weight = (((whole / chunks),) * stages for whole in (forward_s, backward_s, weight_s))
    return Timing(forward, backward, hops, hops, weight)


def _problems(timing: Timing) -> Iterator[Problem]:
    stages = len(timing.forward_s)
    boundaries = max(stages - 1, 0)
    yield from _time_problems("forward_s", timing.forward_s, stages)
    yield from _time_problems("backward_s", timing.backward_s, stages)
    yield from _time_problems("hop_forward_s", timing.hop_forward_s, boundaries)
    yield from _time_problems("hop_backward_s", timing.hop_backward_s, boundaries)
    for name in ("weight_s", "first_extra_s", "first_not_before_s"):
        times = getattr(timing, name)
        yield from _time_problems(name, times, stages if times else 0)
    for index, (weight, whole) in enumerate(zip(timing.weight_s, timing.backward_s, strict=False)):
        if weight > whole:
            yield Problem("pipeline-times", f"weight_s[{index}]", f"{weight}", f"at most backward_s[{index}] = {whole}")
    yield from _pair_problems(timing.pair_s, stages)


def _time_problems(name: str, times: Sequence[float], length: int) -> Iterator[Problem]:
    """A wrong number of entries, and every entry that is negative or not finite."""
    if len(times) != length:
        yield Problem("pipeline-times", name, f"{len(times)} entries", f"{length}")
    for index, seconds in enumerate(times):
        if not _is_time(seconds):
            yield Problem("pipeline-times", f"{name}[{index}]", f"{seconds}", "a finite time, zero or more")


def _pair_problems(pair_s: Mapping[tuple[int, int], float], stages: int) -> Iterator[Problem]:
    for pair, seconds in pair_s.items():
        if not all(0 <= stage < stages for stage in pair):
            yield Problem("pipeline-times", f"pair_s[{pair}]", "a stage that has no times", f"0 to {stages - 1}")
        if not _is_time(seconds):
            yield Problem("pipeline-times", f"pair_s[{pair}]", f"{seconds}", "a finite time, zero or more")


def _is_time(seconds: float) -> bool:
    return isfinite(seconds) and seconds >= 0
