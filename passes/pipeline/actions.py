"""What a pipeline schedule says: the computations of every rank, in order. Transfers follow from it.

An action is the plain tuple (kind, stage, microbatch): plain because a long step has 100,000 of them. A slot is what a
rank runs next: one action, or a forward and a backward that a framework may run as one.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import attrs

FORWARD: Final = 0
BACKWARD: Final = 1
"""The whole backward of a micro-batch: gradients of inputs and of weights."""
INPUT_GRAD: Final = 2
"""The part of backward that the previous stage waits for."""
WEIGHT_GRAD: Final = 3
"""The part of backward that nobody waits for before the end of the step."""

LETTERS: Final = "FBIW"
"""Letters of the kinds, by kind. Source: pytorch/pytorch torch/distributed/pipelining/schedules.py."""

Action: TypeAlias = tuple[int, int, int]
Slot: TypeAlias = tuple[Action, ...]


@attrs.frozen
class Order:
    """A schedule written out.

    stage_rank: the rank of every virtual stage, in the order in which the stream passes them. ranks: per rank its
    slots, in the order in which they run.
    """

    stage_rank: tuple[int, ...]
    ranks: tuple[tuple[Slot, ...], ...]

    @property
    def chunks(self) -> int:
        """Virtual stages per rank."""
        return len(self.stage_rank) // len(self.ranks)


def shown(action: Action) -> str:
    """An action as torch writes it: `4B0` is the backward of micro-batch 0 on stage 4."""
    kind, stage, microbatch = action
    return f"{stage}{LETTERS[kind]}{microbatch}"


def slot_shown(slot: Slot) -> str:
    """A slot as torch writes it: its action, or `(0F7;7B3)OVERLAP_F_B` for two that may run as one."""
    actions = ";".join(map(shown, slot))
    return actions if len(slot) == 1 else f"({actions})OVERLAP_F_B"
