"""What the verifier reports: one fault per thing that is wrong, shown where it is in the program."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op
from stepgraph.ir.tensor import Tensor, describe


@attrs.frozen
class Fault:
    """One broken rule.

    code: short, stable, kebab-case; op: the op's name, or what of the graph it is about ("ports", "outputs", ...);
    kind: the op's kind, empty where there is no op; message: what was found and what was expected; graph: the graph's
    name; excerpt: the op between its neighbours, marked with `>`.
    """

    code: str
    op: str
    message: str
    kind: str = ""
    graph: str = ""
    excerpt: tuple[str, ...] = ()

    def __str__(self) -> str:
        kind = f" ({self.kind})" if self.kind else ""
        return f"{self.code} {self.op}{kind}: {self.message}"


class VerifyError(ValueError):
    """A graph or program breaks the rules: a bug in whatever made it.

    problems: the faults, each with code, op and message. The text shows each in its graph, and names that graph when
    there are several.
    """

    def __init__(self, subject: str, problems: Iterable[Fault], *, several_graphs: bool = False) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = [f"{subject} ({count} problem{'' if count == 1 else 's'})"]
        for fault in self.problems:
            place = f"{fault.graph}: " if several_graphs and fault.graph else ""
            lines += [f"  {place}{fault}", *fault.excerpt]
        super().__init__("\n".join(lines))


def op_fault(graph: Graph, position: int, code: str, message: str) -> Fault:
    """A fault of the op at that position, with its excerpt."""
    op = graph.ops[position]
    return Fault(code, op.name, message, op.kind, graph.name, _excerpt(graph, position))


def graph_fault(graph: Graph, where: str, code: str, message: str) -> Fault:
    """A fault of no single op."""
    return Fault(code, where, message, "", graph.name)


def shown(tensor: Tensor) -> str:
    """A tensor as faults show it: `%x [b/dp s d] sum(tp)`."""
    return f"%{tensor.name} {describe(tensor)}"


def _excerpt(graph: Graph, position: int) -> tuple[str, ...]:
    first = max(position - 1, 0)
    lines = enumerate(graph.ops[first : position + 2], first)
    return tuple(f"    {'>' if i == position else ' '} {_line(op)}" for i, op in lines)


def _line(op: Op) -> str:
    """One op on one line. It never raises: what it shows may be malformed."""
    made = ", ".join(map(shown, op.outputs))
    call = f"{op.kind}({', '.join('%' + t.name for t in op.inputs)})"
    at = ",".join(f"{axis}:{letter}" for axis, letter in op.at)
    fields = (("at", at), ("group", op.group_name), ("of", op.of), ("role", op.role))
    notes = "".join(f" {key}={text}" for key, text in fields if text)
    return f"{op.phase.value} {op.name}: {made + ' = ' if made else ''}{call}{notes}"
