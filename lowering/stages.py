"""stages: layers are dealt to pipeline ranks, the ends are placed, neighbours get send and recv."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import attrs

from stepgraph.ir.graph import Graph, Ports
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.program import Run
from stepgraph.ir.tensor import Axis, Kind, Tensor
from stepgraph.lowering.layout import split_layers


def deal_layers(layers: Sequence[str], stages: int) -> tuple[tuple[Run, ...], ...]:
    """Runs of every stage: `embedding` on the first, `head` on the last, `recv` and `send` in between.

    layers: template name of every layer, in order.
    """
    dealt, start = [], 0
    for index, count in enumerate(split_layers(len(layers), stages)):
        names = layers[start : start + count]
        start += count
        first = "embedding" if index == 0 else "recv"
        last = "head" if index == stages - 1 else "send"
        runs = [Run(name, len(list(group))) for name, group in groupby(names)]
        dealt.append((Run(first), *runs, Run(last)))
    return tuple(dealt)


def boundary_templates(stream: Tensor, pipeline: Axis) -> tuple[Graph, Graph]:
    """The two halves of a stage boundary, as the receiving and the sending rank run them.

    Shapes: the stream as one rank holds it: [b, s/tp, d] with sequence parallelism, else [b, s, d].
    """
    arrived = attrs.evolve(stream, name="recv.x")
    grad = attrs.evolve(arrived, name="recv.x.grad", kind=Kind.GRAD)
    recv = Graph(
        "recv",
        (
            _hop("recv.x", "recv", (), (arrived,), pipeline),
            _hop("recv.x.send", "send", (grad,), (), pipeline, of="recv.x"),
        ),
        (arrived,),
        Ports(leaves=arrived.name, grad_enters=grad.name),
        frozenset({"placed", "backward"}),
    )
    leaving = attrs.evolve(stream, name="send.x")
    back = attrs.evolve(leaving, name="send.x.grad", kind=Kind.GRAD)
    send = Graph(
        "send",
        (
            _hop("send.x.send", "send", (leaving,), (), pipeline),
            _hop("send.x.grad", "recv", (), (back,), pipeline, of="send.x.send"),
        ),
        (back,),
        Ports(enters=leaving.name, grad_leaves=back.name),
        frozenset({"placed", "backward"}),
    )
    return recv, send


def _hop(name: str, kind: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], axis: Axis, of: str = "") -> Op:
    phase = Phase.BACKWARD if of else Phase.FORWARD
    role = "dx" if of else ""
    return Op(name, kind, inputs, outputs, (), (), phase, of, role, (axis,), "pipeline", "stages")
