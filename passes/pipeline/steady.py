"""The shortcut through a steady state: a long step is simulated with few micro-batches, and periods are put in.

Why that is exact. Every time in a run is the largest of some earlier times plus constants (start = max(rank free, input
there), a transfer starts at max(both sides)): the recurrence is linear in (max, +) and homogeneous, so if all times that
it looks back to move by c, so does all that follows. In the steady state the order repeats itself, each period for
`period` micro-batches more. A computation looks back to the call before it on its rank, and over a boundary to the same
micro-batch on the next stage: that lies at most |difference of how many micro-batches the two stages have begun| /
period periods back, and a call posts its transfers at most one period away from the computation. So all that is
looked back to, from a cut between two periods on, lies in the last `reach` periods before it:

    reach = 1 + max over boundaries of ceil(|difference| / period)

If over those periods every end on every rank, and every arrival on every link, is exactly c later than q periods before,
the next q periods end c later again, and so for ever; putting in m q periods at the cut makes what follows m c later.
q > 1 is needed because the slowest loop through the pipeline may go over several micro-batches: in 1F1B one forward and
one backward over d stages come back to the rank d micro-batches later.
Source: Baccelli et al. 1992 (Synchronization and Linearity), chapter 3: a (max, +) linear system with one critical loop
becomes periodic after finitely many steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from stepgraph.passes.pipeline.accounts import PipelineRun, account
from stepgraph.passes.pipeline.actions import Order
from stepgraph.passes.pipeline.checks import check_stages
from stepgraph.passes.pipeline.growing import grown
from stepgraph.passes.pipeline.modes import Mode
from stepgraph.passes.pipeline.periods import Periods, periods_of
from stepgraph.passes.pipeline.running import trace_of
from stepgraph.passes.pipeline.schedule import Schedule
from stepgraph.passes.pipeline.timing import Timing
from stepgraph.passes.pipeline.trace import ROUNDING, Trace


@attrs.frozen
class Beat:
    """The steady state: every end is `seconds` later than `periods` periods before. Units: seconds."""

    periods: int
    seconds: float


@attrs.frozen
class _Try:
    """A step with fewer periods, run."""

    order: Order
    trace: Trace
    periods: Periods


def shortened(
    schedule: Schedule,
    ranks: int,
    chunks: int,
    microbatches: int,
    timing: Timing,
    mode: Mode,
    most_slots: int | None = None,
) -> PipelineRun | None:
    """The run of a long step from that of a shorter one; None where nothing is gained, or no steady state was seen.

    It tries with few periods, then with twice as many, as long as all tries together have at most half the step's
    micro-batches (and at most most_slots of stages x micro-batches); so a step that does not settle costs at most half as
    much again.
    """
    period, base = schedule.period(ranks, chunks), schedule.shortest(ranks, chunks, microbatches)
    if base == microbatches:
        return None
    spare = (microbatches - base) // period
    left = min(microbatches / 2, microbatches if most_slots is None else most_slots / (ranks * chunks))
    for count in _tries(ranks, base, period, left):
        tried = _try(schedule, ranks, chunks, base + count * period, timing, mode)
        beat = beat_of(tried.trace, tried.periods)
        rest = (spare - count) % beat.periods if beat else 0
        if beat and rest:
            tried = _try(schedule, ranks, chunks, base + (count + rest) * period, timing, mode)
        if beat:
            times = (spare - count - rest) // beat.periods
            windows = [rank.window(beat.periods) for rank in tried.periods.ranks]
            return grown(account(tried.order, tried.trace), tried.trace, windows, beat.seconds, times)
    return None


def _tries(ranks: int, base: int, period: int, left: float) -> Iterator[int]:
    """Numbers of periods beyond the fewest: about one per rank, then twice as many, within `left` micro-batches in all."""
    count = 3 + -(-ranks // period)
    while base + count * period <= left:
        left -= base + count * period
        yield count
        count *= 2


def _try(schedule: Schedule, ranks: int, chunks: int, microbatches: int, timing: Timing, mode: Mode) -> _Try:
    """Run an order of settled + k period micro-batches, which has k + 2 whole periods; the cut leaves one of them."""
    order = schedule.order(ranks, chunks, microbatches)
    check_stages(order, timing)
    trace = trace_of(order, timing, mode, microbatches)
    period = schedule.period(ranks, chunks)
    whole = (microbatches - schedule.settled(ranks, chunks)) // period + 1
    turns = schedule.steady(ranks, chunks, microbatches)
    return _Try(order, trace, periods_of(order, trace, turns, period, whole))


def beat_of(trace: Trace, periods: Periods) -> Beat | None:
    """The steady state that holds before the cut, with the fewest periods; None where none is seen yet."""
    for count in range(1, periods.whole - periods.reach):
        seconds = _moved(trace, periods, count)
        if seconds is not None:
            return Beat(count, seconds)
    return None


def _moved(trace: Trace, periods: Periods, count: int) -> float | None:
    """By how much all that is looked back to is later than `count` periods before; None unless all by the same."""
    first = trace.ranks[0].ends
    cut = periods.ranks[0].bounds[-1]
    moved = first[cut - 1] - first[cut - 1 - periods.ranks[0].length * count]
    slack = ROUNDING * first[-1]
    for rank, each in zip(trace.ranks, periods.ranks, strict=True):
        window = each.window(periods.reach)
        if not each.regular(periods.reach + count) or _differs(rank.ends, window, each.length * count, moved, slack):
            return None
    for row, begun in zip(trace.arrivals, periods.begun, strict=False):
        window = range(begun - periods.reach * periods.microbatches, begun)
        if _differs(row, window, count * periods.microbatches, moved, slack):
            return None
    return moved


def _differs(times: Sequence[float], window: range, back: int, moved: float, slack: float) -> bool:
    """Whether some time in the window is not `moved` later than the one `back` places before."""
    return any(abs(times[i] - times[i - back] - moved) > slack for i in reversed(window))
