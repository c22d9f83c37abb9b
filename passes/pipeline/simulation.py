"""Event simulation of a pipeline order with blocking, batched point-to-point transfers.

The simulation knows computations and calls, not schedules: any order of `stepgraph.passes.pipeline.orders` runs.
Computations of a rank follow each other. A communication call blocks its rank: a transfer starts when both sides
have posted it, and the call ends when all its transfers have ended. This is how Megatron-LM issues them
(batch_isend_irecv, then a wait for every request), and why a rank can wait in a "send".
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import length_hint
from typing import TypeAlias

import attrs

from stepgraph.passes.pipeline.checks import check_input, deadlock
from stepgraph.passes.pipeline.orders import FORWARD, SEND_FORWARD, Action, Call, Order, call_name

# (start, end, 1 where this rank receives)
_Span: TypeAlias = tuple[float, float, int]


@attrs.frozen
class Event:
    """One call of one rank as a timeline shows it; a communication call lasts from its posting to its end.

    microbatch: that of the call's first action. wait_s: the part of the call in which none of its transfers ran.
    Units: seconds from the start of the pipeline.
    """

    rank: int
    name: str
    microbatch: int
    start_s: float
    end_s: float
    wait_s: float = 0.0


@attrs.frozen
class RankRun:
    """Where one rank's time went: end_s = compute_s + transfer_s + wait_s, and wait_s = wait_send_s + wait_recv_s.

    transfer_s: time inside calls in which at least one of the call's transfers ran. wait_s: the rest of the calls.
    The wait of a call counts for the side (send or receive) of the transfer that ended last in it; of several that end
    together, the one that started last; then the receive. longest_wait_s: the longest wait in one call. peak_microbatches: the most forwards whose
    backward was still to come (per chunk, where a rank holds several).
    Units: seconds; end_s is when the rank's last call ended.
    """

    compute_s: float
    transfer_s: float
    wait_s: float
    end_s: float
    longest_wait_s: float
    wait_send_s: float
    wait_recv_s: float
    peak_microbatches: int


@attrs.frozen
class PipelineRun:
    """One simulated pipeline: the time from the first call to the end of the last rank, and each rank's account.

    events: by rank, then in time; empty unless asked for.
    Units: seconds.
    """

    makespan_s: float
    ranks: tuple[RankRun, ...]
    events: tuple[Event, ...] = ()


def simulate(
    order: Order,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_forward_s: Sequence[float],
    transfer_backward_s: Sequence[float],
    *,
    events: bool = False,
) -> PipelineRun:
    """Run an order with the given time of every computation and transfer.

    start of a transfer = max(posted by the sender, posted by the receiver); end = start + its time; a call ends at
    the latest end of its transfers. Times of a computation are those of one micro-batch.

    Shapes: forward_s and backward_s one entry per stage (ranks x chunks); transfer_* one per boundary (stages - 1).
    Units: seconds.
    Raises: InputError (a ValueError) for times that do not fit the order, and for an order that deadlocks: it names
    every rank that is stuck and what it waits for.
    Source: NVIDIA/Megatron-LM, megatron/core/pipeline_parallel/p2p_communication.py.
    """
    check_input(order, forward_s, backward_s, transfer_forward_s, transfer_backward_s)
    # by kind: both sides of a transfer find the same times
    seconds = (forward_s, backward_s, *(transfer_forward_s,) * 2, *(transfer_backward_s,) * 2)
    ranks = [_Rank(index, calls, events) for index, calls in enumerate(order)]
    unmet = _run(ranks, seconds)
    if unmet:
        raise deadlock(order, unmet, [rank.position for rank in ranks])
    return PipelineRun(
        makespan_s=max(rank.clock for rank in ranks),
        ranks=tuple(rank.account() for rank in ranks),
        events=tuple(event for rank in ranks for event in rank.events or ()),
    )


class _Rank:
    """The running state of one rank. While it is blocked, its clock stands at the time its call was posted."""

    __slots__ = (
        "calls", "clock", "compute_s", "events", "in_flight", "index", "missing", "peak", "rest", "spans",
        "transfer_s", "waits_s",
    )  # fmt: skip

    def __init__(self, index: int, calls: tuple[Call, ...], events: bool) -> None:
        self.index = index
        self.calls = calls
        self.rest = iter(calls)  # what has not begun
        self.clock = self.compute_s = self.transfer_s = 0.0
        self.waits_s: tuple[list[float], list[float]] = ([], [])  # per call, by side: send, receive
        self.in_flight = self.peak = 0  # micro-batches
        self.missing = 0  # transfers of the posted call that the other side has not posted
        self.spans: list[_Span] = []  # of the posted call, those that both sides have posted
        self.events: list[Event] | None = [] if events else None

    @property
    def position(self) -> int:
        """Index of the call that began last."""
        return len(self.calls) - length_hint(self.rest) - 1

    def compute(self, kind: int, seconds: float) -> None:
        """Advance by one computation."""
        start = self.clock
        self.clock = start + seconds
        self.compute_s += seconds
        if kind != FORWARD:
            self.in_flight -= 1
        elif self.in_flight == self.peak:
            self.in_flight = self.peak = self.peak + 1
        else:
            self.in_flight += 1
        if self.events is not None:
            self.events.append(self.event(start, 0.0))

    def finish_call(self) -> None:
        """Close the posted call, all of whose transfers have met: advance to its end and account for its time.

        Its wait is the sum of the gaps in which none of its transfers ran.
        """
        posted = reached = self.clock
        wait, late = 0.0, 0
        spans = self.spans
        if len(spans) > 1:
            spans.sort()
        for start, end, receives in spans:
            if start > reached:
                wait += start - reached
            if end >= reached:
                reached, late = end, receives
        spans.clear()
        self.clock = reached
        self.transfer_s += reached - posted - wait
        self.waits_s[late].append(wait)
        if self.events is not None:
            self.events.append(self.event(posted, wait))

    def event(self, start_s: float, wait_s: float) -> Event:
        """The call that has just ended."""
        call = self.calls[self.position]
        return Event(self.index, call_name(call), call[0][2], start_s, self.clock, wait_s)

    def account(self) -> RankRun:
        """The frozen account of a rank that has ended."""
        send, recv = self.waits_s
        return RankRun(
            compute_s=self.compute_s,
            transfer_s=self.transfer_s,
            wait_s=sum(send) + sum(recv),
            end_s=self.clock,
            longest_wait_s=max(chain(send, recv), default=0.0),
            wait_send_s=sum(send),
            wait_recv_s=sum(recv),
            peak_microbatches=self.peak,
        )


def _run(ranks: list[_Rank], seconds: Sequence[Sequence[float]]) -> list[tuple[int, Action]]:
    """Advance every rank as far as it goes; return the transfers that still wait, each with its rank."""
    posted: dict[int, _Rank] = {}
    ready = ranks[::-1]
    while ready:
        rank = ready.pop()
        for call in rank.rest:
            kind, place, _ = call[0]
            if kind < SEND_FORWARD:
                rank.compute(kind, seconds[kind][place])
            elif _post(rank, call, seconds, posted, ready):
                break
    return [(rank.index, _action(key, len(seconds[0]))) for key, rank in posted.items()]


def _post(
    rank: _Rank, call: Call, seconds: Sequence[Sequence[float]], posted: dict[int, _Rank], ready: list[_Rank]
) -> int:
    """Post a call and return how many of its transfers wait for their other side; with none the call is finished.

    A transfer that meets its other side gets its span on both ranks. Its key is an integer in which the two sides
    differ in the lowest bit only.
    """
    stages, clock, spans = len(seconds[0]), rank.clock, rank.spans
    for kind, place, microbatch in call:
        key = (microbatch * stages + place) * 8 + kind
        other = posted.pop(key ^ 1, None)
        if other is None:
            posted[key] = rank
            rank.missing += 1
            continue
        start = clock if clock > other.clock else other.clock  # noqa: FURB136 - max() is slow in the inner loop
        end = start + seconds[kind][place]
        receives = kind & 1
        spans.append((start, end, receives))
        other.spans.append((start, end, 1 - receives))
        other.missing -= 1
        if not other.missing:
            other.finish_call()
            ready.append(other)
    if not rank.missing:
        rank.finish_call()
    return rank.missing


def _action(key: int, stages: int) -> Action:
    """The action that has this key in `_post`."""
    microbatch, place = divmod(key // 8, stages)
    return key % 8, place, microbatch
