"""What a run becomes when periods of its steady state are put in."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from stepgraph.passes.pipeline.accounts import PipelineRun, RankRun, sums
from stepgraph.passes.pipeline.trace import RankTrace, Trace


def grown(run: PipelineRun, trace: Trace, windows: Sequence[range], seconds: float, times: int) -> PipelineRun:
    """Put the calls of every rank in its window in again, `times` times, each time taking `seconds`.

    Ends move by times x seconds and sums grow by times x those of the window; what is longest or most stays, because
    the calls that are put in repeat those of the window.
    """
    later = times * seconds
    return attrs.evolve(
        run,
        makespan_s=run.makespan_s + later,
        ranks=tuple(
            _grown(rank, each, window, later, times)
            for rank, each, window in zip(run.ranks, trace.ranks, windows, strict=True)
        ),
        last_backward_s=tuple(end + later for end in run.last_backward_s),
    )


def _grown(rank: RankRun, trace: RankTrace, window: range, later: float, times: int) -> RankRun:
    transfer_s, wait_s = sums(holdup for holdup in trace.holdups if holdup[0] in window)
    return attrs.evolve(
        rank,
        end_s=rank.end_s + later,
        compute_s=rank.compute_s + later - times * (sum(transfer_s) + sum(wait_s)),
        transfer_send_s=rank.transfer_send_s + times * transfer_s[0],
        transfer_recv_s=rank.transfer_recv_s + times * transfer_s[1],
        wait_send_s=rank.wait_send_s + times * wait_s[0],
        wait_recv_s=rank.wait_recv_s + times * wait_s[1],
    )
