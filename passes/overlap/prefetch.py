"""prefetch: collectives that are issued one step ahead of their reader: FSDP's parameters, a context-parallel ring's keys."""

from __future__ import annotations

from collections.abc import Iterator

from stepgraph.passes.overlap.policies import Policy
from stepgraph.passes.overlap.streams import COMPUTE
from stepgraph.passes.overlap.work import Work


def ahead_of(work: Work, policy: Policy) -> dict[int, tuple[int, ...]]:
    """Op -> the collectives that are issued just before it and that only their own readers wait for.

    fsdp-prefetch: the parameters of the next unit, before the first op that reads those of this one. cp-ring: a message,
    before the attention step that reads what the message is made of.
    """
    found: dict[int, tuple[int, ...]] = {}
    for host, guest in (*_units(work, policy), *_messages(work, policy)):
        found[host] = (*found.get(host, ()), guest)
    return found


def loose_of(work: Work, policy: Policy) -> frozenset[int]:
    """Collectives that no op of the work waits for: FSDP's gradient reduce-scatters, in the order of the communicator."""
    if not policy.sharded:
        return frozenset()
    return frozenset(i for i in work.chosen if work.stream(i) == "dp" and work.ops[i].kind == "reduce_scatter")


def _units(work: Work, policy: Policy) -> Iterator[tuple[int, int]]:
    """Source: pytorch/pytorch torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (one unit of prefetch)."""
    if not policy.sharded:
        return
    gathers = [i for i in work.chosen if work.stream(i) == "dp" and work.ops[i].kind == "all_gather"]
    readers = [_first(work.readers[i], work) for i in gathers]
    for k, gather in enumerate(gathers):
        host = next((readers[j] for j in range(k - 1, -1, -1) if readers[j] != readers[k]), -1)
        if host >= 0:
            yield host, gather


def _messages(work: Work, policy: Policy) -> Iterator[tuple[int, int]]:
    """Source: NVIDIA/TransformerEngine transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py."""
    if not policy.ring:
        return
    for i in work.chosen:
        if work.stream(i) != "cp" or not work.ops[i].inputs:
            continue
        name = work.ops[i].inputs[0].name
        beside = [j for j in work.chosen if j != i and any(t.name == name for t in work.ops[j].inputs)]
        host = _first(beside, work)
        if host >= 0:
            yield host, i


def _first(positions: tuple[int, ...] | list[int], work: Work) -> int:
    """The first that computes; -1 if none does."""
    return next((i for i in positions if work.stream(i) == COMPUTE), -1)
