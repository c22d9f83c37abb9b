"""The one rule of the placement algebra: a mesh axis splits one letter of an op, and everything else follows.

For the letter that an axis splits: an operand that has it is split on it, one that lacks it is replicated; a result
that has it is split on it, one that lacks it is a pending sum. An axis that splits no letter replicates all. "+" stands
for a pending sum that a linear op lets through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepgraph.ir.tensor import Axis, Place, Placement

PENDING = "+"
"""The letter of an axis whose pending sum passes through a linear op."""

At = Mapping[str, str]
"""Axis name to the letter that it splits; axes that split none are absent."""


def operand_place(letters: str, at: At, axes: Sequence[Axis]) -> Place:
    """How an operand with these letters must be placed; axes come outermost first."""
    placements = []
    for axis in axes:
        letter = at.get(axis.name, "")
        if letter == PENDING:
            placements.append(Placement(axis, None))
        elif letter and letter in letters:
            placements.append(Placement(axis, letters.index(letter)))
    return tuple(placements)


def result_place(letters: str, at: At, axes: Sequence[Axis], inner: str = "") -> Place:
    """How a result with these letters is placed; `inner` letters leave no pending sum behind."""
    placements = []
    for axis in axes:
        letter = at.get(axis.name, "")
        if not letter or (letter in inner and letter not in letters):
            continue
        placements.append(Placement(axis, letters.index(letter) if letter in letters else None))
    return tuple(placements)


def dual_place(place: Place) -> Place:
    """How the gradient of a tensor placed so must be: split stays split, replicated and pending become replicated."""
    return tuple(placement for placement in place if placement.dim is not None)
