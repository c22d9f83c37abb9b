"""Simulation of a pipeline: an order and the times of its parts become the time of the whole and of every rank."""

from __future__ import annotations

from stepgraph.errors import refuse
from stepgraph.passes.pipeline.accounts import PipelineRun, account
from stepgraph.passes.pipeline.actions import Order
from stepgraph.passes.pipeline.checks import check_order, check_stages
from stepgraph.passes.pipeline.modes import ASYNC, Mode
from stepgraph.passes.pipeline.running import trace_of
from stepgraph.passes.pipeline.schedule import Schedule
from stepgraph.passes.pipeline.steady import shortened
from stepgraph.passes.pipeline.timing import Timing


def simulate(order: Order, timing: Timing, mode: Mode = ASYNC, *, events: bool = False) -> PipelineRun:
    """Run an order, action by action. What starts when is said by the engines, `flowing` and `calling`.

    Raises: InputError for an order that cannot run or does not fit the times (see `check_order`), pipeline-mode for one
    that the mode is not for, pipeline-deadlock for one that gets stuck: it names every rank that waits, and for whom.
    """
    microbatches = check_order(order, timing)
    return account(order, trace_of(order, timing, mode, microbatches), events=events)


def simulate_schedule(
    schedule: Schedule,
    ranks: int,
    chunks: int,
    microbatches: int,
    timing: Timing,
    mode: Mode = ASYNC,
    *,
    events: bool = False,
    most_slots: int | None = None,
) -> PipelineRun:
    """Run a schedule. The same as `simulate` of its order, but for long steps only as much of it as settles down.

    chunks: virtual stages per rank. With events everything is run, however long. most_slots: stages x micro-batches that
    may be run one by one; of a longer step only a steady state can be told.
    Raises: InputError as `simulate`, and as `Schedule.order` for a shape that the schedule does not take;
    pipeline-size where a step that does not settle has more than most_slots.
    """
    run = None if events else shortened(schedule, ranks, chunks, microbatches, timing, mode, most_slots)
    if run is not None:
        return run
    if most_slots is not None and ranks * chunks * microbatches > most_slots:
        what = f"{microbatches} micro-batches on {ranks * chunks} stages, which do not settle into a steady state"
        raise refuse("pipeline-size", "microbatches", what, f"at most {most_slots // (ranks * chunks)} of them")
    order = schedule.order(ranks, chunks, microbatches)
    check_stages(order, timing)
    return account(order, trace_of(order, timing, mode, microbatches), events=events)
