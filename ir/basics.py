"""Checks that the others rely on: names, tensors, kinds, and the order in which ops run."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from stepgraph.errors import did_you_mean
from stepgraph.ir.faults import Fault, graph_fault, op_fault, shown
from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.table import TABLE
from stepgraph.ir.tensor import DTYPE_BYTES, Axis, Kind, Tensor

PHASES = tuple(Phase)
"""Phases in the order in which they run."""


def unique_op_names(graph: Graph) -> Iterator[Fault]:
    """op-name: no two ops have the same name."""
    seen: set[str] = set()
    for i, op in enumerate(graph.ops):
        if not op.name or op.name in seen:
            yield op_fault(graph, i, "op-name", f"the name {op.name!r} is taken or empty, expected a name of its own")
        seen.add(op.name)


def tensors_made_once(graph: Graph) -> Iterator[Fault]:
    """tensor-twice: no tensor is made by two ops, or twice by one."""
    makers: dict[str, str] = {}
    for i, op in enumerate(graph.ops):
        for t in op.outputs:
            if t.name in makers:
                what = f"makes %{t.name}, which {makers[t.name]} makes too, expected a name of its own"
                yield op_fault(graph, i, "tensor-twice", what)
            makers[t.name] = op.name


def tensors_agree(graph: Graph) -> Iterator[Fault]:
    """tensor-differs: tensors of one name are equal wherever they stand."""
    known: dict[str, Tensor] = {}
    for i, op in enumerate(graph.ops):
        for t in (*op.inputs, *op.outputs):
            first = known.setdefault(t.name, t)
            if t is not first and t != first:
                yield op_fault(graph, i, "tensor-differs", _difference(t, first))
    for t in graph.outputs:
        if t != known.get(t.name, t):
            yield graph_fault(graph, "outputs", "tensor-differs", _difference(t, known[t.name]))


def _difference(tensor: Tensor, first: Tensor) -> str:
    return f"{_in_full(tensor)}, expected {_in_full(first)} as where it first stands"


def _in_full(tensor: Tensor) -> str:
    return f"{shown(tensor)} of {tensor.dtype} {list(tensor.shape)} {tensor.kind.value}"


def tensors_well_formed(graph: Graph) -> Iterator[Fault]:
    """tensor-form: a size per letter, letters once, a known type, placements in mesh order on dimensions that exist.

    divides: the axes that split a dimension divide its size.
    """
    seen: set[str] = set()
    for i, op in enumerate(graph.ops):
        for t in (*op.inputs, *op.outputs):
            if t.name not in seen:
                yield from (op_fault(graph, i, code, f"{shown(t)}: {what}") for code, what in _form_problems(t))
            seen.add(t.name)


def _form_problems(tensor: Tensor) -> Iterator[tuple[str, str]]:
    if len(tensor.dims) != len(tensor.shape) or len(set(tensor.dims)) != len(tensor.dims):
        yield "tensor-form", f"letters {tensor.dims!r} for sizes {list(tensor.shape)}, expected one letter per size"
        return
    if tensor.dtype not in DTYPE_BYTES:
        yield "tensor-form", f"type {tensor.dtype!r}; {did_you_mean(tensor.dtype, DTYPE_BYTES)}"
    if any(size < 1 for size in tensor.shape):
        yield "tensor-form", f"sizes {list(tensor.shape)}, expected 1 or more"
    strides = [-p.axis.stride for p in tensor.place]
    if strides != sorted(strides) or len({p.axis.name for p in tensor.place}) != len(tensor.place):
        yield "tensor-form", "placements out of mesh order, expected each axis once, the outermost first"
    if any(p.dim is not None and p.dim not in range(len(tensor.dims)) for p in tensor.place):
        yield "tensor-form", f"split on a dimension that is not there, expected 0 to {len(tensor.dims) - 1}"
        return
    for dim, (letter, size) in enumerate(zip(tensor.dims, tensor.shape, strict=True)):
        parts = prod(p.axis.size for p in tensor.place if p.dim == dim)
        if size % parts:
            yield "divides", f"{letter} = {size} over {parts} ranks, expected a multiple of {parts}"


def axes_agree(graph: Graph) -> Iterator[Fault]:
    """axis-differs: an axis has the same size and stride wherever it stands."""
    known: dict[str, Axis] = {}
    for i, op in enumerate(graph.ops):
        for axis in _axes(op):
            first = known.setdefault(axis.name, axis)
            if axis is not first and axis != first:
                found, expected = f"{axis.size}:{axis.stride}", f"{first.size}:{first.stride}"
                yield op_fault(
                    graph, i, "axis-differs", f"axis {axis.name} = {found}, expected {expected} (size:stride)"
                )


def _axes(op: Op) -> Iterator[Axis]:
    for t in (*op.inputs, *op.outputs):
        yield from (p.axis for p in t.place)
    yield from op.group


def kinds_known(graph: Graph) -> Iterator[Fault]:
    """unknown-kind: every kind has a row in the op table."""
    for i, op in enumerate(graph.ops):
        if op.kind not in TABLE:
            yield op_fault(graph, i, "unknown-kind", f"no row for {op.kind!r}; {did_you_mean(op.kind, TABLE)}")


def phases_in_order(graph: Graph) -> Iterator[Fault]:
    """phase-order: forward ops stand before backward ops, and those before the step."""
    latest = Phase.FORWARD
    for i, op in enumerate(graph.ops):
        if PHASES.index(op.phase) < PHASES.index(latest):
            what = f"a {op.phase.value} op after a {latest.value} op, expected forward, backward, step"
            yield op_fault(graph, i, "phase-order", what)
        else:
            latest = op.phase


def reads_defined(graph: Graph) -> Iterator[Fault]:
    """What an op reads was made before it, or enters the graph.

    phase-read: nothing is read before the phase that makes it. use-before-def: nothing is read before the op that makes
    it. undefined: what no op makes is a parameter, an input, optimizer state, what enters by a port, or (in the step) a
    gradient that the micro-batches left.
    """
    made_at = {t.name: i for i, op in enumerate(graph.ops) for t in op.outputs}
    for i, op in enumerate(graph.ops):
        for t in {t.name: t for t in op.inputs}.values():
            problem = _read_problem(graph, i, t, made_at.get(t.name))
            if problem:
                yield op_fault(graph, i, *problem)


def _read_problem(graph: Graph, position: int, tensor: Tensor, made: int | None) -> tuple[str, str] | None:
    op = graph.ops[position]
    if made is None:
        what = f"reads {shown(tensor)} ({tensor.kind.value}), which no op makes and no port brings in"
        return None if _enters(graph, op, tensor) else ("undefined", what)
    if made < position:
        return None
    maker = graph.ops[made]
    if PHASES.index(maker.phase) > PHASES.index(op.phase):
        what = (
            f"reads %{tensor.name} of {maker.name} in {maker.phase.value}, expected nothing later than {op.phase.value}"
        )
        return "phase-read", what
    what = f"reads %{tensor.name}, which {maker.name} makes {made - position} ops later, expected it before"
    return "use-before-def", what


def _enters(graph: Graph, op: Op, tensor: Tensor) -> bool:
    if tensor.kind in (Kind.PARAM, Kind.INPUT, Kind.STATE):
        return True
    if tensor.kind is Kind.GRAD and op.phase is Phase.STEP:
        return True
    return tensor.name == graph.ports.enters or (tensor.name == graph.ports.grad_enters and op.phase is Phase.BACKWARD)
