"""insert_collectives: logical forward ops become placed ones, with the conversions that placements ask for."""

from __future__ import annotations

import attrs

from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op
from stepgraph.ir.rows import spec_of
from stepgraph.ir.table import row_of
from stepgraph.ir.tensor import Kind, Tensor
from stepgraph.lowering.builder import PIN
from stepgraph.lowering.conversions import PlacementError, Writer
from stepgraph.lowering.mesh import Mesh
from stepgraph.lowering.placement import At, choose_letters, operand_place, result_place


def insert_collectives(graph: Graph, mesh: Mesh) -> Graph:
    """Place every tensor and emit the collectives in between.

    Placements flow in program order from parameters, tokens and the stream. A conversion is shared by all readers
    that want the same placement, so q, k and v (or gate and up) share one all-gather.
    """
    writer = Writer(mesh)
    placed = {t.name: _at_home(t, graph, mesh) for t in graph.inputs}
    for op in graph.ops:
        if op.kind == PIN:
            _pin(op, placed, writer, mesh)
        else:
            _place(op, placed, writer, mesh)
    return _finish(graph, writer, placed)


def _at_home(tensor: Tensor, graph: Graph, mesh: Mesh) -> Tensor:
    if tensor.kind is Kind.PARAM:
        return attrs.evolve(tensor, place=mesh.home_of_param(tensor))
    if tensor.name == graph.ports.enters:
        return attrs.evolve(tensor, place=mesh.home_of_stream(tensor.dims))
    return attrs.evolve(tensor, place=mesh.home_of_tokens(tensor.dims))


def _pin(op: Op, placed: dict[str, Tensor], writer: Writer, mesh: Mesh) -> None:
    """Resolve what a block says about placement: to the stream, to the experts, or back from them."""
    source = placed[op.inputs[0].name]
    homes = {"stream": mesh.home_of_stream, "experts": mesh.home_of_routed}
    placed[op.outputs[0].name] = writer.convert(source, homes[str(op.attr("to"))](source.dims), _like(op))


def _like(op: Op) -> Op:
    """What a conversion inherits from the op that wants it."""
    return Op("", "", (), (), module=op.module, origin="insert_collectives")


def _place(op: Op, placed: dict[str, Tensor], writer: Writer, mesh: Mesh) -> None:
    row = row_of(op.kind)
    spec = spec_of(op, row)
    inputs = [placed[t.name] for t in op.inputs]
    at = choose_letters(op, row, spec, inputs, mesh.splitting)
    moved = tuple(_operand(t, letters, at, op, writer) for t, letters in zip(inputs, spec[0], strict=True))
    outputs = tuple(
        attrs.evolve(t, place=result_place(letters, at, mesh.splitting, row.inner)) if at else t
        for t, letters in zip(op.outputs, spec[1], strict=True)
    )
    made = writer.emit(attrs.evolve(op, inputs=moved, outputs=outputs, at=tuple(at.items())))
    placed.update((t.name, t) for t in outputs)
    writer.emit_inner(made, row, _like(op))


def _operand(tensor: Tensor, letters: str, at: At, op: Op, writer: Writer) -> Tensor:
    place = operand_place(letters, at, writer.axes)
    if tensor.kind is Kind.PARAM and place != tensor.place:
        raise PlacementError(f"{op.name}: parameter {tensor.name} {tensor} would have to move for {dict(at)}")
    return writer.convert(tensor, place, _like(op))


def _finish(graph: Graph, writer: Writer, placed: dict[str, Tensor]) -> Graph:
    outputs = tuple(placed[t.name] for t in graph.outputs)
    leaves = placed[graph.ports.leaves].name if graph.ports.leaves else ""
    ports = attrs.evolve(graph.ports, leaves=leaves)
    return attrs.evolve(graph, ops=tuple(writer.ops), outputs=outputs, ports=ports, facts=graph.facts | {"placed"})
