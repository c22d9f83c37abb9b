"""The step template: what a stage does once per step with the gradients of its parameters.

Parameters of a rank lie in one flat buffer, as in Megatron-LM, so the template has a handful of ops whatever the
number of layers. Scalars (the norm itself, the loss) travel too, but as metadata, not as ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import attrs

from stepgraph.ir.gradients import param_gradients
from stepgraph.ir.graph import Graph, param_identity
from stepgraph.ir.op import SUM_REPLICATED, Op, Phase
from stepgraph.ir.tensor import Axis, Kind, Tensor, is_of_experts
from stepgraph.lowering.backward import PARAM_GRAD_DTYPE
from stepgraph.lowering.conversions import Writer
from stepgraph.lowering.mesh import Mesh
from stepgraph.lowering.placement import operand_place, result_place

BUCKET_ELEMENTS = 40_000_000
BUCKET_ELEMENTS_PER_RANK = 1_000_000
"""A gradient bucket holds max(40e6, 1e6 dp) elements.

Source: NVIDIA/Megatron-LM megatron/core/distributed/distributed_data_parallel.py.
"""


@attrs.frozen
class Buffer:
    """A flat buffer: its elements per rank, the data axes that sum its gradients, and whether it holds only experts."""

    axes: tuple[Axis, ...]
    elements: int
    of_experts: bool = False


@attrs.frozen
class StageParams:
    """Elements per rank of one stage.

    buffers: dense parts first, then experts whose gradients are summed over other ranks. pending_tp: parameters whose gradient is also a pending sum over TP, by axes.
    shared_with_other_end: a table that the other end of the pipeline holds too.
    """

    buffers: tuple[Buffer, ...]
    pending_tp: tuple[tuple[tuple[Axis, ...], int], ...] = ()
    shared_with_other_end: int = 0


def count_stage_params(layers: Iterable[tuple[Graph, int]], mesh: Mesh, shared: str = "") -> StageParams:
    """Count a stage's parameters from its templates.

    layers: each template once, with how often it runs. A parameter of the same name in two templates (a tied table) is one.
    """
    seen: set[str] = set()
    buffers: dict[tuple[Axis, ...], Buffer] = {}
    pending: dict[tuple[Axis, ...], int] = {}
    other = 0
    for graph, count in layers:
        for param, grad in param_gradients(graph):
            name = param_identity(graph, param)
            if name in seen:
                continue
            seen.add(name)
            small, data = _pending_axes(param, grad, mesh)
            held = buffers.get(data, Buffer(data, 0, of_experts=True))
            buffers[data] = Buffer(
                data, held.elements + count * param.elements, held.of_experts and is_of_experts(param)
            )
            if small:
                pending[small] = pending.get(small, 0) + count * param.elements
            other += param.elements if param.name == shared else 0
    dense_first = sorted(buffers.values(), key=lambda buffer: buffer.of_experts)
    return StageParams(tuple(dense_first), tuple(pending.items()), other)


def _pending_axes(param: Tensor, grad: Tensor, mesh: Mesh) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Axes over which a gradient is still to be summed: those of TP, for dense parameters, and those of data."""
    axes = tuple(p.axis for p in grad.place if p.dim is None)
    if is_of_experts(param):
        return (), axes
    tp = tuple(axis for axis in axes if axis in mesh.groups["tp"])
    return tp, tuple(axis for axis in axes if axis not in tp)


def step_template(name: str, params: StageParams, mesh: Mesh, *, zero: int, dtype: str, ends: Axis | None) -> Graph:
    """Gradient sync, gradient norm, AdamW and (ZeRO-1) the gathering of parameters.

    zero: 0 all-reduces gradients and updates every parameter on every data rank; 1 reduce-scatters them, updates a
    part and gathers the parameters. ends: the axis over the pipeline's first and last stage when they share a table.
    Experts have a buffer of their own, summed over the ranks that hold the same experts.

    Source: Rajbhandari et al. 2020 (arXiv:1910.02054); NVIDIA/Megatron-LM megatron/core/distributed/
    finalize_model_grads.py for what is summed (there the small sums come last, which changes no total); Loshchilov
    and Hutter 2019 (arXiv:1711.05101) for AdamW.
    """
    writer = Writer(mesh)
    _reduce_small(writer, params, ends)
    prefixes = _prefixes(params.buffers)
    buffers = list(zip(prefixes, params.buffers, strict=True))
    grads = [_sync_gradients(writer, prefix, held.axes, held.elements, zero) for prefix, held in buffers]
    for prefix, grad in zip(prefixes, grads, strict=True):
        scalar = Tensor(f"{prefix}.grad_norm", "", (), "fp32", Kind.STATE)
        _emit(writer, "grad_norm", scalar.name, (grad,), (scalar,))
    for (prefix, held), grad in zip(buffers, grads, strict=True):
        updated = _update(writer, prefix, grad, dtype)
        if held.axes and zero == 1:
            pieces = _buckets(held.elements, held.axes)
            _move(writer, f"{prefix}.params.all_gather", "all_gather", updated, (), held.axes, pieces)
    outputs = tuple(t for op in writer.ops for t in op.outputs)
    return Graph(name, tuple(writer.ops), outputs, facts=frozenset({"placed"}))


def _prefixes(buffers: Sequence[Buffer]) -> list[str]:
    """`step` for the dense buffer, `step.experts` for the experts' own; further ones of a sort are numbered."""
    bases = ["step.experts" if buffer.of_experts else "step" for buffer in buffers]
    earlier = [bases[:i].count(base) for i, base in enumerate(bases)]
    return [f"{base}.{number}" if number else base for base, number in zip(bases, earlier, strict=True)]


def _emit(writer: Writer, kind: str, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Op:
    at = tuple((p.axis.name, "p") for p in inputs[0].place)
    op = Op(name, kind, tuple(inputs), tuple(outputs), (), at, Phase.STEP, module="step", origin="optimizer")
    return writer.emit(op)


def _move(
    writer: Writer,
    name: str,
    kind: str,
    tensor: Tensor,
    place: tuple[str, ...],
    group: tuple[Axis, ...],
    pieces: int,
    origin: str = "optimizer",
) -> Tensor:
    """A collective on a flat buffer, issued in equal pieces. place: letters on which `group` splits the result."""
    at = dict.fromkeys((axis.name for axis in group), "p") if place else {}
    out = attrs.evolve(tensor, name=name, place=operand_place("p", at, group))
    op = Op(
        name,
        kind,
        (tensor,),
        (out,),
        (("pieces", pieces), *writer.mesh.named(group)),
        (),
        Phase.STEP,
        group=group,
        module="step",
    )
    return writer.emit(attrs.evolve(op, origin=origin)).outputs[0]


def _flat(name: str, elements: int, dtype: str, kind: Kind, pending: tuple[Axis, ...] = ()) -> Tensor:
    at = dict.fromkeys((axis.name for axis in pending), "#")
    return Tensor(name, "p", (elements,), dtype, kind, result_place("p", at, pending))


def _reduce_small(writer: Writer, params: StageParams, ends: Axis | None) -> None:
    """Gradients that are summed over TP (norm weights under sequence parallelism) or over the pipeline's ends."""
    for i, (axes, elements) in enumerate(params.pending_tp):
        name = f"step.replicated_grads{f'.{i}' if i else ''}"
        grads = _flat(name, elements, PARAM_GRAD_DTYPE, Kind.GRAD, axes)
        _move(writer, f"{name}.all_reduce", "all_reduce", grads, (), axes, 1, SUM_REPLICATED)
    if ends and params.shared_with_other_end:
        grads = _flat("step.tied_grads", params.shared_with_other_end, PARAM_GRAD_DTYPE, Kind.GRAD, (ends,))
        _move(writer, "step.tied_grads.all_reduce", "all_reduce", grads, (), (ends,), 1)


def _buckets(elements: int, axes: tuple[Axis, ...]) -> int:
    size = max(BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK * prod(axis.size for axis in axes))
    return -(-elements // size)


def _sync_gradients(writer: Writer, prefix: str, axes: tuple[Axis, ...], elements: int, zero: int) -> Tensor:
    ranks = prod(axis.size for axis in axes)
    padded = -(-elements // ranks) * ranks  # a flat buffer is padded so that every data rank owns as much
    grads = _flat(f"{prefix}.grads", padded, PARAM_GRAD_DTYPE, Kind.GRAD, axes)
    if not axes:
        return grads
    pieces = _buckets(elements, axes)
    if zero == 0:
        return _move(writer, f"{prefix}.grads.all_reduce", "all_reduce", grads, (), axes, pieces)
    return _move(writer, f"{prefix}.grads.reduce_scatter", "reduce_scatter", grads, ("p",), axes, pieces)


def _update(writer: Writer, prefix: str, grads: Tensor, dtype: str) -> Tensor:
    """AdamW on this rank's part: moments and master weights in fp32, and the parameters that the model reads."""
    parts = ("exp_avg", "exp_avg_sq", "master")
    state = [attrs.evolve(grads, name=f"{prefix}.{part}", kind=Kind.STATE, dtype="fp32") for part in parts]
    names = [f"{prefix}.adamw", f"{prefix}.adamw.exp_avg_sq", f"{prefix}.adamw.master"]
    outputs = [attrs.evolve(t, name=name) for t, name in zip(state, names, strict=True)]
    if dtype != "fp32":
        outputs.append(attrs.evolve(state[-1], name=f"{prefix}.adamw.params", kind=Kind.PARAM, dtype=dtype))
    return _emit(writer, "adamw", names[0], (*state[:2], grads, state[2]), outputs).outputs[-1]
