"""gradsync: which gradients and parameters of a rank travel between data ranks, and when its passes make or need them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from stepgraph.ir.gradients import param_gradients
from stepgraph.ir.graph import SHARED_PREFIX, Graph
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.program import Stage
from stepgraph.ir.tensor import Tensor, is_of_experts
from stepgraph.passes.base import Setting
from stepgraph.passes.buckets import bucket_of
from stepgraph.passes.costing import Costs
from stepgraph.passes.overlap.gradients import buckets_in_backward_order
from stepgraph.passes.stepping.parts import StageCost
from stepgraph.passes.stepping.stagecosts import spent_s


@attrs.frozen
class Piece:
    """One parameter on one rank: its elements, when forward reads it first, and when backward has made its gradient.

    table: the name of a table that several layers share, else "". Units: seconds from the start of its chunk's forward and
    of its chunk's backward.
    """

    elements: int
    of_experts: bool
    needed_s: float
    made_s: float
    table: str = ""


@attrs.frozen
class Travel:
    """One flat buffer of a rank, of experts or of all the rest.

    reduce_s, gather_s: seconds to reduce its gradients and to gather its parameters. bucket_elements: what one call moves.
    """

    of_experts: bool
    reduce_s: float = 0.0
    gather_s: float = 0.0
    bucket_elements: int = 1


def travels_of(step: Costs) -> tuple[Travel, ...]:
    """The buffers of a costed step template that data ranks share."""
    found: dict[bool, Travel] = {}
    for op, seconds in zip(step.graph.ops, step.time_s.tolist(), strict=True):
        if not _travels(op):
            continue
        experts = op.name.startswith("step.experts")
        known = found.get(experts, Travel(experts))
        if op.kind == "all_gather":
            found[experts] = attrs.evolve(known, gather_s=known.gather_s + seconds)
            continue
        size = -(-op.inputs[0].elements // int(op.attr("pieces", 1) or 1))
        found[experts] = attrs.evolve(known, reduce_s=known.reduce_s + seconds, bucket_elements=size)
    return tuple(found.values())


def _travels(op: Op) -> bool:
    """Whether an op moves a buffer of gradients or parameters between data ranks."""
    return op.phase is Phase.STEP and bool(op.group) and bucket_of(op) == "dp"


@attrs.frozen
class Layer:
    """One template: its parameters on the clocks of its own passes, and how long these take."""

    pieces: tuple[Piece, ...]
    forward_s: float
    backward_s: float


def layer_of(cost: Costs, setting: Setting) -> Layer:
    """The parameters of a template, in the order in which forward reads them. Times are those under the policy."""
    graph = cost.graph
    seconds = spent_s(cost, setting).tolist()
    forward, backward = (_ends(graph, seconds, phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
    pieces = []
    for param, grad in param_gradients(graph):
        reader, maker = _first_reader(graph, param), graph.producer(grad)
        assert reader is not None and maker is not None  # a parameter has a gradient because a forward op reads it
        needed_s = forward[reader.name] - seconds[graph.positions[reader.name]]
        table = param.name if param.name.startswith(SHARED_PREFIX) else ""
        pieces.append(Piece(param.elements, is_of_experts(param), needed_s, backward[maker.name], table))
    pieces.sort(key=lambda piece: piece.needed_s)
    return Layer(tuple(pieces), max(forward.values(), default=0.0), max(backward.values(), default=0.0))


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


def pieces_of(stage: Stage, cost: StageCost, layers: Mapping[str, Layer]) -> Iterator[Piece]:
    """The parameters of a virtual stage in the order of the model, on the clocks of its two passes.

    The clocks are stretched to what the passes take with the waits for their host and with kernels across layers.
    """
    names = stage.instances
    whole = [sum(getattr(layers[name], side) for name in names) for side in ("forward_s", "backward_s")]
    before, behind = 0.0, whole[1]
    down, up = (_ratio(*pair) for pair in zip((cost.forward.time_s, cost.backward.time_s), whole, strict=True))
    for name in names:
        layer = layers[name]
        behind -= layer.backward_s  # backward takes the layers after this one first
        for own in layer.pieces:
            needed_s, made_s = (before + own.needed_s) * down, (behind + own.made_s) * up
            yield attrs.evolve(own, needed_s=needed_s, made_s=made_s)
        before += layer.forward_s


def _ratio(real_s: float, summed_s: float) -> float:
    return real_s / summed_s if summed_s else 1.0


def without_copies(chunks: Sequence[Sequence[Piece]]) -> tuple[tuple[Piece, ...], ...]:
    """Pieces by chunk, a shared table only where it is read first: there its gradient is made last."""
    seen: set[str] = set()
    kept = []
    for pieces in chunks:
        own = []
        for piece in pieces:
            if not piece.table or piece.table not in seen:
                own.append(piece)
            seen.add(piece.table)
        kept.append(tuple(own))
    return tuple(kept)


def reductions(pieces: Sequence[Piece], travel: Travel) -> list[tuple[float, float]]:
    """(ready, seconds) of every gradient bucket of a buffer, in the order in which it is ready.

    pieces: all parameters that the buffer holds, in the order of the model.
    """
    own = [piece for piece in pieces if piece.of_experts is travel.of_experts]
    made = [(piece.elements, piece.made_s) for piece in own]
    return _calls(made, travel.bucket_elements, travel.reduce_s)


def gathers(pieces: Sequence[Piece], travel: Travel) -> list[tuple[float, float]]:
    """(needed, seconds) of the same buckets, in the order in which forward needs them."""
    own = [piece for piece in pieces if piece.of_experts is travel.of_experts]
    last = max((piece.needed_s for piece in own), default=0.0)
    early = [(piece.elements, last - piece.needed_s) for piece in own]  # the latest of these is needed first
    return [(last - at, seconds) for at, seconds in reversed(_calls(early, travel.bucket_elements, travel.gather_s))]


def _calls(pieces: Sequence[tuple[int, float]], bucket: int, seconds: float) -> list[tuple[float, float]]:
    whole = sum(count for count, _ in pieces)
    return [(at, seconds * count / whole) for count, at in buckets_in_backward_order(pieces, bucket)]
