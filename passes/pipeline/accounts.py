"""Where the time of each rank went: what a simulated pipeline tells, read off the ends of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import attrs

from stepgraph.passes.pipeline.actions import FORWARD, Order
from stepgraph.passes.pipeline.events import Event, events_of
from stepgraph.passes.pipeline.peaks import peak_activations
from stepgraph.passes.pipeline.steps import PAIR, is_backward
from stepgraph.passes.pipeline.trace import RECV, SEND, Holdup, RankTrace, Trace


@attrs.frozen
class RankRun:
    """Where one rank's time went: end_s = compute_s + transfer_s + wait_s.

    transfer_*_s: time inside communication calls in which at least one of the call's transfers ran; wait_*_s: the rest
    of the calls. A call that sends anything is a send, as its name begins in Megatron-LM and as a profile lists it; a
    receive is one that only receives. longest_*_s: the longest single call of a side,
    transfer and wait together, which is what a profile shows.

    Where transfers never block, each gap before a computation is a receive: transfer while its input was on the way,
    wait before that. Waiting for parameters (`Timing.first_not_before_s`) counts as a receive too.

    idle_s: from end_s, the end of the rank's last call, to the end of the last rank. peak_microbatches: the most
    activations held at once, in micro-batches of the whole rank.
    Units: seconds.
    """

    compute_s: float
    end_s: float
    idle_s: float
    transfer_send_s: float
    transfer_recv_s: float
    wait_send_s: float
    wait_recv_s: float
    longest_send_s: float
    longest_recv_s: float
    longest_wait_s: float
    peak_microbatches: float

    @property
    def transfer_s(self) -> float:
        """Transfer of both sides."""
        return self.transfer_send_s + self.transfer_recv_s

    @property
    def wait_s(self) -> float:
        """Wait of both sides."""
        return self.wait_send_s + self.wait_recv_s

    @property
    def send_s(self) -> float:
        """What a profile would show as sends: transfer and wait."""
        return self.transfer_send_s + self.wait_send_s

    @property
    def recv_s(self) -> float:
        """What a profile would show as receives: transfer and wait."""
        return self.transfer_recv_s + self.wait_recv_s


@attrs.frozen
class PipelineRun:
    """One simulated pipeline, from its first computation to the end of the last rank.

    last_backward_s: by stage, when its last backward (or weight gradient) ended: its gradients are complete.
    first_forward_s: by stage, when its forward of micro-batch 0 started. events: by rank, then in time; empty unless
    asked for.
    Units: seconds.
    """

    makespan_s: float
    ranks: tuple[RankRun, ...]
    last_backward_s: tuple[float, ...]
    first_forward_s: tuple[float, ...]
    events: tuple[Event, ...] = ()


def account(order: Order, trace: Trace, *, events: bool = False) -> PipelineRun:
    """Read the accounts of a step off its trace, in which no rank is stuck."""
    ends = [rank.ends[-1] if rank.ends else 0.0 for rank in trace.ranks]
    makespan = max(ends)
    peaks = peak_activations(order)
    return PipelineRun(
        makespan,
        tuple(
            _rank_run(rank.holdups, end, makespan, peak)
            for rank, end, peak in zip(trace.ranks, ends, peaks, strict=True)
        ),
        _by_stage(order, trace, _last_backwards),
        _by_stage(order, trace, _first_forwards),
        tuple(event for index, rank in enumerate(trace.ranks) for event in events_of(index, rank)) if events else (),
    )


def _rank_run(holdups: Sequence[Holdup], end_s: float, makespan_s: float, peak: float) -> RankRun:
    """Computing is what is left of a rank's time when all holdups are taken off."""
    transfer_s, wait_s = sums(holdups)
    return RankRun(
        compute_s=max(0.0, end_s - sum(transfer_s) - sum(wait_s)),
        end_s=end_s,
        idle_s=makespan_s - end_s,
        transfer_send_s=transfer_s[SEND],
        transfer_recv_s=transfer_s[RECV],
        wait_send_s=wait_s[SEND],
        wait_recv_s=wait_s[RECV],
        longest_send_s=_longest(holdups, SEND),
        longest_recv_s=_longest(holdups, RECV),
        longest_wait_s=max((wait for _, _, wait, _ in holdups), default=0.0),
        peak_microbatches=peak,
    )


def _longest(holdups: Sequence[Holdup], which: int) -> float:
    return max((transfer + wait for _, transfer, wait, side in holdups if side == which), default=0.0)


def sums(holdups: Iterable[Holdup]) -> tuple[list[float], list[float]]:
    """Seconds of transfer and of waiting, each by side (send, receive)."""
    transfer_s, wait_s = [0.0, 0.0], [0.0, 0.0]
    for _, transfer, wait, side in holdups:
        transfer_s[side] += transfer
        wait_s[side] += wait
    return transfer_s, wait_s


_Found: TypeAlias = Iterator[tuple[int, float]]


def _by_stage(order: Order, trace: Trace, find: Callable[[RankTrace], _Found]) -> tuple[float, ...]:
    """A time of every stage, 0 where there is none. Each rank is searched until all of its stages have theirs."""
    times = dict.fromkeys(range(len(order.stage_rank)), 0.0)
    for rank in trace.ranks:
        missing = order.chunks
        seen: set[int] = set()
        for stage, seconds in find(rank):
            if stage not in seen:
                times[stage] = seconds
                seen.add(stage)
            if len(seen) == missing:
                break
    return tuple(times.values())


def _last_backwards(rank: RankTrace) -> _Found:
    """Stage and end of each backward, the last first."""
    for index in range(len(rank.program) - 1, -1, -1):
        kind, stage, _ = rank.program[index][0]
        if is_backward(kind):
            yield stage, rank.ends[index]


def _first_forwards(rank: RankTrace) -> _Found:
    """Stage and start of each forward of micro-batch 0: where the call before it ended, or the holdup between them."""
    for index, call in enumerate(rank.program):
        kind, stage, microbatch = call[0]
        if microbatch == 0 and (kind == FORWARD or kind >= PAIR):
            yield stage, (rank.ends[index - 1] if index else 0.0) + _held_s(rank.holdups, index)


def _held_s(holdups: Iterable[Holdup], index: int) -> float:
    return next((transfer + wait for at, transfer, wait, _ in holdups if at == index), 0.0)
