"""An order, times and a mode become a trace: which engine runs what."""

from __future__ import annotations

from collections.abc import Sequence

from stepgraph.passes.pipeline.actions import Order
from stepgraph.passes.pipeline.calling import call
from stepgraph.passes.pipeline.calls import calls_of
from stepgraph.passes.pipeline.deadlocks import deadlock, is_stuck
from stepgraph.passes.pipeline.durations import Durations, durations
from stepgraph.passes.pipeline.flowing import flow
from stepgraph.passes.pipeline.modes import Mode
from stepgraph.passes.pipeline.steps import Program, computations
from stepgraph.passes.pipeline.timing import Timing
from stepgraph.passes.pipeline.trace import Trace


def trace_of(order: Order, timing: Timing, mode: Mode, microbatches: int) -> Trace:
    """Run an order that has been checked. Raises: InputError (pipeline-mode, pipeline-deadlock)."""
    return run(programs_of(order, timing, mode), durations(order, timing, mode, microbatches), mode, microbatches)


def programs_of(order: Order, timing: Timing, mode: Mode) -> Sequence[Program]:
    """What the ranks run in this mode. Raises: InputError (pipeline-mode)."""
    return computations(order, timing, mode) if mode.transfers == "async" else calls_of(order, timing, mode)


def run(programs: Sequence[Program], seconds: Durations, mode: Mode, microbatches: int) -> Trace:
    """Run programs in the mode that they were made for. Raises: InputError (pipeline-deadlock)."""
    engine = flow if mode.transfers == "async" else call
    trace = engine(programs, seconds, microbatches)
    if is_stuck(trace):
        raise deadlock(trace)
    return trace
