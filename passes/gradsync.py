"""gradsync: which gradients and parameters of a stage travel between data ranks, and when its passes make or need them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import attrs

from stepgraph.ir.gradients import param_gradients
from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.program import Stage
from stepgraph.ir.tensor import Tensor, is_of_experts
from stepgraph.passes.buckets import bucket_of
from stepgraph.passes.costing import Costs
from stepgraph.passes.overlap.gradients import buckets_in_backward_order

Piece: TypeAlias = tuple[int, float, float]
"""Elements of a parameter on one rank; when forward reads it first, and when backward has made its gradient.

Units: seconds from the start of the stage's forward and of its backward.
"""


@attrs.frozen
class Travel:
    """One flat buffer of a rank, of experts or of all the rest: seconds to reduce its gradients and to gather its
    parameters, and the number of calls in which it does either."""

    of_experts: bool
    reduce_s: float = 0.0
    gather_s: float = 0.0
    calls: int = 1


@attrs.frozen
class Chunk:
    """Parameters of one virtual stage in the order of the model, those of the dense buffer and those of experts."""

    dense: tuple[Piece, ...]
    experts: tuple[Piece, ...]

    def pieces(self, of_experts: bool) -> tuple[Piece, ...]:
        """The parameters that lie in one buffer."""
        return self.experts if of_experts else self.dense

    def elements(self, of_experts: bool) -> int:
        """Elements in one buffer."""
        return sum(count for count, _, _ in self.pieces(of_experts))


def travels_of(step: Costs) -> tuple[Travel, ...]:
    """The buffers of a costed step template that data ranks share."""
    found: dict[bool, Travel] = {}
    for op, seconds in zip(step.graph.ops, step.time_s.tolist(), strict=True):
        if not _travels(op):
            continue
        experts = op.name.startswith("step.experts")
        known = found.get(experts, Travel(experts))
        reduce_s, gather_s = (0.0, seconds) if op.kind == "all_gather" else (seconds, 0.0)
        calls = max(known.calls, int(op.attr("pieces", 1) or 1))
        found[experts] = Travel(experts, known.reduce_s + reduce_s, known.gather_s + gather_s, calls)
    return tuple(found.values())


def _travels(op: Op) -> bool:
    """Whether an op moves a buffer of gradients or parameters between data ranks."""
    return op.phase is Phase.STEP and bool(op.group) and bucket_of(op) == "dp"


def chunk_of(stage: Stage, costed: Mapping[str, Costs], gap_s: float) -> Chunk:
    """The parameters of a virtual stage, from its templates, on the clocks of its two passes."""
    layers = {run.template: _layer(costed[run.template], gap_s) for run in stage.runs}
    names = stage.instances
    before, behind = 0.0, sum(layers[name].backward_s for name in names)
    pieces: dict[bool, list[Piece]] = {False: [], True: []}
    for name in names:
        layer = layers[name]
        behind -= layer.backward_s  # backward takes the layers after this one first
        for own, (count, needed, made) in layer.pieces:
            pieces[own].append((count, before + needed, behind + made))
        before += layer.forward_s
    return Chunk(tuple(pieces[False]), tuple(pieces[True]))


@attrs.frozen
class _Layer:
    """One template: its parameters, each with whether it is of experts, and how long its passes take."""

    pieces: tuple[tuple[bool, Piece], ...]
    forward_s: float
    backward_s: float


def _layer(cost: Costs, gap_s: float) -> _Layer:
    graph = cost.graph
    seconds = (cost.time_s + cost.kernels * gap_s).tolist()
    ends = {phase: _ends(graph, seconds, phase) for phase in (Phase.FORWARD, Phase.BACKWARD)}
    forward, backward = ends[Phase.FORWARD], ends[Phase.BACKWARD]
    pieces = []
    for param, grad in param_gradients(graph):
        reader, maker = _first_reader(graph, param), graph.producer(grad)
        assert reader is not None and maker is not None  # a parameter has a gradient because a forward op reads it
        needed = forward[reader.name] - seconds[graph.positions[reader.name]]
        pieces.append((is_of_experts(param), (param.elements, needed, backward[maker.name])))
    pieces.sort(key=lambda piece: piece[1][1])
    return _Layer(tuple(pieces), max(forward.values(), default=0.0), max(backward.values(), default=0.0))


def _ends(graph: Graph, seconds: Sequence[float], phase: Phase) -> dict[str, float]:
    """When each op of a phase has ended, one after the other."""
    now, ends = 0.0, {}
    for op, own in zip(graph.ops, seconds, strict=True):
        if op.phase is phase:
            now += own
            ends[op.name] = now
    return ends


def _first_reader(graph: Graph, param: Tensor) -> Op | None:
    return next((op for op in graph.users(param) if op.phase is Phase.FORWARD), None)


def reductions(chunk: Chunk, travel: Travel) -> Iterator[tuple[float, float]]:
    """(ready, seconds) of every bucket of a chunk that holds all of its buffer, in the order in which it is ready."""
    yield from _calls(
        chunk, travel, travel.reduce_s, [(count, made) for count, _, made in chunk.pieces(travel.of_experts)]
    )


def gathers(chunk: Chunk, travel: Travel) -> Iterator[tuple[float, float]]:
    """(needed, seconds) of the same buckets, in the order in which forward needs them."""
    pieces = chunk.pieces(travel.of_experts)
    last = max((needed for _, needed, _ in pieces), default=0.0)
    early = [(count, last - needed) for count, needed, _ in pieces]  # the latest of these is needed first
    found = [(last - at, seconds) for at, seconds in _calls(chunk, travel, travel.gather_s, early)]
    yield from reversed(found)


def _calls(
    chunk: Chunk, travel: Travel, seconds: float, pieces: Sequence[tuple[int, float]]
) -> Iterator[tuple[float, float]]:
    whole = chunk.elements(travel.of_experts)
    size = -(-whole // travel.calls) or None
    for count, at in buckets_in_backward_order(pieces, size):
        yield at, seconds * count / whole
