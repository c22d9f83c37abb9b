"""The engine for transfers that never block: a longest path through the order.

A computation starts when its rank is free and its input has arrived. What it makes leaves at its end, or when the
link is free: a link (one boundary, one direction) carries one tensor at a time, in the order in which they are made.

    start = max(end of the rank's last computation, arrival of the input)
    arrival = max(end of the producer, arrival of the tensor before it on the link) + hop

Receives are posted before they are needed, so nothing else is waited for. This is what PyTorch's pipelining runtime
does (pytorch/pytorch torch/distributed/pipelining/stage.py: sends and receives are asynchronous operations, and only
the computation that needs a tensor waits for it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from stepgraph.passes.pipeline.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD
from stepgraph.passes.pipeline.durations import Durations, Row
from stepgraph.passes.pipeline.steps import (
    AWAIT,
    HOLD,
    PAIR,
    PAIRED_BACKWARD,
    PAIRED_INPUT_GRAD,
    SEND_BACKWARD,
    SEND_FORWARD,
    Program,
)
from stepgraph.passes.pipeline.trace import RECV, ROUNDING, Holdup, RankTrace, Trace

# Arrivals are times; below zero there is none yet, and below -1 the rank -2 - arrival sleeps until there is.
_MISSING = -1.0

_Entry: TypeAlias = tuple[Row, Row, Row, Row, Row, Row]
"""Of a step: arrivals of its input, hops of its input, seconds, hops of its output, the link's last arrival, arrivals
of its output."""
_Table: TypeAlias = Sequence[Sequence[_Entry]]


def flow(programs: Sequence[Program], durations: Durations, microbatches: int) -> Trace:
    """Run the computations of all ranks as far as they go. A rank that is stuck has fewer ends than calls."""
    stages = len(durations.hold_s)
    arrivals = _arrivals(stages, microbatches)
    table = _table(durations, arrivals, microbatches)
    traces = tuple(RankTrace(program, [], []) for program in programs)
    woken = list(reversed(range(len(traces))))
    runs = [_rank(rank, trace, table, woken) for rank, trace in enumerate(traces)]
    while woken:
        next(runs[woken.pop()], None)
    return Trace(traces, stages, (*arrivals[0][1:], *arrivals[1][:-1]))


def _rank(rank: int, trace: RankTrace, table: _Table, woken: list[int]) -> Iterator[None]:
    """One rank; it yields where its next input is missing. The inner loop: everything in it costs time per action."""
    clock = 0.0
    ends, asleep = trace.ends, -2.0 - rank
    ended, held_up = ends.append, trace.holdups.append
    for ((kind, stage, microbatch),) in trace.program:
        arrived, came, seconds, hops, link, onward = table[kind][stage]
        ready = arrived[microbatch]
        while ready < 0.0:
            arrived[microbatch] = asleep
            yield
            ready = arrived[microbatch]
        if ready > clock:
            if ready - clock > ROUNDING * ready:
                held_up(_holdup(len(ends), ready - clock, came[microbatch]))
            clock = ready
        clock += seconds[microbatch]
        ended(clock)
        leaves = link[0]
        if leaves < clock:  # noqa: PLR1730 - max() is slow in the inner loop
            leaves = clock
        sleeper = onward[microbatch]
        onward[microbatch] = link[0] = leaves + hops[microbatch]
        if sleeper < _MISSING:
            woken.append(int(-2.0 - sleeper))


def _holdup(index: int, gap: float, hop: float) -> Holdup:
    """A gap before a computation: its input was on the way in the last `hop` seconds of it, and awaited before."""
    return (index, hop, gap - hop, RECV) if hop < gap else (index, gap, 0.0, RECV)


def _arrivals(stages: int, microbatches: int) -> tuple[list[Row], list[Row]]:
    """Rows of arrivals of forward and backward inputs, by stage. The first stage's forwards find theirs at once."""
    forward, backward = ([[_MISSING] * microbatches for _ in range(stages)] for _ in range(2))
    forward[0] = [0.0] * microbatches
    return forward, backward


def _table(durations: Durations, arrivals: tuple[list[Row], list[Row]], microbatches: int) -> _Table:
    """By kind and stage, all that a step of that kind looks up. The last stage hands its output to its own backward."""
    rows = durations.rows
    stages = len(durations.hold_s)
    forward, backward = arrivals
    none, nowhere = [0.0] * microbatches, [0.0] * microbatches
    down, up = [*rows[SEND_FORWARD], none], [*rows[SEND_BACKWARD], none]
    links = [[0.0] for _ in range(2 * stages + 1)]
    spare = links[-1]
    table: list[list[_Entry]] = [[] for _ in rows]
    for s in range(stages):
        onward = forward[s + 1] if s + 1 < stages else backward[s]
        back = backward[s - 1] if s else nowhere
        out = (down[s], links[2 * s], onward)
        home = (up[s - 1], links[2 * s + 1], back)
        table[FORWARD].append((forward[s], down[s - 1], rows[FORWARD][s], *out))
        table[BACKWARD].append((backward[s], up[s], rows[BACKWARD][s], *home))
        table[INPUT_GRAD].append((backward[s], up[s], rows[INPUT_GRAD][s], *home))
        table[WEIGHT_GRAD].append((none, none, rows[WEIGHT_GRAD][s], none, spare, nowhere))
        table[HOLD].append(([durations.hold_s[s]] * microbatches, none, none, none, spare, nowhere))
        table[AWAIT].append((backward[s], up[s], none, none, spare, nowhere))
        table[PAIRED_BACKWARD].append((none, none, none, *home))
        table[PAIRED_INPUT_GRAD].append((none, none, none, *home))
        for other in range(stages):
            if rows[PAIR + other]:
                table[PAIR + other].append((forward[s], down[s - 1], rows[PAIR + other][s], *out))
    return table
