"""The communication calls of Megatron-LM's interleaved schedule, blocking and overlapped.

A rank runs in turns: turn i has forward i and, after w warm-up turns, backward i - w; the last w turns have backwards
only. Without overlap all transfers between two turns are one blocking call (in Megatron-LM's words
send_forward_backward_recv_forward_backward), which also receives for the next turn.

With overlap, warm-up and flush stay as they are, and in between a transfer is posted right after a computation and
waited for right before the next that needs it; a send is waited for when the next in its direction has been posted.

Source: NVIDIA/Megatron-LM megatron/core/pipeline_parallel/schedules.py,
forward_backward_pipelining_with_interleaving (without overlap_p2p_comm_warmup_flush).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import attrs

from stepgraph.ir.pipelines import stages_on_ranks
from stepgraph.passes.pipeline.actions import BACKWARD, FORWARD, Order, Slot
from stepgraph.passes.pipeline.modes import Mode
from stepgraph.passes.pipeline.steps import AWAITED, POSTED, Call, computed, is_one_op
from stepgraph.passes.pipeline.timing import Timing
from stepgraph.passes.pipeline.transfers import Steps, Transfers


@attrs.frozen
class Turns:
    """The turns of one rank: slots[i] holds forward i, where there is one, and backward i - warm, where there is one.

    early_*: how many turns before its neighbours a rank at the end of the ring posts a receive from the other end. A
    chunk that takes more than P micro-batches at a time leaves that long between the arrival and the use of a tensor.
    """

    slots: tuple[Slot, ...]
    forwards: tuple[Slot, ...]
    backwards: tuple[Slot, ...]
    warm: int
    early_forward: int
    early_backward: int


def turns_of(order: Order) -> list[Turns] | None:
    """The turns of every rank; None where an order is not Megatron-LM's interleaved schedule (combined or not).

    Each rank of a loop of two or more chunks has to run w = min((V - 1) g + 2 (P - 1 - r), V n) forwards, then forwards
    and backwards in turn, then w backwards; g: the micro-batches that a chunk takes before the next has its turn. Where
    the pairs are slots, any w above 0 will do.
    """
    ranks = len(order.ranks)
    if order.chunks < 2 or order.stage_rank != stages_on_ranks(ranks, order.chunks):
        return None
    found = [_rank_turns(order, rank) for rank in range(ranks)]
    turns = [each for each in found if each]
    return turns if len(turns) == ranks else None


def _rank_turns(order: Order, rank: int) -> Turns | None:
    """Write down the turns that a rank would take, and see whether its slots are those."""
    slots, ranks = order.ranks[rank], len(order.ranks)
    forwards, backwards = _halves(slots, FORWARD), _halves(slots, BACKWARD)
    group = next((i for i, ((_, stage, _),) in enumerate(forwards) if stage != forwards[0][0][1]), len(forwards))
    pairs = sum(len(slot) > 1 for slot in slots)
    ahead = len(forwards) - pairs if pairs else (order.chunks - 1) * group + 2 * (ranks - 1 - rank)
    warm = min(ahead, len(forwards))
    steady = tuple(zip(forwards[warm:], backwards, strict=False))
    flush = backwards[len(forwards) - warm :]
    turns = (*forwards[:warm], *((*forward, *backward) for forward, backward in steady), *flush)
    written = turns if pairs else (*forwards[:warm], *chain.from_iterable(steady), *flush)
    if not warm or slots != written:
        return None
    early = max(group - ranks, 0)
    return Turns(turns, forwards, backwards, warm, early * (rank == 0), early * (rank == ranks - 1))


def _halves(slots: Sequence[Slot], kind: int) -> tuple[Slot, ...]:
    """The actions of one kind, each as a slot."""
    return tuple(slot if len(slot) == 1 else (action,) for slot in slots for action in slot if action[0] == kind)


def blocking_calls(turns: Turns, around: Transfers, timing: Timing, mode: Mode) -> list[Call]:
    """One blocking call between two turns; where all forwards are warm-up, the first gradient has its own."""
    warm, total = turns.warm, len(turns.slots)
    received = around.received(turns.forwards)
    forwards_in = _padded(received[1 + turns.early_forward :], total)
    backwards_in = _padded([()] * (warm - 1) + around.received(turns.backwards)[turns.early_backward :], total)
    forwards_out = _padded(around.sent(turns.forwards), total)
    backwards_out = [()] * warm + around.sent(turns.backwards)
    gaps: list[tuple[Call, ...]] = [
        (sum(parts, ()),) for parts in zip(forwards_out, backwards_out, forwards_in, backwards_in, strict=True)
    ]
    if warm == len(turns.forwards):
        gaps[warm - 1] = (forwards_out[warm - 1], backwards_in[warm - 1])
    calls: list[Call] = [received[0]]
    for slot, gap in zip(computed(turns.slots, timing, mode), gaps, strict=True):
        calls.extend(slot)
        calls.extend(gap)
    return list(filter(None, calls))


def overlapped_calls(turns: Turns, around: Transfers, timing: Timing, mode: Mode) -> list[Call]:
    """Blocking calls in warm-up and flush, transfers behind computation in between."""
    warm, steady = turns.warm, len(turns.forwards) - turns.warm
    if not steady:
        return blocking_calls(turns, around, timing, mode)
    slots = computed(turns.slots, timing, mode)
    down = _Direction(around.received(turns.forwards), around.sent(turns.forwards), turns.early_forward)
    up = _Direction(around.received(turns.backwards), around.sent(turns.backwards), turns.early_backward)
    calls: list[Call] = [down.received[0]]
    for turn in range(warm):
        calls += [*slots[turn], down.exchanged(turn)]
    calls.append(_flagged(up.received[0], POSTED))
    for turn in range(warm, warm + steady):
        after = down.posted(turn, first=warm), up.posted(turn - warm, first=0)
        before = down.awaited(turn, first=warm), up.awaited(turn - warm, first=-1)
        if is_one_op(turns.slots[turn], timing, mode):
            calls += [*before, *slots[turn], *after[0], *after[1]]
        else:
            calls += [before[0], *slots[turn][:-1], *after[0], before[1], slots[turn][-1], *after[1]]
    for turn in range(steady, len(turns.backwards)):
        waits = up.awaited(turn, first=-1) if turn <= steady + up.early else ()
        calls += [waits, *slots[turn + warm], up.exchanged(turn)]
    return list(filter(None, calls))


@attrs.frozen
class _Direction:
    """The transfers around the forwards, or the backwards, of a rank, by index."""

    received: list[Steps]
    sent: list[Steps]
    early: int

    def exchanged(self, index: int) -> Call:
        """What a blocking call after a computation sends, and receives for the next."""
        return self.sent[index] + self._next(index)

    def posted(self, index: int, *, first: int) -> tuple[Call, Call]:
        """The same, posted only, and the wait for the send before, where that was posted too."""
        before = self.sent[index - 1] if index > first else ()
        return _flagged(self.exchanged(index), POSTED), _flagged(before, AWAITED)

    def awaited(self, index: int, *, first: int) -> Call:
        """The wait for an input whose receive was posted after computation `first` or later."""
        return _flagged(self.received[index], AWAITED) if index - 1 - self.early >= first else ()

    def _next(self, index: int) -> Steps:
        following = index + 1 + self.early
        return self.received[following] if following < len(self.received) else ()


def _flagged(steps: Steps, flag: int) -> Call:
    return tuple((kind + flag, place, microbatch) for kind, place, microbatch in steps)


def _padded(rows: list[Steps], length: int) -> list[Steps]:
    return [*rows, *[()] * (length - len(rows))]
