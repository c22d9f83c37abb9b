"""An order, times and a mode become a trace: which engine runs what."""

from __future__ import annotations

from stepgraph.passes.pipeline.actions import Order
from stepgraph.passes.pipeline.calling import call
from stepgraph.passes.pipeline.calls import calls_of
from stepgraph.passes.pipeline.deadlocks import deadlock, is_stuck
from stepgraph.passes.pipeline.durations import Spread, as_they_are, durations
from stepgraph.passes.pipeline.flowing import flow
from stepgraph.passes.pipeline.modes import Mode
from stepgraph.passes.pipeline.steps import programs
from stepgraph.passes.pipeline.timing import Timing
from stepgraph.passes.pipeline.trace import Trace


def trace_of(order: Order, timing: Timing, mode: Mode, microbatches: int, spread: Spread = as_they_are) -> Trace:
    """Run an order that has been checked. Raises: InputError (pipeline-mode, pipeline-deadlock)."""
    seconds = durations(order, timing, mode, microbatches, spread)
    if mode.transfers == "async":
        trace = flow(programs(order, timing, mode), seconds, microbatches)
    else:
        trace = call(calls_of(order, timing, mode), seconds, microbatches)
    if is_stuck(trace):
        raise deadlock(trace, timing.stages)
    return trace
