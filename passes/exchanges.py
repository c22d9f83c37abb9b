"""All-to-alls of a program beside what a bandwidth-only model would say of them."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from stepgraph.hwtargets.target import Target
from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op
from stepgraph.ir.program import Program
from stepgraph.passes.collective import collective_s, comm_bytes, geometry_of


@attrs.frozen
class Exchange:
    """One all-to-all: its time by the rule, and by a flat S / beta over either link.

    inter_fraction: part of the bytes that leaves the scale-up domain, (P - g) / P with g ranks inside.
    """

    template: str
    op: str
    size_bytes: int
    ranks: int
    domains: int
    inter_fraction: float
    time_s: float
    flat_scale_up_s: float
    flat_nic_s: float


def exchanges(program: Program, target: Target) -> tuple[Exchange, ...]:
    """Every all-to-all of the program's templates, one execution each.

    Source: How to Think About Asymptotic Times, section 5 (the inter-node fraction).
    """
    return tuple(found for graph in program.templates for found in _of(graph, target))


def _of(graph: Graph, target: Target) -> Iterator[Exchange]:
    for op in graph.ops:
        if op.kind == "all_to_all":
            yield _exchange(graph, op, target)


def _exchange(graph: Graph, op: Op, target: Target) -> Exchange:
    size = comm_bytes(op)
    geometry = geometry_of(op.group, target.scale_up.ranks)
    return Exchange(
        template=graph.name,
        op=op.name,
        size_bytes=size,
        ranks=geometry.size,
        domains=geometry.domains,
        inter_fraction=(geometry.size - geometry.ranks_per_domain) / geometry.size,
        time_s=collective_s(op, size, target, geometry),
        flat_scale_up_s=size / target.scale_up.bandwidth_bytes_per_s,
        flat_nic_s=size / target.nic.bandwidth_bytes_per_s,
    )
