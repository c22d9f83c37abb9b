"""What can be wrong with a written order: stages on two ranks, actions that are missing, doubled or in the wrong turn.

Whether the ranks can wait for each other without end is not asked here: the simulation finds out as it runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from stepgraph.errors import Problem
from stepgraph.passes.pipeline.actions import BACKWARD, FORWARD, INPUT_GRAD, LETTERS, WEIGHT_GRAD, Action, Slot, shown

Row: TypeAlias = Sequence[tuple[str, Slot]]
"""The slots of a rank, each with its place in words."""
_Places: TypeAlias = Mapping[Action, tuple[int, str]]
"""Where each action stands first: a number that grows along a rank's row, and the place in words."""


def order_problems(rows: Sequence[Row], where: str, *, complete: bool = True) -> Iterator[Problem]:
    """All problems of an order whose row i is rank i. `complete` off: nothing is said to be missing.

    Codes: pipeline-file-rank (a rank without actions), pipeline-file-stage (a stage on two ranks, or numbers of
    stages that do not fit), pipeline-file-twice, pipeline-file-turn (a forward after its backward, a weight gradient
    before its input gradient), pipeline-file-split (a backward both in whole and in parts), pipeline-file-missing.
    """
    places, repeated = _first_places(rows)
    kinds = _kinds(places)
    yield from repeated
    yield from _turn_problems(places)
    yield from _split_problems(kinds, places)
    yield from _owner_problems(rows)
    if complete:
        yield from _rank_problems(rows, where)
        yield from _number_problems(kinds, where)
        yield from _missing_problems(kinds, where)


def stage_owners(rows: Iterable[Row]) -> dict[int, int]:
    """The rank of every stage: that of the row in which it stands first."""
    owners: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for _, slot in row:
            for _, stage, _ in slot:
                owners.setdefault(stage, rank)
    return owners


def _first_places(rows: Sequence[Row]) -> tuple[dict[Action, tuple[int, str]], list[Problem]]:
    """Where each action stands, and a problem for each that stands there again."""
    places: dict[Action, tuple[int, str]] = {}
    repeated = []
    for row in rows:
        for turn, (place, slot) in enumerate(row):
            for action in slot:
                first = places.setdefault(action, (turn, place))
                if first != (turn, place):
                    repeated.append(_repeated(action, place, first[1]))
    return places, repeated


def _repeated(action: Action, place: str, first: str) -> Problem:
    return Problem("pipeline-file-twice", place, f"{shown(action)} stands in {first} already", fix="keep one")


def _kinds(places: Iterable[Action]) -> dict[tuple[int, int], set[int]]:
    """By (stage, micro-batch), the kinds of its actions."""
    kinds: dict[tuple[int, int], set[int]] = defaultdict(set)
    for kind, stage, microbatch in places:
        kinds[stage, microbatch].add(kind)
    return kinds


def _turn_problems(places: _Places) -> Iterator[Problem]:
    """A forward has to come before its backward, and an input gradient before its weight gradient."""
    before = {BACKWARD: FORWARD, INPUT_GRAD: FORWARD, WEIGHT_GRAD: INPUT_GRAD}
    for action, (turn, place) in places.items():
        kind, stage, microbatch = action
        needed = before.get(kind, -1), stage, microbatch
        found = places.get(needed)
        if found and found[0] >= turn:
            what = f"{shown(action)} does not come after {shown(needed)}"
            yield Problem("pipeline-file-turn", place, what, f"a place after {found[1]}")


def _split_problems(kinds: Mapping[tuple[int, int], set[int]], places: _Places) -> Iterator[Problem]:
    for (stage, microbatch), found in kinds.items():
        parts = found & {INPUT_GRAD, WEIGHT_GRAD}
        if BACKWARD in found and parts:
            whole = shown((BACKWARD, stage, microbatch))
            place = places[min(parts), stage, microbatch][1]
            what = f"the backward stands in parts, and in whole as {whole}"
            yield Problem("pipeline-file-split", place, what, "one of the two")


def _owner_problems(rows: Sequence[Row]) -> Iterator[Problem]:
    """The first action of every stage that another rank has begun."""
    owners = stage_owners(rows)
    for rank, row in enumerate(rows):
        strange = {stage: place for place, slot in reversed(row) for _, stage, _ in slot if owners[stage] != rank}
        for stage, place in sorted(strange.items()):
            what = f"stage {stage} stands on rank {rank} and on rank {owners[stage]}"
            yield Problem("pipeline-file-stage", place, what, "every stage on one rank")


def _rank_problems(rows: Sequence[Row], where: str) -> Iterator[Problem]:
    """Ranks without actions, and ranks with unequal numbers of stages."""
    counts = [len({stage for _, slot in row for _, stage, _ in slot}) for row in rows]
    for rank, count in enumerate(counts):
        if not count:
            yield Problem("pipeline-file-rank", f"{where}, row {rank + 1}", f"rank {rank} does nothing", "its actions")
    if len(set(filter(None, counts))) > 1:
        what = f"ranks with different numbers of stages: {', '.join(map(str, counts[:16]))}"
        yield Problem("pipeline-file-stage", where, what, "as many on every rank")


def _number_problems(kinds: Iterable[tuple[int, int]], where: str) -> Iterator[Problem]:
    """Stages are numbered without gaps."""
    stages = {stage for stage, _ in kinds}
    if stages and max(stages) >= len(stages):
        gap = _first_gap(stages)
        what = f"stages up to {max(stages)}, but none numbered {gap}"
        yield Problem("pipeline-file-stage", where, what, "stages numbered from 0 without a gap")


def _missing_problems(kinds: Mapping[tuple[int, int], set[int]], where: str) -> Iterator[Problem]:
    """Every stage has to take every micro-batch forward and backward, whole or in its two parts."""
    by_stage: dict[int, set[int]] = defaultdict(set)
    for (stage, microbatch), found in kinds.items():
        by_stage[stage].add(microbatch)
        missing = _missing(found)
        if missing:
            what = f"stage {stage} lacks {missing.format(stage, microbatch)}"
            yield Problem("pipeline-file-missing", where, what)
    microbatches = 1 + max((microbatch for _, microbatch in kinds), default=-1)
    for stage, present in sorted(by_stage.items()):
        if len(present) < microbatches:
            what = (
                f"stage {stage} takes {len(present)} of {microbatches} micro-batches; {_first_gap(present)} is missing"
            )
            yield Problem("pipeline-file-missing", where, what)


def _missing(found: set[int]) -> str:
    """What a stage has yet to do with a micro-batch of which it does `found`; empty for nothing."""
    needed = [FORWARD]
    if BACKWARD not in found:
        needed.extend((INPUT_GRAD, WEIGHT_GRAD) if found & {INPUT_GRAD, WEIGHT_GRAD} else (BACKWARD,))
    return " and ".join(f"{{0}}{LETTERS[kind]}{{1}}" for kind in needed if kind not in found)


def _first_gap(numbers: set[int]) -> int:
    """The smallest number from 0 on that is not there."""
    return next(number for number in range(len(numbers) + 1) if number not in numbers)
