"""The step template: what a stage does once per step with the gradients of its parameters.

Parameters of a rank lie in one flat buffer, as in Megatron-LM, so the template has a handful of ops whatever the
number of layers. Scalars (the norm itself, the loss) travel too, but as metadata, not as ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from stepgraph.ir.gradients import param_gradients
from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.tensor import Axis, Kind, Tensor
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
class StageParams:
    """Elements per rank of one stage: all parameters, those whose gradient is a pending sum over TP, and a table
    shared with the other end of the pipeline."""

    total: int
    pending_tp: int
    shared_with_other_end: int


def count_stage_params(layers: Iterable[tuple[Graph, int]], shared: str = "") -> StageParams:
    """Count a stage's parameters from its templates.

    layers: templates with how often each runs. A parameter of the same name in two templates (a tied table) is one.
    """
    seen: set[str] = set()
    total = pending = other = 0
    for graph, count in layers:
        for param, grad in param_gradients(graph):
            if param.name in seen:
                continue
            seen.add(param.name)
            total += count * param.elements
            pending += count * param.elements if _is_pending(grad, "tp") else 0
            other += param.elements if param.name == shared else 0
    return StageParams(total, pending, other)


def _is_pending(grad: Tensor, axis: str) -> bool:
    return any(p.axis.name == axis and p.dim is None for p in grad.place)


def step_template(name: str, params: StageParams, mesh: Mesh, *, zero: int, dtype: str, ends: Axis | None) -> Graph:
    """Gradient sync, gradient norm, AdamW and (ZeRO-1) the gathering of parameters.

    zero: 0 all-reduces gradients and updates every parameter on every data rank; 1 reduce-scatters them, updates a
    part and gathers the parameters. ends: the axis over the pipeline's first and last stage when they share a table.

    Source: Rajbhandari et al. 2020 (arXiv:1910.02054); NVIDIA/Megatron-LM megatron/core/distributed/
    finalize_model_grads.py for the order; Loshchilov and Hutter 2019 (arXiv:1711.05101) for AdamW.
    """
    writer = Writer(mesh.splitting)
    _reduce_small(writer, params, mesh, ends)
    grads = _sync_gradients(writer, params, mesh, zero)
    _emit(writer, "grad_norm", "step.grad_norm", (grads,), (Tensor("step.grad_norm", "", (), "fp32", Kind.STATE),))
    updated = _update(writer, grads, dtype)
    if mesh.data and zero == 1:
        _move(writer, "step.params.all_gather", "all_gather", updated, (), mesh.data, _buckets(params.total, mesh))
    outputs = tuple(t for op in writer.ops for t in op.outputs)
    return Graph(name, tuple(writer.ops), outputs, facts=frozenset({"placed"}))


def _emit(writer: Writer, kind: str, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Op:
    at = tuple((p.axis.name, "p") for p in inputs[0].place)
    op = Op(name, kind, tuple(inputs), tuple(outputs), (), at, Phase.STEP, module="step", origin="optimizer")
    return writer.emit(op)


def _move(
    writer: Writer, name: str, kind: str, tensor: Tensor, place: tuple[str, ...], group: tuple[Axis, ...], pieces: int
) -> Tensor:
    """A collective on a flat buffer, issued in equal pieces. place: letters on which `group` splits the result."""
    at = dict.fromkeys((axis.name for axis in group), "p") if place else {}
    out = attrs.evolve(tensor, name=name, place=operand_place("p", at, group))
    op = Op(name, kind, (tensor,), (out,), (("pieces", pieces),), (), Phase.STEP, group=group, module="step")
    return writer.emit(attrs.evolve(op, origin="optimizer")).outputs[0]


def _flat(name: str, elements: int, dtype: str, kind: Kind, pending: tuple[Axis, ...] = ()) -> Tensor:
    at = dict.fromkeys((axis.name for axis in pending), "#")
    return Tensor(name, "p", (elements,), dtype, kind, result_place("p", at, pending))


def _reduce_small(writer: Writer, params: StageParams, mesh: Mesh, ends: Axis | None) -> None:
    """Gradients that are summed over TP (norm weights under sequence parallelism) or over the pipeline's ends."""
    tp = mesh.axis("tp")
    if tp and params.pending_tp:
        grads = _flat("step.replicated_grads", params.pending_tp, PARAM_GRAD_DTYPE, Kind.GRAD, (tp,))
        _move(writer, "step.replicated_grads.all_reduce", "all_reduce", grads, (), (tp,), 1)
    if ends and params.shared_with_other_end:
        grads = _flat("step.tied_grads", params.shared_with_other_end, PARAM_GRAD_DTYPE, Kind.GRAD, (ends,))
        _move(writer, "step.tied_grads.all_reduce", "all_reduce", grads, (), (ends,), 1)


def _buckets(elements: int, mesh: Mesh) -> int:
    size = max(BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK * _data_ranks(mesh))
    return -(-elements // size)


def _data_ranks(mesh: Mesh) -> int:
    ranks = 1
    for axis in mesh.data:
        ranks *= axis.size
    return ranks


def _sync_gradients(writer: Writer, params: StageParams, mesh: Mesh, zero: int) -> Tensor:
    ranks = _data_ranks(mesh)
    padded = -(-params.total // ranks) * ranks  # a flat buffer is padded so that every data rank owns as much
    grads = _flat("step.grads", padded, PARAM_GRAD_DTYPE, Kind.GRAD, mesh.data)
    if not mesh.data:
        return grads
    pieces = _buckets(params.total, mesh)
    if zero == 0:
        return _move(writer, "step.grads.all_reduce", "all_reduce", grads, (), mesh.data, pieces)
    return _move(writer, "step.grads.reduce_scatter", "reduce_scatter", grads, ("p",), mesh.data, pieces)


def _update(writer: Writer, grads: Tensor, dtype: str) -> Tensor:
    """AdamW on this rank's part: moments and master weights in fp32, and the parameters that the model reads."""
    state = [
        attrs.evolve(grads, name=f"step.{part}", kind=Kind.STATE, dtype="fp32") for part in ("exp_avg", "exp_avg_sq")
    ]
    master = attrs.evolve(grads, name="step.master", kind=Kind.STATE, dtype="fp32")
    names = ["step.adamw", "step.adamw.exp_avg_sq", "step.adamw.master"]
    outputs = [attrs.evolve(t, name=name) for t, name in zip((*state, master), names, strict=True)]
    if dtype != "fp32":
        outputs.append(attrs.evolve(master, name="step.adamw.params", kind=Kind.PARAM, dtype=dtype))
    return _emit(writer, "adamw", "step.adamw", (*state, grads, master), outputs).outputs[-1]
