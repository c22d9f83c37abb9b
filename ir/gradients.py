"""Which tensor is the gradient of which parameter: derived from the op table, so it cannot disagree with it."""

from __future__ import annotations

from collections.abc import Iterator

from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.table import CONVERSIONS, row_of
from stepgraph.ir.tensor import Kind, Tensor


def param_gradients(graph: Graph) -> tuple[tuple[Tensor, Tensor], ...]:
    """Pairs of a parameter and its gradient, in order of the gradients.

    A parameter that is read twice in the graph has one gradient, the sum.
    """
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for op in graph.ops:
        if is_answer(op):
            found.update((param.name, (param, grad)) for param, grad in _pairs(graph, op))
    return tuple(found.values())


def is_answer(op: Op) -> bool:
    """Whether autograd emitted the op as gradient of a forward op, rather than to move or to sum one."""
    return op.phase is Phase.BACKWARD and op.role in ("dx", "dw") and op.kind not in CONVERSIONS


def _pairs(graph: Graph, op: Op) -> Iterator[tuple[Tensor, Tensor]]:
    forward = graph[op.of]
    grads = next((g for g in row_of(forward.kind).grads if g.kind == op.kind), None)
    for operand, out in zip(grads.of, op.outputs, strict=True) if grads else ():
        if forward.inputs[operand].kind is Kind.PARAM:
            yield forward.inputs[operand], _summed(graph, out)


def _summed(graph: Graph, grad: Tensor) -> Tensor:
    adds = [op for op in graph.users(grad) if op.kind == "grad_add"]
    return adds[0].outputs[0] if adds else grad
