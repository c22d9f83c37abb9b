"""work: the ops that are put on streams: how long each takes, what it waits for, on which communicator it runs."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.rows import Rule
from stepgraph.ir.table import row_of
from stepgraph.passes.buckets import bucket_of
from stepgraph.passes.overlap.streams import COMPUTE

_STREAM_OF_BUCKET = {"": "pp", "pp_transfer": "pp"}


@attrs.frozen(eq=False)
class Work:
    """Ops of one phase (or of two graphs) with their times.

    ops, seconds: by position; seconds include launches. sources: for each op the positions that make what it reads,
    as far as they belong to the work. readers: the other way round. chosen: the positions that run, in program order.
    """

    ops: tuple[Op, ...]
    seconds: tuple[float, ...]
    sources: tuple[tuple[int, ...], ...]
    readers: tuple[tuple[int, ...], ...]
    chosen: tuple[int, ...]

    def stream(self, position: int) -> str:
        """The stream of an op: compute, or its communicator."""
        return stream_of(self.ops[position])

    def is_gemm(self, position: int) -> bool:
        """Whether the op is a matmul."""
        return row_of(self.ops[position].kind).rule is Rule.GEMM


def stream_of(op: Op) -> str:
    """Compute, or the communicator that the op's bucket names."""
    if row_of(op.kind).rule not in (Rule.COLLECTIVE, Rule.POINT_TO_POINT):
        return COMPUTE
    bucket = bucket_of(op)
    return _STREAM_OF_BUCKET.get(bucket, bucket)


def work_of(graph: Graph, seconds: Sequence[float], phase: Phase) -> Work:
    """One phase of a graph. seconds: one entry per op of the graph. Raises: ValueError where it is not."""
    if len(seconds) != len(graph.ops):
        raise ValueError(f"{len(seconds)} times for {len(graph.ops)} ops of graph {graph.name}")
    chosen = tuple(i for i, op in enumerate(graph.ops) if op.phase is phase)
    within = set(chosen)
    sources = tuple(_sources(graph, op, within) if i in within else () for i, op in enumerate(graph.ops))
    return Work(graph.ops, tuple(map(float, seconds)), sources, readers_of(sources), chosen)


def _sources(graph: Graph, op: Op, within: set[int]) -> tuple[int, ...]:
    makers = (graph.producers.get(t.name) for t in op.inputs)
    found = dict.fromkeys(graph.positions[maker.name] for maker in makers if maker is not None)
    return tuple(position for position in found if position in within)


def readers_of(sources: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """For each op, those that read what it makes, in program order."""
    found: list[list[int]] = [[] for _ in sources]
    for position, makers in enumerate(sources):
        for maker in makers:
            found[maker].append(position)
    return tuple(map(tuple, found))
