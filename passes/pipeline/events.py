"""What a timeline shows of a simulated pipeline: every computation and every communication call."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from stepgraph.passes.pipeline.actions import FORWARD
from stepgraph.passes.pipeline.steps import (
    AWAIT,
    HOLD,
    PAIR,
    PAIRED_BACKWARD,
    PAIRED_INPUT_GRAD,
    RECV_FORWARD,
    SEND_BACKWARD,
    Step,
    call_name,
    is_transfer,
)
from stepgraph.passes.pipeline.trace import RECV, Holdup, RankTrace


@attrs.frozen
class Event:
    """One computation or communication call of one rank; a blocking call lasts from its posting to its end.

    kind: "compute", "send" or "recv", as the accounts count it. stage, microbatch: of the computation, or of the call's
    first transfer on this rank. wait_s: the part of a call in which none of its transfers ran. Where transfers never
    block, a receive is the time that the computation after it waited.
    Units: seconds from the start of the pipeline.
    """

    rank: int
    name: str
    kind: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float
    wait_s: float = 0.0


def events_of(rank: int, trace: RankTrace) -> Iterator[Event]:
    """The events of a rank, in time. What only orders others (a pair's second half, a hold in time) is left out."""
    held = {holdup[0]: holdup for holdup in trace.holdups}
    before = 0.0
    for index, (call, end) in enumerate(zip(trace.program, trace.ends, strict=True)):
        holdup = held.get(index)
        kind, stage, microbatch = call[0]
        if is_transfer(kind):
            yield _call(rank, call_name(call), call[0], before, end, holdup)
        else:
            start = before
            if holdup:
                start += holdup[1] + holdup[2]
                yield _call(rank, _input_name(kind), call[0], before, start, holdup)
            if kind not in (HOLD, AWAIT, PAIRED_BACKWARD, PAIRED_INPUT_GRAD):
                yield Event(rank, call_name(call), "compute", stage, microbatch, start, end)
        before = end


def _call(rank: int, name: str, step: Step, start_s: float, end_s: float, holdup: Holdup | None) -> Event:
    _, _, wait, side = holdup or (0, 0.0, 0.0, 0)
    return Event(rank, name, "recv" if side == RECV else "send", _stage(step), step[2], start_s, end_s, wait)


def _stage(step: Step) -> int:
    """The stage of a computation; of a transfer, the stage on this side of the boundary."""
    kind, place, _ = step
    return place + (is_transfer(kind) and kind & 7 in (RECV_FORWARD, SEND_BACKWARD))


def _input_name(kind: int) -> str:
    """What a computation waited for."""
    if kind == HOLD:
        return "hold"
    return "recv_forward" if kind == FORWARD or kind >= PAIR else "recv_backward"
