"""What can be wrong with an order, said before it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepgraph.errors import InputError, Problem
from stepgraph.passes.pipeline.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Order, Slot, shown
from stepgraph.passes.pipeline.timing import Timing


def check_order(order: Order, timing: Timing) -> int:
    """Check that an order can be simulated with these times; returns its number of micro-batches.

    Raises: InputError with every problem found: pipeline-order (no ranks, a stage on no rank), pipeline-stages (not as
    many as there are times), pipeline-slot (a slot that is neither one action nor a forward and a backward, an action
    on a rank that does not have its stage), pipeline-twice (an action that stands there twice, or a weight gradient
    before its input gradient), pipeline-turn (an action before another of its own rank that it needs).
    """
    problems = [*_stage_problems(order, timing)]
    if not problems:
        rough = [rank for rank in range(len(order.ranks)) if not _is_plain(order, rank)]
        problems = [problem for rank in rough for problem in _slot_problems(order, rank)]
        problems = problems or [problem for rank in range(len(order.ranks)) for problem in _early(order, rank)]
    if problems:
        raise InputError(problems)
    return 1 + max((which for slots in order.ranks for slot in slots for _, _, which in slot), default=-1)


def check_stages(order: Order, timing: Timing) -> None:
    """Raises: InputError (pipeline-order, pipeline-stages): no ranks, or other stages than the times are for."""
    problems = list(_stage_problems(order, timing))
    if problems:
        raise InputError(problems)


def _stage_problems(order: Order, timing: Timing) -> Iterator[Problem]:
    ranks, stages = len(order.ranks), len(order.stage_rank)
    if not any(order.ranks):
        yield Problem("pipeline-order", "order", f"{ranks} ranks that do nothing", "at least one action")
    elif not stages or stages % ranks or set(order.stage_rank) != set(range(ranks)):
        what = f"{stages} stages on the ranks {order.stage_rank[:16]}"
        yield Problem("pipeline-stages", "order", what, f"as many stages on each of the {ranks} ranks")
    if stages != timing.stages:
        yield Problem("pipeline-stages", "timing", f"times of {timing.stages} stages", f"of {stages}")


def _is_plain(order: Order, rank: int) -> bool:
    """Whether a rank runs forwards and whole backwards of its stages, once each: then it needs no closer look."""
    slots = order.ranks[rank]
    if not slots or any(len(slot) != 1 for slot in slots) or len(set(slots)) < len(slots):
        return False
    kinds = {(kind, stage) for ((kind, stage, _),) in slots}
    own = {stage for stage, owner in enumerate(order.stage_rank) if owner == rank}
    return (
        all(kind in (FORWARD, BACKWARD) and stage in own for kind, stage in kinds)
        and min(which for ((_, _, which),) in slots) >= 0
    )


def _slot_problems(order: Order, rank: int) -> Iterator[Problem]:
    seen: set[Action] = set()
    for index, slot in enumerate(order.ranks[rank]):
        if not _can_run(slot, rank, order.stage_rank):
            expected = f"an action, or a forward and a backward, of a stage of rank {rank}"
            yield Problem("pipeline-slot", f"rank {rank}, slot {index}", f"{slot}", expected)
            continue
        yield from _turn_problems(slot, seen, f"rank {rank}, slot {index}")


def _can_run(slot: Slot, rank: int, stage_rank: Sequence[int]) -> bool:
    kinds = sorted(kind for kind, _, _ in slot)
    if len(kinds) != 1 and kinds not in ([FORWARD, BACKWARD], [FORWARD, INPUT_GRAD]):
        return False
    return all(
        FORWARD <= kind <= WEIGHT_GRAD and 0 <= stage < len(stage_rank) and stage_rank[stage] == rank and which >= 0
        for kind, stage, which in slot
    )


def _turn_problems(slot: Slot, seen: set[Action], where: str) -> Iterator[Problem]:
    """Actions that were seen before, a backward in whole and in parts, weight gradients that come too soon."""
    for action in slot:
        kind, stage, which = action
        if action in seen or (kind in (BACKWARD, INPUT_GRAD) and (BACKWARD + INPUT_GRAD - kind, stage, which) in seen):
            yield Problem("pipeline-twice", where, f"{shown(action)} again", fix="keep one")
        if kind == WEIGHT_GRAD and (INPUT_GRAD, stage, which) not in seen:
            needed = shown((INPUT_GRAD, stage, which))
            yield Problem("pipeline-twice", where, f"{shown(action)} does not come after {needed}")
        seen.add(action)


def _early(order: Order, rank: int) -> Iterator[Problem]:
    """Actions that need another one which their own rank runs later: no mode can run these."""
    slots = order.ranks[rank]
    places = {action: index for index, slot in enumerate(slots) for action in slot}
    for index, slot in enumerate(slots):
        for action in slot:
            needed = next((other for other in _inputs(action, rank, order) if places.get(other, -1) > index), None)
            if needed is not None:
                what = f"{shown(action)} comes before {shown(needed)}, which it needs"
                yield Problem("pipeline-turn", f"rank {rank}, slot {index}", what)


def _inputs(action: Action, rank: int, order: Order) -> Iterator[Action]:
    """What an action needs of its own rank: the stage before or after, where that is here, and its own forward."""
    kind, stage, which = action
    if kind == FORWARD:
        if stage and order.stage_rank[stage - 1] == rank:
            yield FORWARD, stage - 1, which
        return
    yield FORWARD, stage, which
    if kind != WEIGHT_GRAD and stage + 1 < len(order.stage_rank) and order.stage_rank[stage + 1] == rank:
        yield BACKWARD, stage + 1, which
        yield INPUT_GRAD, stage + 1, which
