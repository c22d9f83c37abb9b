"""What a picture of a pipeline shows: bars on ranks, made from the events of a simulated run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Final

import attrs

from stepgraph.passes.pipeline.actions import LETTERS, Order, shown
from stepgraph.passes.pipeline.events import Event

WHOLE: Final = "whole"
UPPER: Final = "upper"
LOWER: Final = "lower"
_PAIR: Final = "forward_backward"


@attrs.frozen
class Bar:
    """One box of a picture.

    letter: the kind of a computation (F, B, I or W), "" for a communication call. name: a computation as torch writes
    it (`4B0`), a call as Megatron-LM does (`send_forward`). chunk: which of its rank's stages it belongs to. part:
    the forward and the backward of a pair that runs as one op share their time, the forward above. wait_s: the part of
    a call, drawn first, in which none of its transfers ran.

    Units: seconds from the start of the pipeline.
    """

    rank: int
    letter: str
    name: str
    chunk: int
    microbatch: int
    start_s: float
    end_s: float
    wait_s: float = 0.0
    part: str = WHOLE


def bars_of(events: Iterable[Event], order: Order) -> Iterator[Bar]:
    """The bars of a run of `order`: one per action, also in a pair, and one per call that takes any time.

    Computations of a rank run in the order's sequence, so the n-th event of one is the n-th action.
    """
    chunks = _chunks(order.stage_rank)
    actions = [chain.from_iterable(slots) for slots in order.ranks]
    for event in events:
        times = event.start_s, event.end_s
        if event.kind != "compute":
            if event.end_s > event.start_s:
                yield Bar(event.rank, "", event.name, chunks[event.stage], event.microbatch, *times, event.wait_s)
            continue
        parts = (UPPER, LOWER) if event.name == _PAIR else (WHOLE,)
        ran = sorted(islice(actions[event.rank], len(parts)))  # the forward of a pair first
        for part, (kind, stage, which) in zip(parts, ran, strict=True):
            name = shown((kind, stage, which))
            yield Bar(event.rank, LETTERS[kind], name, chunks[stage], which, *times, part=part)


def _chunks(stage_rank: Sequence[int]) -> list[int]:
    """Per virtual stage its number among the stages of its rank: ranks 0 1 1 0 have chunks 0 0 1 1."""
    found: list[int] = []
    counts = [0] * (1 + max(stage_rank, default=0))
    for rank in stage_rank:
        found.append(counts[rank])
        counts[rank] += 1
    return found
