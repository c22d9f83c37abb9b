"""lower: a model and a layout become a program, in visible steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from stepgraph.errors import refuse
from stepgraph.ir.graph import Graph
from stepgraph.ir.program import Program, Run, Stage
from stepgraph.ir.tensor import Axis, Tensor
from stepgraph.lowering.backward import autograd
from stepgraph.lowering.blocks.attention import attention
from stepgraph.lowering.blocks.ends import EMBEDDING_WEIGHT, embedding, head
from stepgraph.lowering.blocks.mlp import mlp
from stepgraph.lowering.builder import Builder
from stepgraph.lowering.collectives import insert_collectives
from stepgraph.lowering.layout import Layout, resolve_layout
from stepgraph.lowering.mesh import Mesh, mesh_of
from stepgraph.lowering.model import Attention, Layer, Mlp, Model
from stepgraph.lowering.optimizer import count_stage_params, step_template
from stepgraph.lowering.recomputation import recompute
from stepgraph.lowering.stages import boundary_templates, deal_layers


def lower(model: Model, layout: Layout) -> Program:
    """The training step of a model under a layout.

    Blocks emit logical forward ops -> insert_collectives -> autograd -> recompute -> stages -> the step template.
    Equal layers are lowered once. Raises: InputError when the layout is impossible.
    """
    layout, _ = resolve_layout(layout, model)
    _check_kv_heads(model, layout.tp)
    mesh = mesh_of(layout)
    templates = {graph.name: graph for graph in _micro_batch_templates(model, layout, mesh)}
    stages = []
    for runs in deal_layers(model.template_names, layout.pp):
        step = _step_of(runs, templates, model, layout, mesh)
        stages.append(Stage(runs, step.name))
        templates.setdefault(step.name, step)
    return Program(model.name, tuple(templates.values()), tuple(stages), layout.n_microbatches)


def logical_templates(model: Model, batch: int, sequence: int) -> tuple[Graph, ...]:
    """Forward graphs of the model's parts with no parallelism: embedding, one per distinct layer, head.

    Shapes: batch and sequence are global.
    """
    parts: list[Graph] = [_embedding(model, batch, sequence)]
    for layer, name in dict(zip(model.layers, model.template_names, strict=True)).items():
        parts.append(_layer(model, layer, name, batch, sequence))
    parts.append(_head(model, batch, sequence))
    return tuple(parts)


def count_parts(model: Model, batch: int, sequence: int) -> tuple[tuple[Graph, int], ...]:
    """The logical templates with how often each stands in the model."""
    counts = Counter(model.template_names)
    return tuple((graph, counts.get(graph.name, 1)) for graph in logical_templates(model, batch, sequence))


def _embedding(model: Model, batch: int, sequence: int) -> Graph:
    b = Builder(model.dtype)
    return b.graph("embedding", None, embedding(b, model, batch, sequence))


def _layer(model: Model, layer: Layer, name: str, batch: int, sequence: int) -> Graph:
    lacking = _not_lowered(layer)
    if lacking:
        what = f"its {name!r} layers have {', '.join(lacking)}: not lowered to ops yet"
        raise refuse("model-not-lowered", model.name, what)
    b = Builder(model.dtype)
    x = b.stream("x", batch, sequence, model.hidden)
    return b.graph(name, x, mlp(b, attention(b, x, layer), layer))


def _check_kv_heads(model: Model, tp: int) -> None:
    spec = [layer.attention for layer in model.distinct_layers]
    widths = [attention.kv_heads for attention in spec if isinstance(attention, Attention) and attention.kv_heads % tp]
    if widths:
        what = f"{widths[0]} key/value heads on {tp} ranks: repeated heads are not lowered to ops yet"
        raise refuse("model-not-lowered", "tp", what)


def _not_lowered(layer: Layer) -> list[str]:
    """What the blocks do not emit yet."""
    spec, ffn = layer.attention, layer.mlp
    grouped = spec if isinstance(spec, Attention) else None
    found = {
        "latent attention": grouped is None,
        "experts": not isinstance(ffn, Mlp),
        "windows or chunks": bool(grouped and (grouped.window or grouped.chunk)),
        "query and key norms": bool(grouped and grouped.qk_norm),
        "sinks or soft-caps": bool(grouped and (grouped.sinks or grouped.softcap)),
        "partly rotated heads": bool(grouped and grouped.rotary_dim not in (0, grouped.head_dim)),
        f"{layer.norms} norms": layer.norms != "pre",
        "a gate without silu": isinstance(ffn, Mlp) and ffn.gated and ffn.activation != "silu",
    }
    return [name for name, lacks in found.items() if lacks]


def _head(model: Model, batch: int, sequence: int) -> Graph:
    b = Builder(model.dtype)
    x = b.stream("x", batch, sequence, model.hidden)
    return b.graph("head", x, head(b, model, x))


def _micro_batch_templates(model: Model, layout: Layout, mesh: Mesh) -> list[Graph]:
    assert layout.seq is not None  # resolve_layout fills it
    batch = layout.micro_batch * layout.dp
    ends = ("embedding", "head")
    graphs = []
    for graph in logical_templates(model, batch, layout.seq):
        placed = autograd(insert_collectives(graph, mesh), mesh, regather=bool(layout.tp_regather))
        graphs.append(placed if graph.name in ends else recompute(placed, layout.recompute))
    pipeline = mesh.axis("pp")
    if pipeline:
        graphs.extend(boundary_templates(_stream(graphs[1]), pipeline))
    return graphs


def _stream(layer: Graph) -> Tensor:
    return next(t for t in layer.inputs if t.name == layer.ports.enters)


def _step_of(runs: tuple[Run, ...], templates: dict[str, Graph], model: Model, layout: Layout, mesh: Mesh) -> Graph:
    pipeline = mesh.axis("pp")
    shared = EMBEDDING_WEIGHT if model.tied_embeddings and pipeline else ""
    params = count_stage_params([(templates[run.template], run.count) for run in runs], shared)
    ends = Axis("ends", 2, pipeline.stride * (pipeline.size - 1)) if pipeline and shared else None

    def build(name: str) -> Graph:
        return step_template(name, params, mesh, zero=layout.zero, dtype=model.dtype, ends=ends)

    return _named_like_an_equal(build, templates) if pipeline else build("step")


def _named_like_an_equal(build: Callable[[str], Graph], templates: dict[str, Graph]) -> Graph:
    """`step.0`, `step.1`, ...: the first name that is free or whose template is equal."""
    index = 0
    while (known := templates.get(f"step.{index}")) is not None and known.ops != build(known.name).ops:
        index += 1
    return build(f"step.{index}")
