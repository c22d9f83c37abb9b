"""gradsync: when data-parallel gradients and parameters travel, and how much of that a step waits for.

Without overlap a rank reduces all its gradients after its last backward, and gathers its parameters after the update.
`overlap-grad-reduce` reduces buckets (first stage) or chunks (interleaved) as soon as they are ready;
`overlap-param-gather` gathers in front of the first forward that needs them. Both only touch one micro-batch.

Source: NVIDIA/Megatron-LM megatron/core/distributed/{distributed_data_parallel,param_and_grad_buffer}.py and
megatron/core/pipeline_parallel/schedules.py (grad_sync_func, param_sync_func).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import attrs

from stepgraph.ir.gradients import param_gradients
from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.program import Program, Stage
from stepgraph.ir.tensor import Kind, is_of_experts
from stepgraph.passes.buckets import bucket_of
from stepgraph.passes.costing import Costs

Piece = tuple[int, float]
"""Elements of a parameter, and when in a pass its gradient is ready (or its value needed). Units: seconds."""


@attrs.frozen
class Travel:
    """One flat buffer of a rank: seconds to reduce its gradients and to gather its parameters, in `buckets` calls."""

    of_experts: bool
    reduce_s: float
    gather_s: float
    buckets: int


@attrs.frozen
class Chunk:
    """Parameters of one virtual stage, in the order in which its passes meet them.

    backward, forward: by buffer (dense, experts), the pieces and when backward has made them or forward wants them.
    """

    backward: Mapping[bool, tuple[Piece, ...]]
    forward: Mapping[bool, tuple[Piece, ...]]

    def elements(self, of_experts: bool) -> int:
        """Elements of one buffer."""
        return sum(count for count, _ in self.backward[of_experts])


def travels_of(cost: Costs) -> tuple[Travel, ...]:
    """The buffers of a step template that data ranks share."""
    found: dict[bool, Travel] = {}
    for op, seconds in zip(cost.graph.ops, cost.time_s.tolist(), strict=True):
        if not travels(op):
            continue
        experts = op.name.startswith("step.experts")
        known = found.get(experts, Travel(experts, 0.0, 0.0, 0))
        gathers = op.kind == "all_gather"
        found[experts] = Travel(
            experts,
            known.reduce_s + (0.0 if gathers else seconds),
            known.gather_s + (seconds if gathers else 0.0),
            max(known.buckets, int(op.attr("pieces", 1) or 1)),
        )
    return tuple(found.values())


def travels(op: Op) -> bool:
    """Whether an op moves a buffer of gradients or parameters between data ranks."""
    return op.phase is Phase.STEP and bool(op.group) and bucket_of(op) == "dp" and "pieces" in dict(op.attrs)


def chunk_of(program: Program, stage: Stage, costed: Mapping[str, Costs], gap_s: float) -> Chunk:
    """The parameters of a virtual stage, from its templates."""
    runs = {run.template: _pieces(costed[run.template], gap_s) for run in stage.runs}
    names = stage.instances
    backward = _along([runs[name][1] for name in reversed(names)])
    forward = _along([runs[name][0] for name in names])
    return Chunk(backward, forward)


@attrs.frozen
class _Passed:
    """One pass over one template: its pieces by buffer, and how long the pass takes."""

    pieces: Mapping[bool, tuple[Piece, ...]]
    seconds: float


def _along(passes: Sequence[_Passed]) -> dict[bool, tuple[Piece, ...]]:
    """Pieces of consecutive layers on one clock."""
    starts = accumulate((layer.seconds for layer in passes), initial=0.0)
    placed = list(zip(passes, starts, strict=False))
    return {
        experts: tuple((count, start + at) for layer, start in placed for count, at in layer.pieces[experts])
        for experts in (False, True)
    }


def _pieces(cost: Costs, gap_s: float) -> tuple[_Passed, _Passed]:
    """Forward and backward of one template."""
    graph = cost.graph
    seconds = (cost.time_s + cost.kernels * gap_s).tolist()
    found = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        ends, total = _clock(graph, seconds, phase)
        marks = _marks(graph, phase)
        pieces = {
            experts: tuple(sorted(((count, ends[at]) for count, at, own in marks if own is experts), key=lambda p: p[1]))
            for experts in (False, True)
        }
        found.append(_Passed(pieces, total))
    return found[0], found[1]


def _clock(graph: Graph, seconds: Sequence[float], phase: Phase) -> tuple[dict[int, float], float]:
    """When each op of a phase has ended (backward) or begins (forward), and the whole phase."""
    now, clock = 0.0, {}
    for position, op in enumerate(graph.ops):
        if op.phase is phase:
            clock[position] = now if phase is Phase.FORWARD else now + seconds[position]
            now += seconds[position]
    return clock, now


def _marks(graph: Graph, phase: Phase) -> list[tuple[int, int, bool]]:
    """Elements of every parameter, the op that makes its gradient or reads it first, and whether it is of experts."""
    marks = []
    for param, grad in param_gradients(graph):
        op = graph.producer(grad) if phase is Phase.BACKWARD else _first_reader(graph, param.name)
        if op is not None and param.kind is Kind.PARAM:
            marks.append((param.elements, graph.positions[op.name], is_of_experts(param)))
    return marks


def _first_reader(graph: Graph, name: str) -> Op | None:
    return next((op for op in graph.readers.get(name, ()) if op.phase is Phase.FORWARD), None)


def calls(pieces: Sequence[Piece], buckets: int, seconds: float) -> Iterator[tuple[float, float]]:
    """(ready or needed at, seconds) of every call when pieces fill equal buckets in their order.

    A gradient bucket is ready when its last piece is; for a gather, `pieces` tell when the first is needed.
    """
    total = sum(count for count, _ in pieces)
    if not total:
        return
    size, filled, at, sent = -(-total // buckets), 0, 0.0, 0
    for count, at in pieces:
        filled += count
        while filled - sent >= size:
            yield at, seconds * size / total
            sent += size
    if filled > sent:
        yield at, seconds * (filled - sent) / total
