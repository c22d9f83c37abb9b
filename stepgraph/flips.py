"""Flips: the global batch at which another micro-batch size becomes the fastest.

The step time of one size is a straight line in the number of its micro-batches once the pipeline is full, and the
fastest of several lines changes at most once on the way from one line to the next. Schedules with left-over
micro-batches only come close to lines; so a grid is searched first and the bracket is narrowed between its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil, floor
from typing import TypeAlias

import attrs

MARGIN = 1e-6
"""By which share another size has to be faster: less is rounding."""

PARTS = 4
"""Into how many parts a bracket is cut."""

StepTimes: TypeAlias = Callable[[int], tuple[float, ...] | None]
"""Step time of every size at a global batch of so many units; None where one of them cannot run."""


@attrs.frozen
class Flip:
    """From this global batch on (away from the one that was asked for) another micro-batch size is the fastest."""

    global_batch: int
    before: int
    after: int

    def to_json(self) -> dict[str, int]:
        """Plain numbers."""
        return {"global_batch": self.global_batch, "from": self.before, "to": self.after}


@attrs.frozen
class Flips:
    """The nearest flips below and above a global batch, and how far was searched: global batches, both included."""

    below: Flip | None
    above: Flip | None
    lowest: int
    highest: int

    def nearest(self, global_batch: int) -> Flip | None:
        """The flip that changes the global batch least."""
        found = [flip for flip in (self.below, self.above) if flip is not None]
        return min(found, key=lambda flip: abs(flip.global_batch - global_batch), default=None)


def find_flips(
    sizes: Sequence[int], best: int, step_times: StepTimes, global_batch: int, unit: int, times: int
) -> Flips:
    """Search down to one unit and up to `times` the global batch.

    sizes: micro-batch sizes in the order of `step_times`; best: position of the fastest one at `global_batch`; unit:
    global batches of which every size allows all multiples. The flip that is returned was timed, and so was the
    neighbouring global batch at which the best size still wins.
    """

    def flip(start: int, grid: Iterator[int]) -> Flip | None:
        found = first_flip(step_times, best, start, grid)
        return None if found is None else Flip(found[0] * unit, sizes[best], sizes[found[1]])

    below, above = ceil(global_batch / unit), floor(global_batch / unit)
    highest = above * times
    return Flips(
        below=flip(below, _halved(below)),
        above=flip(above, _doubled(above, highest)),
        lowest=min(unit, global_batch),
        highest=max(highest * unit, global_batch),
    )


def first_flip(step_times: StepTimes, best: int, start: int, grid: Iterator[int]) -> tuple[int, int] | None:
    """The first count of units, on the way from `start` along the grid, at which another size wins, and its position.

    start is one at which the size at position `best` wins. Counts at which a size cannot run are passed over.
    """
    near = start
    for far in grid:
        if _winner(step_times, best, far) != best:
            found = _narrowed(step_times, best, near, far)
            return found, _winner(step_times, best, found)
        near = far
    return None


def _narrowed(step_times: StepTimes, best: int, near: int, far: int) -> int:
    """Between a count at which `best` wins and one at which it does not: a neighbouring pair of which that is true.

    Where straight lines through both ends cross is tried first: when the steps are straight lines it is the answer.
    """
    probes = _crossing(step_times(near), step_times(far), best, near, far)
    while abs(far - near) > 1:
        for count in probes:
            if _winner(step_times, best, count) != best:
                far = count
                break
            near = count
        probes = _cut(near, far)
    return far


def _winner(step_times: StepTimes, best: int, count: int) -> int:
    """Position of the fastest size, `best` unless another one is faster by more than the margin."""
    times = step_times(count)
    if times is None or min(times) >= times[best] * (1 - MARGIN):
        return best
    return times.index(min(times))


def _crossing(
    near_s: tuple[float, ...] | None, far_s: tuple[float, ...] | None, best: int, near: int, far: int
) -> list[int]:
    """Counts strictly inside the bracket around the first crossing of `best` with another size, the near one first."""
    if near_s is None or far_s is None:
        return []
    lags = zip((near_s[best] - time for time in near_s), (far_s[best] - time for time in far_s), strict=True)
    shares = [-before / (after - before) for before, after in lags if before <= 0 < after]
    if not shares:
        return []
    step = 1 if far > near else -1
    at = near + step * ceil(min(shares) * abs(far - near))
    return [count for count in (at - step, at) if min(near, far) < count < max(near, far)]


def _cut(near: int, far: int) -> list[int]:
    """Counts that cut a bracket into equal parts, the near one first."""
    cuts = (near + (far - near) * part // PARTS for part in range(1, PARTS))
    return [count for count in dict.fromkeys(cuts) if count not in (near, far)]


def _halved(count: int) -> Iterator[int]:
    while count > 1:
        count //= 2
        yield count


def _doubled(count: int, highest: int) -> Iterator[int]:
    while 0 < 2 * count <= highest:
        count *= 2
        yield count
