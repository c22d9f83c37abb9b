"""pairs: a forward and a backward of different micro-batches run as one, so that each computes under the other's all-to-alls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from stepgraph.ir.op import Phase
from stepgraph.ir.program import Program
from stepgraph.passes.base import Setting
from stepgraph.passes.buckets import Buckets
from stepgraph.passes.costing import Costs
from stepgraph.passes.overlap.merging import merge_layers
from stepgraph.passes.pipeline.actions import Slot
from stepgraph.passes.pipeline.schedule import Schedule
from stepgraph.passes.pipeline.schedules import schedule_of
from stepgraph.passes.stepping.parts import Part, StageCost
from stepgraph.passes.stepping.stagecosts import cost_template, positions, spent_part

Pair = tuple[int, int]
"""Stage of the forward, stage of the backward."""


def pair_changes(
    program: Program, costed: Mapping[str, Costs], stages: Sequence[StageCost], setting: Setting
) -> dict[Pair, Part]:
    """What running both as one changes, for every two stages of one rank: seconds by bucket, and what becomes hidden.

    Layers meet in the order of their passes: the first of the forward with the last of the backward's stage. Ends and
    layers without a partner run by themselves.
    Source: NVIDIA/Megatron-LM megatron/core/models/common/model_chunk_schedule_plan.py.
    """
    split = schedule_of(program.schedule).splits_backward
    change = _layer_change({name: costed[name] for name in program.by_name}, setting, split=split)
    layers = [_layers(program, index) for index in range(len(program.stages))]
    found = {}
    for i, forward in enumerate(program.stages):
        for j, backward in enumerate(program.stages):
            if forward.rank == backward.rank:
                met = zip(layers[i], reversed(layers[j]), strict=False)
                device = sum((change(left, right) for left, right in met), Part())
                host_s = _host_change(stages[i], stages[j], device.time_s, setting.launching.issue_s)
                found[i, j] = device + Part(Buckets(launch=host_s))
    return found


def joint_changes(stages: Sequence[StageCost], owners: Sequence[int], share: float) -> dict[Pair, Part]:
    """The same where pairs are said to take `share` of what both take: every bucket alike; of a communicator that part is hidden."""
    return {
        (i, j): _shared(stages[i].forward.buckets + stages[j].backward.buckets, share)
        for i, owner in enumerate(owners)
        for j, other in enumerate(owners)
        if owner == other
    }


def _shared(both: Buckets, share: float) -> Part:
    hidden = Buckets(tp=both.tp, ep=both.ep, cp=both.cp) * max(0.0, 1 - share)
    return Part(both * (share - 1), hidden=hidden)


def pair_s(changes: Mapping[Pair, Part], stages: Sequence[StageCost]) -> dict[Pair, float]:
    """Seconds of every pair."""
    return {
        (i, j): max(0.0, stages[i].forward.time_s + stages[j].backward.time_s + change.time_s)
        for (i, j), change in changes.items()
    }


def _host_change(forward: StageCost, backward: StageCost, change_s: float, issue_s: float) -> float:
    """By how much the device waits less for its host in a pair than in both passes: the host has twice the time.

    A pair takes no less than its host needs to issue the kernels of both.
    """
    apart_s = forward.dry_forward_s + backward.dry_backward_s
    device_s = forward.forward.time_s + backward.backward.time_s - apart_s + change_s
    host_s = (forward.forward.kernels + backward.backward.kernels) * issue_s
    return max(0.0, host_s - device_s) - apart_s


def count_pairs(schedule: Schedule, ranks: int, chunks: int, microbatches: int) -> list[Counter[Pair]]:
    """How often each pair runs in a step, per rank; a steady state is counted, not written out."""
    short = schedule.shortest(ranks, chunks, microbatches)
    order = schedule.order(ranks, chunks, short)
    counts = [_pairs(slots) for slots in order.ranks]
    if short == microbatches:
        return counts
    periods = (microbatches - short) // schedule.period(ranks, chunks)
    for rank, (start, length) in enumerate(schedule.steady(ranks, chunks, short)):
        for pair, times in _pairs(order.ranks[rank][start : start + length]).items():
            counts[rank][pair] += periods * times
    return counts


def _pairs(slots: Sequence[Slot]) -> Counter[Pair]:
    return Counter((slot[0][1], slot[1][1]) for slot in slots if len(slot) == 2)


def _layers(program: Program, stage: int) -> list[str]:
    """Templates of a stage that have both a forward and a backward of their own, without ends and hops."""
    return [name for name in program.stages[stage].instances if _is_layer(program, name)]


def _is_layer(program: Program, name: str) -> bool:
    ports = program[name].ports
    return all((ports.enters, ports.leaves, ports.grad_enters, ports.grad_leaves))


def _layer_change(costed: Mapping[str, Costs], setting: Setting, *, split: bool) -> Callable[[str, str], Part]:
    """The change for two templates; every two are merged once. split: whether weight gradients run apart alone."""
    alone = {name: cost_template(cost, setting, split=split) for name, cost in costed.items()}
    gap_s = setting.launching.gap_s

    @cache
    def change(forward: str, backward: str) -> Part:
        front, back = costed[forward], costed[backward]
        seconds = [(cost.time_s + cost.kernels * gap_s).tolist() for cost in (front, back)]
        merged = merge_layers(front.graph, seconds[0], back.graph, seconds[1], setting.overlap, setting)
        chosen = positions(front.graph, Phase.FORWARD), positions(back.graph, Phase.BACKWARD)
        together = spent_part(front, chosen[0], merged.forward_op_s, setting) + spent_part(
            back, chosen[1], merged.backward_op_s, setting
        )
        apart = alone[forward].forward.part + alone[backward].backward.part
        return Part(together.buckets + apart.buckets * -1, hidden=together.hidden + apart.hidden * -1)

    return change
