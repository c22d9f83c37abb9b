"""Checks of where graphs meet: ports, outputs and facts of one graph, seams and stages of a program."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from stepgraph.ir.faults import Fault, graph_fault, shown
from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Phase
from stepgraph.ir.placement import dual_place
from stepgraph.ir.program import Program, Stage
from stepgraph.ir.tensor import Place, Tensor

FACTS = ("placed", "backward", "recompute")
"""Lowering steps that a graph may say it has been through."""


def facts_true(graph: Graph) -> Iterator[Fault]:
    """facts: only known ones, and none is missing that the ops show to be true."""
    for fact in sorted(graph.facts.difference(FACTS)):
        yield graph_fault(graph, "facts", "facts", f"{fact!r} is unknown, expected one of {', '.join(FACTS)}")
    if "backward" not in graph.facts and graph.phase(Phase.BACKWARD):
        yield graph_fault(graph, "facts", "facts", "there are backward ops, expected the fact 'backward'")
    if "placed" not in graph.facts and graph.axes:
        yield graph_fault(graph, "facts", "facts", "mesh axes act on tensors, expected the fact 'placed'")


def outputs_exist(graph: Graph) -> Iterator[Fault]:
    """outputs: each is made by an op or enters the graph."""
    known = _tensors(graph)
    for t in graph.outputs:
        if t.name not in known:
            yield graph_fault(graph, "outputs", "outputs", f"{shown(t)} is not in the graph")


def ports_fit(graph: Graph) -> Iterator[Fault]:
    """ports: entering ones are read and made by nobody, leaving ones exist, gradients are placed as duals."""
    ports, known = graph.ports, _tensors(graph)
    named = (ports.enters, ports.leaves, ports.grad_enters, ports.grad_leaves)
    missing = [name for name in named if name and name not in known]
    for name in missing:
        yield graph_fault(graph, "ports", "ports", f"%{name} is not in the graph")
    if missing:
        return
    for name in (ports.enters, ports.grad_enters):
        if name in graph.producers:
            yield graph_fault(
                graph, "ports", "ports", f"%{name} is made by {graph.producers[name].name}, expected by none"
            )
    for stream, grad in ((ports.leaves, ports.grad_enters), (ports.enters, ports.grad_leaves)):
        if stream and grad and _form(known[grad]) != _form(known[stream], dual=True):
            what = f"{shown(known[grad])} is not the gradient of {shown(known[stream])}, expected its form"
            yield graph_fault(graph, "ports", "ports", what)


def _tensors(graph: Graph) -> dict[str, Tensor]:
    return {t.name: t for op in graph.ops for t in (*op.inputs, *op.outputs)}


Form = tuple[str, tuple[int, ...], str, Place]


def _form(tensor: Tensor, *, dual: bool = False) -> Form:
    """What two tensors share that are the same value, or a value and its gradient."""
    return tensor.dims, tensor.shape, tensor.dtype, dual_place(tensor.place) if dual else tensor.place


def stages_fit(program: Program) -> Iterator[Fault]:
    """stage: templates have names of their own, stages name some that exist, what runs once has only step ops.

    boundary: a stage begins where no stream enters and ends where none is handed on inside the rank; hops to a
    neighbouring stage on another rank stand at the stage's ends only, and both sides agree on what crosses.
    """
    names = [graph.name for graph in program.templates]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield _fault(name, "stage", "two templates have this name, expected one")
    for index, stage in enumerate(program.stages):
        problems = list(_stage_problems(program, stage))
        yield from (_fault(f"stage {index}", "stage", what) for what in problems)
        if not problems:
            yield from (_fault(f"stage {index}", "boundary", what) for what in _end_problems(program, index))


def _fault(where: str, code: str, message: str) -> Fault:
    return Fault(code, where, message)


def _stage_problems(program: Program, stage: Stage) -> Iterator[str]:
    for name in dict.fromkeys((*(run.template for run in stage.runs), stage.step)):
        if name not in program.by_name:
            yield f"names the template {name!r}, expected one of {', '.join(program.by_name)}"
    if not stage.runs or any(run.count < 1 for run in stage.runs):
        yield "has a run of no template, expected one or more in each"
    for name in dict.fromkeys(run.template for run in stage.runs):
        if name in program.by_name and program[name].phase(Phase.STEP):
            yield f"runs {name} per micro-batch, expected no step op in it"
    if stage.step in program.by_name and len(program[stage.step].phase(Phase.STEP)) != len(program[stage.step].ops):
        yield f"runs {stage.step} once per step, expected only step ops in it"


def _end_problems(program: Program, index: int) -> Iterator[str]:
    stage, last = program.stages[index], len(program.stages) - 1
    stays = [before.rank == after.rank for before, after in pairwise(program.stages)]
    taken, given = index > 0 and not stays[index - 1], index < last and not stays[index]
    graphs = [program[name] for name in stage.instances]
    if graphs[0].ports.enters and (taken or not index):
        yield f"begins with {graphs[0].name}, into which a stream enters, expected an end of the model or a recv"
    if graphs[-1].ports.grad_enters and (given or index == last):
        yield f"ends with {graphs[-1].name}, which hands its stream on, expected an end of the model or a send"
    recvs = [i for i, graph in enumerate(graphs) if _hop(graph, "recv")]
    sends = [i for i, graph in enumerate(graphs) if _hop(graph, "send")]
    if recvs != ([0] if taken else []):
        yield f"takes from a neighbour at {recvs}, expected {'the first template only' if taken else 'nowhere'}"
    if sends != ([len(graphs) - 1] if given else []):
        yield f"hands to a neighbour at {sends}, expected {'the last template only' if given else 'nowhere'}"


def _hop(graph: Graph, kind: str) -> Tensor | None:
    """The stream that a template's forward send or recv moves."""
    found = [op for op in graph.phase(Phase.FORWARD) if op.kind == kind]
    return (*found[0].inputs, *found[0].outputs)[0] if found else None


def streams_join(program: Program) -> Iterator[Fault]:
    """seam: the stream that leaves a template is what its right neighbour takes in, and so are the gradients.

    Across a stage boundary the same holds for what one rank sends and the next receives.
    """
    pairs = dict.fromkeys((seam.left, seam.right) for stage in program.stages for seam in stage.seams)
    for before, after in pairwise(program.stages):
        if before.rank == after.rank:  # a rank hands the stream to itself
            pairs[before.runs[-1].template, after.runs[0].template] = None
    for left, right in pairs:
        problems = _seam_problems(program[left], program[right])
        yield from (_fault(f"{left} -> {right}", "seam", what) for what in problems)
    for index, (before, after) in enumerate(pairwise(program.stages)):
        sent, taken = _hop(program[before.runs[-1].template], "send"), _hop(program[after.runs[0].template], "recv")
        if sent and taken and _form(sent) != _form(taken):
            what = f"sends {shown(sent)}, the next stage takes {shown(taken)}, expected one form"
            yield _fault(f"stage {index} -> {index + 1}", "seam", what)


def _seam_problems(left: Graph, right: Graph) -> Iterator[str]:
    streams = ("stream", left, left.ports.leaves, right, right.ports.enters)
    grads = ("gradient", right, right.ports.grad_leaves, left, left.ports.grad_enters)
    for what, giver, leaves, taker, enters in (streams, grads):
        if bool(leaves) != bool(enters):
            yield f"{what}: {giver.name} hands on {leaves or 'nothing'}, {taker.name} takes {enters or 'nothing'}"
        elif leaves and _form(_tensors(giver)[leaves]) != _form(_tensors(taker)[enters]):
            given, taken = _tensors(giver)[leaves], _tensors(taker)[enters]
            yield f"{what}: {giver.name} hands on {shown(given)}, {taker.name} takes {shown(taken)}, expected one form"
