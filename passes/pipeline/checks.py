"""What can be wrong with an order or its times, said before the simulation runs or when it gets stuck."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite

from stepgraph.errors import InputError, Problem
from stepgraph.passes.pipeline.orders import KIND_NAMES, Action, Call, Order


def check_input(
    order: Order,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_forward_s: Sequence[float],
    transfer_backward_s: Sequence[float],
) -> None:
    """Check that all times fit each other and the order, and that every call of the order can be run.

    Shapes: as in `simulate`. Units: seconds.
    Raises: InputError with every problem found.
    """
    stages = len(forward_s)
    boundaries = max(stages - 1, 0)
    problems = [
        *_rank_problems(order, stages),
        *_time_problems("forward_s", forward_s, stages),
        *_time_problems("backward_s", backward_s, stages),
        *_time_problems("transfer_forward_s", transfer_forward_s, boundaries),
        *_time_problems("transfer_backward_s", transfer_backward_s, boundaries),
        *_call_problems(order, stages),
    ]
    if problems:
        raise InputError(problems)


def deadlock(order: Order, unmet: Sequence[tuple[int, Action]], positions: Sequence[int]) -> InputError:
    """The refusal of an order that got stuck: every transfer that waits for its other side, and where that is.

    unmet: the rank and the action of each such transfer. positions: per rank the index of the call it began last.
    """
    owners = {action: rank for rank, calls in enumerate(order) for call in calls for action in call}
    return InputError(
        Problem(
            "pipeline-deadlock",
            f"rank {rank}, call {positions[rank]}",
            f"{_named(action)} waits for {_other_side(action, owners, positions)}",
        )
        for rank, action in sorted(unmet)
    )


def _other_side(action: Action, owners: Mapping[Action, int], positions: Sequence[int]) -> str:
    """Who should post the other side of a transfer, and where that rank stands."""
    kind, place, microbatch = action
    partner = kind ^ 1, place, microbatch
    if partner not in owners:
        return f"a {KIND_NAMES[kind ^ 1]} that no rank posts"
    rank = owners[partner]
    return f"rank {rank} to post {KIND_NAMES[kind ^ 1]}, but rank {rank} is in its call {positions[rank]}"


def _named(action: Action) -> str:
    """An action in words."""
    kind, place, microbatch = action
    return f"{KIND_NAMES[kind]} of micro-batch {microbatch} over boundary {place}"


def _rank_problems(order: Order, stages: int) -> Iterator[Problem]:
    """No rank, no stage, or stages that the ranks cannot share evenly."""
    if not order:
        yield Problem("pipeline-order", "order", "no ranks", "at least one")
    elif not stages or stages % len(order):
        yield Problem("pipeline-stages", "forward_s", f"{stages} entries", f"a multiple of the {len(order)} ranks")


def _time_problems(name: str, times: Sequence[float], length: int) -> Iterator[Problem]:
    """A wrong number of entries, and every entry that is negative or not finite."""
    if len(times) != length:
        yield Problem("pipeline-times", name, f"{len(times)} entries", f"{length}")
    for index, seconds in enumerate(times):
        if not (isfinite(seconds) and seconds >= 0):
            yield Problem("pipeline-times", f"{name}[{index}]", f"{seconds}", "a finite time, zero or more")


def _call_problems(order: Order, stages: int) -> Iterator[Problem]:
    """Calls that are neither one computation nor transfers, and places that lie outside the pipeline."""
    expected = f"one computation or a batch of transfers, within {stages} stages"
    for rank, calls in enumerate(order):
        for index in _bad_calls(calls, stages):
            yield Problem("pipeline-call", f"rank {rank}, call {index}", f"{calls[index]}", expected)


def _bad_calls(calls: Sequence[Call], stages: int) -> Iterator[int]:
    """Positions of the calls that cannot be run. Plain loops: they see every action of a step."""
    boundaries = stages - 1
    batched = (0, 0, boundaries, boundaries, boundaries, boundaries)  # places by kind: no computation in a batch
    single = (stages, stages, *batched[2:])
    for index, call in enumerate(calls):
        places = single if len(call) == 1 else batched
        if not call:
            yield index
        for kind, place, _ in call:
            if not 0 <= place < places[kind]:
                yield index
