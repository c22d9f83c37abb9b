"""Checks of the backward pass: what belongs to what, and that every forward op a gradient reaches is answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import MappingProxyType

from stepgraph.ir.faults import Fault, op_fault, shown
from stepgraph.ir.gradients import is_answer
from stepgraph.ir.graph import Graph
from stepgraph.ir.nests import Problem, moves_data
from stepgraph.ir.op import AGAIN, Op, Phase
from stepgraph.ir.rows import Grad, Rule
from stepgraph.ir.table import CONVERSIONS, row_of
from stepgraph.ir.tensor import Kind, Tensor

ROLES = MappingProxyType(
    {
        Phase.FORWARD: ("", "inner"),
        Phase.BACKWARD: ("dx", "dw", "sum", "regather", "recompute", "inner"),
        Phase.STEP: ("",),
    }
)
"""Roles that an op may have, by phase."""

HOPS = MappingProxyType({"send": "recv", "recv": "send"})
"""What answers a hop between stages: the gradient goes the other way."""


def roles_known(graph: Graph) -> Iterator[Fault]:
    """role: a role of its phase that suits the kind.

    A repetition is of the kind and the letters (a conversion: the group) of what it repeats, a sum is a grad_add, inner
    belongs to all-reduces of what their op makes.
    """
    for i, op in enumerate(graph.ops):
        what = _role_problem(graph, op)
        if what:
            yield op_fault(graph, i, "role", what)


def _is_result(tensor: Tensor, op: Op) -> bool:
    """Whether a tensor is what an op makes, or a recomputed copy of it."""
    return any(tensor.name in (made.name, f"{made.name}.again") for made in op.outputs)


def _role_problem(graph: Graph, op: Op) -> str:
    known = ROLES[op.phase]
    if op.role not in known:
        return f"role {op.role!r} in {op.phase.value}, expected one of {', '.join(role or 'none' for role in known)}"
    if (op.role == "sum") != (op.kind == "grad_add"):
        return f"role {op.role!r}, expected 'sum' of grad_add ops, and of them only"
    if op.kind in CONVERSIONS and op.role == "dw":
        return "role 'dw', expected 'dx': a conversion computes no gradient"
    original = graph.by_name.get(op.of)
    if op.role in AGAIN and original and _nest(original) != _nest(op):
        return f"repeats {original.name} ({original.kind}), expected its kind, letters and group"
    if op.role == "inner" and original and (op.kind != "all_reduce" or not _is_result(op.inputs[0], original)):
        return f"acts inside {original.name}, expected an all_reduce of one of its results"
    return ""


def _nest(op: Op) -> tuple[object, ...]:
    return op.kind, op.at, op.group


def partners_exist(graph: Graph) -> Iterator[Fault]:
    """of: backward and inner ops name a forward op.

    Sums and conversions of a gradient may name none: that of a parameter, or of the stream that enters, has no producer
    here.
    """
    for i, op in enumerate(graph.ops):
        what = _partner_problem(graph, op)
        if what:
            yield op_fault(graph, i, "of", what)


def _partner_problem(graph: Graph, op: Op) -> str:
    if op.of:
        partner = graph.by_name.get(op.of)
        if partner is None:
            return f"belongs to {op.of!r}, which is not in the graph"
        return (
            "" if partner.phase is Phase.FORWARD else f"belongs to {op.of} in {partner.phase.value}, expected forward"
        )
    free = op.phase is Phase.BACKWARD and op.role not in AGAIN and (op.kind in CONVERSIONS or op.kind == "grad_add")
    needs = op.role == "inner" or (op.phase is Phase.BACKWARD and not free)
    return "belongs to no op, expected a forward op" if needs else ""


def forward_ops_answered(graph: Graph) -> Iterator[Fault]:
    """backward: an op that a gradient reaches has exactly the backward ops of its row, at its letters; others none.

    gradient: each of them reads what the row says (a recomputed copy or another placement will do) and makes gradients
    with the letters and sizes of the operands.
    """
    if "backward" not in graph.facts:
        return
    answers: dict[str, list[int]] = {}
    for i, op in enumerate(graph.ops):
        if is_answer(op):
            answers.setdefault(op.of, []).append(i)
    reached, roots = _reached(graph), _roots(graph)
    for i, op in enumerate(graph.ops):
        if op.phase is Phase.FORWARD:
            yield from _answer_faults(graph, i, answers.get(op.name, []), op.name in reached, roots)


def _reached(graph: Graph) -> set[str]:
    """Forward ops that a gradient reaches, walking back from the leaving stream, the losses and what is sent on."""
    live = {graph.ports.leaves} if graph.ports.grad_enters else set()
    reached = set()
    for op in reversed(graph.phase(Phase.FORWARD)):
        starts = op.kind == "send" or bool(row_of(op.kind).inner)
        if op.role == "inner" or not (starts or any(t.name in live for t in op.outputs)):
            continue
        reached.add(op.name)
        live.update(op.inputs[i].name for i in _differentiated(op))
    return reached


def _differentiated(op: Op) -> tuple[int, ...]:
    """Operands that get a gradient when the op's results have one."""
    if moves_data(op):
        return tuple(range(len(op.inputs)))
    row = row_of(op.kind)
    return (*row.passes, *(i for grad in row.grads for i in grad.of))


def _roots(graph: Graph) -> dict[str, str]:
    """The tensor that each converted or recomputed one stands for, by name."""
    roots: dict[str, str] = {}
    for op in graph.ops:
        original = graph.by_name.get(op.of)
        if op.role == "recompute" and original and len(original.outputs) == len(op.outputs):
            pairs = [(out.name, like.name) for out, like in zip(op.outputs, original.outputs, strict=True)]
        else:
            pairs = [(out.name, op.inputs[0].name) for out in op.outputs if op.kind in CONVERSIONS]
        roots.update((out, roots.get(source, source)) for out, source in pairs)
    return roots


def _answer_faults(
    graph: Graph, position: int, answers: list[int], reached: bool, roots: dict[str, str]
) -> Iterator[Fault]:
    op = graph.ops[position]
    grads = _expected(op) if reached else ()
    wanted = Counter((grad.role, grad.kind) for grad in grads)
    found = Counter((graph.ops[i].role, graph.ops[i].kind) for i in answers)
    if wanted != found:
        why = "" if reached else ": no gradient reaches it"
        what = f"is answered by {_listed(found)}, expected {_listed(wanted)}{why}"
        yield op_fault(graph, position, "backward", what)
        return
    by_kind = {grad.kind: grad for grad in grads}
    for i in answers:
        problems = _gradient_problems(op, graph.ops[i], by_kind[graph.ops[i].kind], roots)
        yield from (op_fault(graph, i, code, what) for code, what in problems)


def _expected(op: Op) -> tuple[Grad, ...]:
    row = row_of(op.kind)
    return (Grad("dx", HOPS[op.kind], (), ()),) if row.rule is Rule.POINT_TO_POINT else row.grads


def _listed(answers: Counter[tuple[str, str]]) -> str:
    return ", ".join(f"{kind} ({role})" for role, kind in sorted(answers.elements())) or "nothing"


def _gradient_problems(op: Op, answer: Op, grad: Grad, roots: dict[str, str]) -> Iterator[Problem]:
    if answer.kind in HOPS:
        return
    if answer.at != op.at:
        yield "backward", f"splits {dict(answer.at)}, expected {dict(op.at)} as {op.name} does"
    found, expected = (len(answer.inputs), len(answer.outputs)), (len(grad.reads), len(grad.of))
    if found != expected:
        what = (
            f"{found[0]} operands and {found[1]} results, expected {', '.join(grad.reads)} and {expected[1]} gradients"
        )
        yield "gradient", what
        return
    for ref, t in zip(grad.reads, answer.inputs, strict=True):
        wanted = "" if ref.startswith("dy") else (op.inputs if ref[0] == "x" else op.outputs)[int(ref[1:])].name
        if wanted and roots.get(t.name, t.name) != roots.get(wanted, wanted):
            yield "gradient", f"reads {shown(t)}, expected %{wanted} or what stands for it: {ref} of {op.name}"
        if not wanted and t.kind is not Kind.GRAD:
            yield "gradient", f"reads {shown(t)} ({t.kind.value}), expected a gradient: {ref} of {op.name}"
    for operand, out in zip(grad.of, answer.outputs, strict=True):
        source = op.inputs[operand]
        if (out.dims, out.shape) != (source.dims, source.shape):
            yield "gradient", f"makes {shown(out)} {list(out.shape)}, expected {shown(source)} {list(source.shape)}"
