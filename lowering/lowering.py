"""lower: a model and a layout become a program, in visible steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stepgraph.ir.graph import Graph
from stepgraph.ir.pipelines import PIPELINES, stages_on_ranks
from stepgraph.ir.program import Program, Run, Stage
from stepgraph.ir.rewriting import LOGICAL, PLACED, Rewrite
from stepgraph.ir.tensor import Axis, Tensor
from stepgraph.lowering.applying import apply_rewrites
from stepgraph.lowering.backward import autograd
from stepgraph.lowering.blocks.ends import EMBEDDING_WEIGHT, embedding, head
from stepgraph.lowering.blocks.layer import layer as layer_block
from stepgraph.lowering.blocks.mtp import predict_further
from stepgraph.lowering.builder import Builder
from stepgraph.lowering.collectives import insert_collectives
from stepgraph.lowering.fitting import fit_model
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.mesh import Mesh, mesh_of
from stepgraph.lowering.model import Layer, Model
from stepgraph.lowering.optimizer import count_stage_params, step_template
from stepgraph.lowering.recomputation import recompute
from stepgraph.lowering.resolution import resolve_layout
from stepgraph.lowering.splitting import layout_split
from stepgraph.lowering.stages import boundary_templates, deal_layers, without_own_hops


def lower(model: Model, layout: Layout, rewrites: Sequence[Rewrite] = ()) -> Program:
    """The training step of a model under a layout.

    Blocks emit logical forward ops -> [rewrites, logical] -> insert_collectives -> [rewrites, placed] -> autograd ->
    recompute -> stages -> the step template [rewrites]. Equal layers are lowered once. rewrites: in the order in which
    they act; autograd derives the backward pass of what they leave.

    Raises: InputError when the layout is impossible, or (rewrite) when a rewrite leaves a graph that is not sound.
    """
    layout, _ = resolve_layout(layout, model)
    model, _ = fit_model(model, layout)
    mesh = mesh_of(layout)
    templates = {graph.name: graph for graph in _micro_batch_templates(model, layout, mesh, rewrites)}
    dealt = deal_layers(model.template_names, layout_split(layout, model.n_layers))
    assert layout.schedule is not None  # resolve_layout fills it
    owners = stages_on_ranks(layout.pp, layout.vpp, v_shaped=PIPELINES[layout.schedule].v_shaped)
    dealt = without_own_hops(dealt, owners)
    steps = _step_templates(_runs_of_ranks(dealt, owners), templates, model, layout, mesh)
    templates.update((step.name, apply_rewrites(step, rewrites)) for step in steps)
    stages = tuple(Stage(runs, steps[rank].name, rank) for rank, runs in zip(owners, dealt, strict=True))
    return Program(model.name, tuple(templates.values()), stages, layout.n_microbatches, schedule=layout.schedule)


def _runs_of_ranks(dealt: Sequence[tuple[Run, ...]], owners: Sequence[int]) -> list[tuple[Run, ...]]:
    """What each rank runs in all, over its chunks."""
    ranks: dict[int, tuple[Run, ...]] = dict.fromkeys(sorted(owners), ())
    for rank, runs in zip(owners, dealt, strict=True):
        ranks[rank] += runs
    return list(ranks.values())


def logical_templates(
    model: Model, batch: int, sequence: int, load: tuple[int, int] = (1, 1), mtp: int = 0
) -> tuple[Graph, ...]:
    """Forward graphs of the model's parts with no parallelism: embedding, one per distinct layer, head.

    load: how uneven experts are visited. mtp: multi-token prediction modules, which run with the head. Shapes: batch
    and sequence are global.
    """
    parts: list[Graph] = [_embedding(model, batch, sequence)]
    named = dict(zip(model.template_names, model.layers, strict=True))
    parts.extend(_layer(model, name, layer, batch, sequence, load) for name, layer in named.items())
    parts.append(_head(model, batch, sequence, load, mtp))
    return tuple(parts)


def count_parts(model: Model, batch: int, sequence: int, mtp: int = 0) -> tuple[tuple[Graph, int], ...]:
    """The logical templates with how often each stands in the model; mtp: prediction modules in the head."""
    counts = Counter(model.template_names)
    return tuple((graph, counts.get(graph.name, 1)) for graph in logical_templates(model, batch, sequence, mtp=mtp))


def _embedding(model: Model, batch: int, sequence: int) -> Graph:
    b = Builder(model.dtype)
    return b.graph("embedding", None, embedding(b, model, batch, sequence))


def _layer(model: Model, name: str, layer: Layer, batch: int, sequence: int, load: tuple[int, int]) -> Graph:
    b = Builder(model.dtype)
    x = b.stream("x", batch, sequence, model.hidden)
    return b.graph(name, x, layer_block(b, x, layer, load))


def _head(model: Model, batch: int, sequence: int, load: tuple[int, int], mtp: int) -> Graph:
    b = Builder(model.dtype)
    x = b.stream("x", batch, sequence, model.hidden)
    predict_further(b, model, x, mtp, load)
    return b.graph("head", x, head(b, model, x))


def _micro_batch_templates(model: Model, layout: Layout, mesh: Mesh, rewrites: Sequence[Rewrite]) -> list[Graph]:
    assert layout.seq is not None  # resolve_layout fills it
    batch = layout.micro_batch * layout.dp
    ends = ("embedding", "head")
    graphs = []
    for graph in logical_templates(model, batch, layout.seq, layout.load, layout.mtp):
        placed = insert_collectives(apply_rewrites(graph, rewrites, LOGICAL), mesh)
        placed = autograd(apply_rewrites(placed, rewrites, PLACED), mesh, regather=bool(layout.tp_regather))
        graphs.append(placed if graph.name in ends else recompute(placed, layout.recompute))
    pipeline = mesh.axis("pp")
    if pipeline:
        graphs.extend(boundary_templates(_stream(graphs[1]), pipeline))
    return graphs


def _stream(layer: Graph) -> Tensor:
    return next(t for t in layer.inputs if t.name == layer.ports.enters)


def _step_templates(
    ranks: Sequence[tuple[Run, ...]], templates: dict[str, Graph], model: Model, layout: Layout, mesh: Mesh
) -> list[Graph]:
    """The step template of every pipeline rank; ranks with equal parameters share one.

    The token table is read at the last stage too by a tied head and by multi-token prediction modules; both ends then
    hold it and sum its gradient.
    """
    pipeline = mesh.axis("pp")
    apart = not any({"embedding", "head"} <= {run.template for run in runs} for runs in ranks)
    shared = EMBEDDING_WEIGHT if apart and _reads(templates["head"], EMBEDDING_WEIGHT) else ""
    ends = Axis("ends", 2, pipeline.stride * (pipeline.size - 1)) if pipeline and shared else None
    counted = {runs: count_stage_params(_totals(runs, templates), mesh, shared) for runs in dict.fromkeys(ranks)}
    names = {params: f"step.{i}" if pipeline else "step" for i, params in enumerate(dict.fromkeys(counted.values()))}
    built = {
        params: step_template(name, params, mesh, zero=layout.zero, dtype=model.dtype, ends=ends)
        for params, name in names.items()
    }
    return [built[counted[runs]] for runs in ranks]


def _reads(graph: Graph, name: str) -> bool:
    return any(tensor.name == name for op in graph.ops for tensor in op.inputs)


def _totals(runs: tuple[Run, ...], templates: dict[str, Graph]) -> list[tuple[Graph, int]]:
    """How often a stage runs each template in all, whatever the order."""
    counts: Counter[str] = Counter()
    for run in runs:
        counts[run.template] += run.count
    return [(templates[name], count) for name, count in counts.items()]
