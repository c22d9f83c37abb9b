"""What is said when an order gets stuck: which ranks wait, for what, and who should provide it."""

from __future__ import annotations

from collections.abc import Iterator

from stepgraph.errors import InputError, Problem
from stepgraph.passes.pipeline.actions import BACKWARD, FORWARD, INPUT_GRAD, shown
from stepgraph.passes.pipeline.steps import (
    AWAITED,
    KIND_NAMES,
    PAIR,
    PAIRED_BACKWARD,
    PAIRED_INPUT_GRAD,
    POSTED,
    Step,
    is_transfer,
)
from stepgraph.passes.pipeline.trace import RankTrace, Trace


def is_stuck(trace: Trace) -> bool:
    """Whether some rank could not finish."""
    return any(len(rank.ends) < len(rank.program) for rank in trace.ranks)


def deadlock(trace: Trace, stages: int) -> InputError:
    """The refusal (pipeline-deadlock) of an order that got stuck, with a problem for all that some rank waits for."""
    problems: list[Problem] = []
    for rank, each in enumerate(trace.ranks):
        if len(each.ends) == len(each.program):
            continue
        call = each.program[len(each.ends)]
        waits = _transfers_of(call, trace) if is_transfer(call[0][0]) else _input_of(call[0], trace, stages)
        unit = "call" if is_transfer(call[0][0]) else "computation"
        where = f"rank {rank}, {unit} {len(each.ends)}"
        problems.extend(Problem("pipeline-deadlock", where, what) for what in waits)
    return InputError(problems)


def _transfers_of(call: tuple[Step, ...], trace: Trace) -> Iterator[str]:
    """The transfers of a call whose other side has not been posted."""
    for kind, place, microbatch in call:
        mine, other = kind & 7, kind & 7 ^ 1
        rank, index = _found(trace, {(other, place, microbatch)})
        name = f"{KIND_NAMES[mine]} of micro-batch {microbatch} over boundary {place}"
        if rank < 0:
            yield f"{name} waits for a {KIND_NAMES[other]} that no rank posts"
        elif index > len(trace.ranks[rank].ends):
            yield f"{name} waits for rank {rank} to post {KIND_NAMES[other]}, but rank {rank} {_place(trace.ranks[rank])}"


def _input_of(step: Step, trace: Trace, stages: int) -> Iterator[str]:
    """What a computation needs and has not got."""
    kind, stage, microbatch = step
    forward = kind == FORWARD or kind >= PAIR
    last = stage == stages - 1
    source, makers = (stage - 1, (FORWARD,)) if forward else (stage + 1, (BACKWARD, INPUT_GRAD))
    if not forward and last:
        source, makers = stage, (FORWARD,)
    rank, _ = _found(trace, {(maker, source, microbatch) for maker in makers})
    name, needed = shown((FORWARD if forward else BACKWARD, stage, microbatch)), shown((makers[0], source, microbatch))
    if rank < 0:
        yield f"{name} waits for {needed}, which no rank runs"
    else:
        yield f"{name} waits for {needed}, but rank {rank} {_place(trace.ranks[rank])}"


def _found(trace: Trace, wanted: set[Step]) -> tuple[int, int]:
    """Rank and call in which one of these steps is posted or run; (-1, -1) where none is."""
    for rank, each in enumerate(trace.ranks):
        for index, call in enumerate(each.program):
            if any(_plain(step) in wanted for step in call):
                return rank, index
    return -1, -1


def _plain(step: Step) -> Step:
    """A step with the kind that an order or a blocking call has; what only waits is nobody's."""
    kind, place, microbatch = step
    if kind >= PAIR:
        return FORWARD, place, microbatch
    if kind in (PAIRED_BACKWARD, PAIRED_INPUT_GRAD):
        return BACKWARD, place, microbatch
    return (-1 if kind >= AWAITED else kind - POSTED if kind >= POSTED else kind), place, microbatch


def _place(rank: RankTrace) -> str:
    """Where a rank stands."""
    position = len(rank.ends)
    if position == len(rank.program):
        return "has ended"
    call = rank.program[position]
    return f"is in its call {position}" if is_transfer(call[0][0]) else f"is at its computation {position}"
