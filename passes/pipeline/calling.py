"""The engine for communication calls: every transfer starts when both sides have posted it.

Computations and calls of a rank follow each other. A blocking call posts its transfers and lasts until all of them
have ended; this is how Megatron-LM issues them (batch_isend_irecv, then a wait for every request), and why a rank can
wait in a "send". A call may also only post its transfers, or only wait for what was posted before.

    start of a transfer = max(posted by the sender, posted by the receiver); end = start + its time

Source: NVIDIA/Megatron-LM megatron/core/pipeline_parallel/p2p_communication.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from stepgraph.passes.pipeline.durations import Durations, Row
from stepgraph.passes.pipeline.steps import AWAITED, HOLD, POSTED, SEND_FORWARD, Call, Program
from stepgraph.passes.pipeline.trace import RECV, ROUNDING, RankTrace, Trace

# Postings are times; below zero there is none yet, and below -1 the rank -2 - posting sleeps until there is.
_MISSING = -1.0

_Span: TypeAlias = tuple[float, float, int]
"""(start, end, SEND or RECV) of one transfer."""
_Posts: TypeAlias = Sequence[Sequence[Row]]
"""When each side posted, by kind of transfer, boundary and micro-batch."""


def call(programs: Sequence[Program], durations: Durations, microbatches: int) -> Trace:
    """Run the calls of all ranks as far as they go. A rank that is stuck has fewer ends than calls."""
    boundaries = len(durations.hold_s) - 1
    posts = [[[_MISSING] * microbatches for _ in range(boundaries if kind >= SEND_FORWARD else 0)] for kind in range(8)]
    traces = tuple(RankTrace(program, [], []) for program in programs)
    woken = list(reversed(range(len(traces))))
    runs = [_rank(rank, trace, durations, posts, woken) for rank, trace in enumerate(traces)]
    while woken:
        next(runs[woken.pop()], None)
    return Trace(traces, len(durations.hold_s))


def _rank(rank: int, trace: RankTrace, durations: Durations, posts: _Posts, woken: list[int]) -> Iterator[None]:
    """One rank; it yields where the other side of a transfer is missing. The inner loop."""
    clock = 0.0
    rows, hold_s = durations.rows, durations.hold_s
    ends, asleep = trace.ends, -2.0 - rank
    ended, held_up = ends.append, trace.holdups.append
    spans: list[_Span] = []
    for transfers in trace.program:
        kind, place, microbatch = transfers[0]
        if kind < SEND_FORWARD or kind >= HOLD:
            if kind == HOLD and hold_s[place] > clock:
                held_up((len(ends), 0.0, hold_s[place] - clock, RECV))
                clock = hold_s[place]
            clock += rows[kind][place][microbatch]
            ended(clock)
            continue
        posts_now = kind < AWAITED
        if posts_now:
            _post(transfers, clock, posts, woken)
        if posts_now and kind >= POSTED:
            ended(clock)
            continue
        for kind, place, microbatch in transfers:
            kind &= 7
            other = posts[kind ^ 1][place]
            start = other[microbatch]
            while start < 0.0:
                other[microbatch] = asleep
                yield
                start = other[microbatch]
            posted = posts[kind][place][microbatch]
            if start < posted:  # noqa: PLR1730 - max() is slow in the inner loop
                start = posted
            spans.append((start, start + rows[kind][place][microbatch], kind & 1))
        reached, wait, side = _settled(clock, spans)
        if posts_now or reached - clock > ROUNDING * reached:
            held_up((len(ends), reached - clock - wait, wait, side))
        clock = reached
        ended(clock)
        spans.clear()


def _post(transfers: Call, clock: float, posts: _Posts, woken: list[int]) -> None:
    """Post transfers; ranks that slept on them wake."""
    for kind, place, microbatch in transfers:
        mine = posts[kind & 7][place]
        sleeper = mine[microbatch]
        mine[microbatch] = clock
        if sleeper < _MISSING:
            woken.append(int(-2.0 - sleeper))


def _settled(clock: float, spans: list[_Span]) -> tuple[float, float, int]:
    """The end of a call that began at `clock`, its wait, and whether it is a send or a receive.

    Its wait is the sum of the gaps in which none of its transfers ran. A call that sends anything is a send: so its name
    begins in Megatron-LM (send_forward_recv_backward), and so a profile lists it.
    """
    reached, wait = clock, 0.0
    spans.sort()
    for start, end, _ in spans:
        if start > reached:
            wait += start - reached
        if end > reached:  # noqa: PLR1730 - max() is slow in the inner loop
            reached = end
    return reached, wait, min(side for _, _, side in spans)
