"""stages: layers are dealt to pipeline ranks, the ends are placed, neighbours get send and recv."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise

import attrs

from stepgraph.errors import refuse
from stepgraph.ir.graph import Graph, Ports
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.program import Program, Run
from stepgraph.ir.tensor import Axis, Kind, Tensor
from stepgraph.lowering.pipelayout import PipelineSplit, StageSpec
from stepgraph.lowering.splitting import balanced_split

NO_LAYERS = ("embedding", "recv", "send", "head")
"""Templates of a stage that are no layers."""


def deal_layers(layers: Sequence[str], split: PipelineSplit | int) -> tuple[tuple[Run, ...], ...]:
    """Runs of every virtual stage: `embedding` on the first, `head` on the last, `recv` and `send` in between.

    layers: template name of every layer, in order. split: what each stage holds, or how many stages share the layers
    evenly. MTP modules are part of the head's template. On which rank a stage runs is said by `stepgraph.ir.pipelines`.

    Raises: InputError (pipeline-layers) when the split is of another number of layers; pipeline-mtp when MTP modules
    stand on another stage than the head.
    """
    if not isinstance(split, PipelineSplit):
        split = balanced_split(len(layers), split)
    if split.layers != len(layers):
        what = f"the split has {split.layers} layers and the model {len(layers)}"
        raise refuse("pipeline-layers", "pipeline_layout", what, "the same number")
    ends = accumulate(stage.layers for stage in split.stages)
    return tuple(_runs(stage, layers[end - stage.layers : end]) for stage, end in zip(split.stages, ends, strict=True))


def _runs(stage: StageSpec, names: Sequence[str]) -> tuple[Run, ...]:
    layers = [Run(name, len(list(group))) for name, group in groupby(names)]
    if stage.mtp and not stage.head:
        what = "MTP modules on another stage than the head are not modelled yet"
        raise refuse("pipeline-mtp", "pipeline_layout", what, "m next to L, as in 'mL'")
    return (Run("embedding" if stage.embedding else "recv"), *layers, Run("head" if stage.head else "send"))


def without_own_hops(dealt: Sequence[tuple[Run, ...]], owners: Sequence[int]) -> tuple[tuple[Run, ...], ...]:
    """Runs without the send and the recv between two stages of one rank, which hands the stream to itself.

    owners: the rank of every stage.
    """
    stays = [before == after for before, after in pairwise(owners)]
    return tuple(
        runs[first : len(runs) - last]
        for runs, first, last in zip(dealt, [False, *stays], [*stays, False], strict=True)
    )


def layers_per_stage(program: Program) -> tuple[int, ...]:
    """How many layers each virtual stage of a program has; ends and hops are none."""
    return tuple(sum(run.count for run in stage.runs if run.template not in NO_LAYERS) for stage in program.stages)


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
