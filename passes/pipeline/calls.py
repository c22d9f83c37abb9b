"""Communication calls: which transfers a rank posts together between its computations, and waits for.

The rules are Megatron-LM's. One stage per rank: a send and a receive of opposite directions go over the same
boundary and make one call (send_forward_recv_backward); of the same direction they are two calls, the send first, and
so are the last send and the first receive of a rank that has nothing but warm-up and flush.
Several stages per rank: all that is due between two slots is one call, which is what keeps the ring of ranks from
locking. The interleaved schedule has calls of its own (see `interleavedcalls`).

Source: NVIDIA/Megatron-LM megatron/core/pipeline_parallel/schedules.py and p2p_communication.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from stepgraph.errors import refuse
from stepgraph.passes.pipeline.actions import FORWARD, Order, Slot
from stepgraph.passes.pipeline.interleavedcalls import blocking_calls, overlapped_calls, turns_of
from stepgraph.passes.pipeline.modes import OVERLAP, Mode
from stepgraph.passes.pipeline.steps import Call, Program, computed
from stepgraph.passes.pipeline.timing import Timing
from stepgraph.passes.pipeline.transfers import Steps, transfers


def calls_of(order: Order, timing: Timing, mode: Mode) -> list[Program]:
    """Per rank its computations with the communication calls between them.

    Raises: InputError (pipeline-mode) where transfers shall overlap and the order is not Megatron-LM's interleaved.
    """
    around = transfers(order)
    turns = turns_of(order)
    if turns is not None:
        alone = attrs.evolve(timing, pair_s={}) if timing.pair_s else timing  # what takes turns is no slot of two
        written = overlapped_calls if mode == OVERLAP else blocking_calls
        return [
            written(each, around, timing if any(len(slot) > 1 for slot in slots) else alone, mode)
            for each, slots in zip(turns, order.ranks, strict=True)
        ]
    if mode == OVERLAP:
        expected = "interleaved 1F1B, the only order whose transfers Megatron-LM overlaps"
        fix = "take blocking or async, or the interleaved schedule"
        raise refuse("pipeline-mode", "mode", "overlap is not for this order", expected, fix)
    apart, ranks = order.chunks == 1, len(order.ranks)
    written_apart = [(apart, apart and _all_ahead(slots, ranks - 1 - rank)) for rank, slots in enumerate(order.ranks)]
    return [
        _rank_calls(computed(slots, timing, mode), around.received(slots), around.sent(slots), *rules)
        for slots, rules in zip(order.ranks, written_apart, strict=True)
    ]


def _rank_calls(
    computations: Iterable[Sequence[Call]], before: Iterable[Steps], after: Iterable[Steps], apart: bool, flushed: bool
) -> list[Call]:
    """Put the calls between the slots. The two sides of one direction have kinds that differ in the lowest bit only.

    apart: sends and receives of one direction are two calls. flushed: so are those of opposite directions.
    """
    calls: list[Call] = []
    sends: Steps = ()
    for slot, receives, following in zip(computations, before, after, strict=True):
        if sends and receives and (flushed or (apart and sends[0][0] ^ 1 == receives[0][0])):
            calls.append(sends)
            calls.append(receives)
        elif sends or receives:
            calls.append(sends + receives)
        calls.extend(slot)
        sends = following
    return [*calls, sends] if sends else calls


def _all_ahead(slots: Sequence[Slot], ahead: int) -> bool:
    """Whether all forwards are warm-up of 1F1B, `ahead` of them: then a rank never turns from steady state to flush."""
    return sum(slot[0][0] == FORWARD for slot in slots) <= ahead
