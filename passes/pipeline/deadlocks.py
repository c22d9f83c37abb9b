"""What is said when an order gets stuck: which ranks wait, for what, and who should provide it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import attrs

from stepgraph.errors import InputError, Problem
from stepgraph.passes.pipeline.actions import BACKWARD, FORWARD, INPUT_GRAD, shown
from stepgraph.passes.pipeline.steps import (
    AWAITED,
    KIND_NAMES,
    PAIR,
    PAIRED_BACKWARD,
    POSTED,
    Call,
    Step,
    is_transfer,
)
from stepgraph.passes.pipeline.trace import RankTrace, Trace

_FIX: Final = "blocking calls fit orders such as 1F1B; async runs any order whose inputs exist"


def is_stuck(trace: Trace) -> bool:
    """Whether some rank could not finish."""
    return any(len(rank.ends) < len(rank.program) for rank in trace.ranks)


def deadlock(trace: Trace) -> InputError:
    """The refusal (pipeline-deadlock) of an order that got stuck, with a problem for all that some rank waits for."""
    makers = {
        _plain(step): (rank, index)
        for rank, each in enumerate(trace.ranks)
        for index, call in enumerate(each.program)
        for step in call
    }
    problems = [
        Problem("pipeline-deadlock", _where(rank, each), what)
        for rank, each in enumerate(trace.ranks)
        if len(each.ends) < len(each.program)
        for what in _needs(_next(each), makers, trace)
    ]
    blocking = any(is_transfer(call[0][0]) for each in trace.ranks for call in each.program)
    return InputError([*problems[:-1], attrs.evolve(problems[-1], fix=_FIX if blocking else "")])


def _next(rank: RankTrace) -> Call:
    return rank.program[len(rank.ends)]


def _where(rank: int, trace: RankTrace) -> str:
    return f"rank {rank}, {'call' if is_transfer(_next(trace)[0][0]) else 'computation'} {len(trace.ends) + 1}"


def _needs(call: Call, makers: Mapping[Step, tuple[int, int]], trace: Trace) -> Iterator[str]:
    """What a call waits for: the other sides of its transfers, or the input of its computation."""
    if not is_transfer(call[0][0]):
        yield _input(call[0], makers, trace)
        return
    for kind, place, microbatch in call:
        mine, other = kind & 7, kind & 7 ^ 1
        rank, index = makers.get((other, place, microbatch), (-1, 0))
        name = f"{KIND_NAMES[mine]} of micro-batch {microbatch} over boundary {place}"
        if rank < 0:
            yield f"{name} waits for a {KIND_NAMES[other]} that no rank posts"
        elif index > len(trace.ranks[rank].ends):
            yield f"{name} waits for rank {rank} to post {KIND_NAMES[other]}, but rank {rank} {_stands(trace.ranks[rank])}"


def _input(step: Step, makers: Mapping[Step, tuple[int, int]], trace: Trace) -> str:
    """The computation that a stuck one waits for: a backward waits for the next stage's, the last for its forward."""
    kind, stage, microbatch = step
    if kind == FORWARD or kind >= PAIR:
        name, sources = (FORWARD, stage, microbatch), [(FORWARD, stage - 1, microbatch)]
    else:
        name = (BACKWARD, stage, microbatch)
        sources = [(BACKWARD, stage + 1, microbatch), (INPUT_GRAD, stage + 1, microbatch)]
        if stage == trace.stages - 1:
            sources = [(FORWARD, stage, microbatch)]
    known = next((source for source in sources if source in makers), None)
    if known is None:
        return f"{shown(name)} waits for {shown(sources[0])}, which no rank runs"
    rank = makers[known][0]
    return f"{shown(name)} waits for {shown(known)}, but rank {rank} {_stands(trace.ranks[rank])}"


def _plain(step: Step) -> Step:
    """A step with the kind that an order or a blocking call has; what only waits is nobody's."""
    kind, place, microbatch = step
    if kind >= PAIR:
        return FORWARD, place, microbatch
    if kind >= PAIRED_BACKWARD:
        return (BACKWARD if kind == PAIRED_BACKWARD else INPUT_GRAD), place, microbatch
    return (-1 if kind >= AWAITED else kind - POSTED if kind >= POSTED else kind), place, microbatch


def _stands(rank: RankTrace) -> str:
    """Where a rank stands."""
    position = len(rank.ends)
    if position == len(rank.program):
        return "has ended"
    call = rank.program[position]
    return f"is {'in its call' if is_transfer(call[0][0]) else 'at its computation'} {position + 1}"
