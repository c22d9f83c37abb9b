"""experts: where a layer dispatches tokens and combines them, and what lies before, between, after and beside that."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from itertools import pairwise

import attrs

from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op, Phase
from stepgraph.passes.overlap.streams import COMPUTE
from stepgraph.passes.overlap.work import Work, work_of


class Segment(enum.Enum):
    """Where a forward op lies: before the experts' all-to-alls, between, after, or in the shared expert beside them.

    UP, DOWN, REDUCED: the shared expert up to its activation, its last matmul, and what its reduction leads to.
    """

    ATTENTION = "attention"
    DISPATCH = "dispatch"
    EXPERTS = "experts"
    UP = "shared expert, first matmul"
    DOWN = "shared expert, second matmul"
    REDUCED = "shared expert, reduced"
    COMBINE = "combine"
    AFTER = "after"


@attrs.frozen(eq=False)
class Segments:
    """The segment of every forward op of a graph, by name. layers: how many layers with experts there are."""

    of: Mapping[str, Segment]
    layers: int

    def __getitem__(self, op: Op) -> Segment:
        """The segment of an op: its own in forward, that of the op that it belongs to in backward."""
        return self.of.get(op.of or op.name, Segment.ATTENTION)


def segments_of(graph: Graph) -> Segments:
    """Cut a layer at its all-to-alls.

    What dispatch depends on is attention; what depends on combine comes after; what lies between is the experts; what
    is neither, in the same block, is the shared expert. A dense layer is cut by block: attention, and the rest.
    """
    work = work_of(graph, [0.0] * len(graph.ops), Phase.FORWARD)
    moves = [i for i in work.chosen if is_exchange(work, i)]
    dispatch = [i for i in moves if dispatches(graph.ops[i])]
    if not moves:
        return Segments({op.name: _dense(op) for op in graph.phase(Phase.FORWARD)}, 0)
    blocks = sum(i in dispatch and other not in dispatch for i, other in pairwise(moves))
    return Segments(_cut(work, dispatch, [i for i in moves if i not in dispatch]), blocks)


def _spreads(op: Op) -> bool:
    """Whether an all-to-all deals tokens to experts: fewer experts per rank afterwards than before."""
    before, after = op.inputs[0], op.outputs[0]
    return "E" in before.dims and after.local_shape[after.dims.index("E")] < before.local_shape[before.dims.index("E")]


def _dense(op: Op) -> Segment:
    return Segment.ATTENTION if op.module == "attn" else Segment.EXPERTS


def _cut(work: Work, dispatch: list[int], combine: list[int]) -> dict[str, Segment]:
    before, behind = _reached(dispatch, work.sources), _reached(dispatch, work.readers)
    after, block = _reached(combine, work.readers), work.ops[dispatch[0]].module
    found = dict.fromkeys(dispatch, Segment.DISPATCH) | dict.fromkeys(combine, Segment.COMBINE)
    for i in work.chosen:
        if i in found:
            continue
        if i in behind:
            found[i] = Segment.AFTER if i in after else Segment.EXPERTS
        elif i in before or work.ops[i].module != block:
            found[i] = Segment.ATTENTION
        else:
            found[i] = _beside(work, i, found)
    return {work.ops[i].name: segment for i, segment in found.items()}


def _beside(work: Work, position: int, found: dict[int, Segment]) -> Segment:
    """The part of the shared expert that an op is, from those of what it reads."""
    reads = {found[source] for source in work.sources[position]}
    if Segment.REDUCED in reads:
        return Segment.REDUCED
    if not reads & {Segment.UP, Segment.DOWN}:
        return Segment.UP
    if work.stream(position) != COMPUTE:
        return Segment.REDUCED
    return Segment.DOWN if Segment.DOWN in reads or work.is_gemm(position) else Segment.UP


def _reached(start: Iterable[int], steps: tuple[tuple[int, ...], ...]) -> set[int]:
    """Every op that some ops lead to, these not included unless others lead to them."""
    found: set[int] = set()
    ahead = [other for i in start for other in steps[i]]
    while ahead:
        position = ahead.pop()
        if position not in found:
            found.add(position)
            ahead.extend(steps[position])
    return found


def shared_windows(work: Work, segments: Segments) -> dict[int, tuple[int, ...]]:
    """The shared expert's ops that run beside each all-to-all: first matmul beside dispatch, second beside combine.

    In backward the same ops' gradients run beside the same all-to-alls' backward, in opposite order; recomputed forward
    ops run as the forward ones do. Collectives of the shared expert are awaited.

    Source: NVIDIA/Megatron-LM megatron/core/transformer/moe/shared_experts.py (also the order of backward).
    """
    windows: dict[int, tuple[int, ...]] = {}
    for again in (False, True):
        ops = [i for i in work.chosen if (work.ops[i].role == "recompute") is again]
        for dispatching, segment in ((True, Segment.UP), (False, Segment.DOWN)):
            hosts = [i for i in ops if is_exchange(work, i) and dispatches(work.ops[i]) is dispatching]
            guests = tuple(i for i in ops if segments[work.ops[i]] is segment and work.stream(i) == COMPUTE)
            if hosts and guests:
                windows[hosts[-1]] = guests
    return windows


def is_exchange(work: Work, position: int) -> bool:
    """Whether an op is an all-to-all between experts."""
    return work.ops[position].kind == "all_to_all" and work.stream(position) == "ep"


def dispatches(op: Op) -> bool:
    """Whether an all-to-all is dispatch or its backward; the latter takes gradients home, as combine does tokens."""
    is_gradient = op.phase is Phase.BACKWARD and op.role != "recompute"
    return _spreads(op) != is_gradient
