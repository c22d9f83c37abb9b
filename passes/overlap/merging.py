"""merging: forward of one micro-batch with backward of another, layer by layer, as expert-parallel overlap runs them.

The communicator works beside the other micro-batch's compute:

    communication  combine backward | dispatch, then dispatch backward | combine
    compute        attention        | experts backward, their weight gradients, experts | attention backward
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Phase
from stepgraph.passes.base import Setting
from stepgraph.passes.overlap.experts import Segment, dispatches, is_exchange, segments_of
from stepgraph.passes.overlap.linears import linear_partners
from stepgraph.passes.overlap.plan import Join, Step, steps_of_parts
from stepgraph.passes.overlap.policies import Policy
from stepgraph.passes.overlap.streams import Exposure
from stepgraph.passes.overlap.templates import run_steps
from stepgraph.passes.overlap.work import Work, readers_of, work_of

_OUTER = (Segment.AFTER, Segment.ATTENTION, Segment.DISPATCH, Segment.COMBINE)
"""Segments with a place of their own; all others are the experts' block."""


@attrs.frozen(eq=False)
class Merged:
    """A layer's forward merged with a layer's backward.

    seconds: of both together. forward_op_s, backward_op_s: what each op of either graph adds to that, by position; both
    sum to `seconds`. communicators: total, exposed and hidden time of each, of both layers.
    """

    seconds: float
    slowdown_s: float
    forward_op_s: NDArray[np.float64]
    backward_op_s: NDArray[np.float64]
    communicators: tuple[Exposure, ...]


def merge_layers(
    forward: Graph,
    forward_s: Sequence[float],
    backward: Graph,
    backward_s: Sequence[float],
    policy: Policy,
    setting: Setting,
) -> Merged:
    """Run the forward of one layer and the backward of another as one.

    Attention stands for all that lies outside the all-to-alls: what follows combine runs with the attention of the next
    layer, here taken to be a layer like this one. Weight gradients of the experts' block come after its input gradients;
    collectives of tensor parallelism are awaited, but for inputs gathered beside dgrad. A layer without experts has no
    all-to-alls, and its parts run in the same order. forward_s, backward_s: seconds of every op of either graph.

    Raises: ValueError for graphs with more than one layer of experts, and for as many times as there are no ops.
    Source: NVIDIA/Megatron-LM megatron/core/models/common/model_chunk_schedule_plan.py (with delay-wgrad-compute).
    """
    offset = len(forward.ops)
    ahead, back = work_of(forward, forward_s, Phase.FORWARD), work_of(backward, backward_s, Phase.BACKWARD)
    segments = (*_segments(forward, ahead), *_segments(backward, back))
    work = _joined(ahead, back, segments)
    run = run_steps(work, _steps(work, segments, policy), policy, setting)
    return Merged(run.seconds, run.slowdown_s, run.op_s[:offset], run.op_s[offset:], run.communicators)


def _segments(graph: Graph, work: Work) -> list[Segment]:
    """The segment of every op; all-to-alls of backward are those of the dispatch or combine that they undo."""
    segments = segments_of(graph)
    exchanges = [i for i in work.chosen if is_exchange(work, i)]
    if segments.layers > 1 or any(work.ops[i].role == "recompute" for i in exchanges):
        raise ValueError(f"{graph.name} has more all-to-alls than one layer's forward or backward")
    found = [segments[op] for op in graph.ops]
    for i in exchanges:
        found[i] = Segment.DISPATCH if dispatches(work.ops[i]) else Segment.COMBINE
    return found


def _joined(ahead: Work, back: Work, segments: Sequence[Segment]) -> Work:
    """Both as one piece of work.

    What follows combine belongs to the layer before (in backward: behind), so within the pair nobody waits for it, nor it
    for anybody else.
    """
    offset = len(ahead.ops)
    moved = (tuple(source + offset for source in makers) for makers in back.sources)
    sources = tuple(_inside(i, makers, segments) for i, makers in enumerate((*ahead.sources, *moved)))
    chosen = (*ahead.chosen, *(i + offset for i in back.chosen))
    return Work((*ahead.ops, *back.ops), (*ahead.seconds, *back.seconds), sources, readers_of(sources), chosen)


def _inside(position: int, makers: Sequence[int], segments: Sequence[Segment]) -> tuple[int, ...]:
    after = segments[position] is Segment.AFTER
    return tuple(source for source in makers if (segments[source] is Segment.AFTER) is after)


def _steps(work: Work, segments: Sequence[Segment], policy: Policy) -> list[Step]:
    """The issue order of a pair: every all-to-all beside compute of the other micro-batch."""
    forward, backward = _parts(work, segments, Phase.FORWARD), _parts(work, segments, Phase.BACKWARD)
    combined_back, dispatched = backward.combine, forward.dispatch
    dispatched_back, combined = backward.dispatch, forward.combine
    partners = linear_partners(work, policy, delayed=True)
    loose = frozenset((*combined_back, *dispatched, *dispatched_back, *combined))
    order = (
        *(combined_back, forward.after, forward.attention, dispatched),
        *(Join(combined_back), backward.experts, dispatched_back, backward.weights),
        *(Join(dispatched), forward.experts, combined),
        *(Join(dispatched_back), backward.attention, backward.after),
    )
    return steps_of_parts(work, attrs.evolve(partners, loose=loose), order)


@attrs.frozen
class _Parts:
    """Positions of one micro-batch's ops by where they run; weights: weight gradients of the experts' block."""

    after: tuple[int, ...]
    attention: tuple[int, ...]
    dispatch: tuple[int, ...]
    experts: tuple[int, ...]
    weights: tuple[int, ...]
    combine: tuple[int, ...]


def _parts(work: Work, segments: Sequence[Segment], phase: Phase) -> _Parts:
    own = [i for i in work.chosen if work.ops[i].phase is phase]
    inner = [i for i in own if segments[i] not in _OUTER]
    weights = tuple(i for i in inner if work.ops[i].role == "dw")
    outer = {segment: tuple(i for i in own if segments[i] is segment) for segment in _OUTER}
    return _Parts(
        outer[Segment.AFTER],
        outer[Segment.ATTENTION],
        outer[Segment.DISPATCH],
        tuple(i for i in inner if i not in weights),
        weights,
        outer[Segment.COMBINE],
    )
