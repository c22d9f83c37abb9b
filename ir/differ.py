"""What changed between two graphs: ops matched by name, and what is different about each, in words; kernels likewise.

The comparison is the text form's: an operand is compared by name, a tensor's description where it enters or is made. So
one edited tensor is one line, not one line per reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from stepgraph.ir.graph import Graph, Group
from stepgraph.ir.op import Op
from stepgraph.ir.text import described, entering, header_fields, kernel_line, op_fields, op_line
from stepgraph.ir.words import tensor_word, word


@attrs.frozen
class Edit:
    """One field, before and after, as text; empty where there is nothing."""

    field: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.field} {self.before or '(none)'} -> {self.after or '(none)'}"


@attrs.frozen
class Change:
    """An op that both graphs have, and its edits."""

    name: str
    edits: tuple[Edit, ...]

    def __str__(self) -> str:
        return f"{word(self.name)}: {', '.join(map(str, self.edits))}"


@attrs.frozen
class GraphDiff:
    """From one graph to another; false when nothing differs.

    added, removed: ops. changed: ops of the same name with their edits. graph: edits of what stands around the ops
    (name, facts, mesh, ports, entering tensors, outputs, order). order: names of all ops in either, merged. grouped,
    ungrouped: fused kernels that only `b` or only `a` has; one that differs in anything is in both.
    """

    added: tuple[Op, ...] = ()
    removed: tuple[Op, ...] = ()
    changed: tuple[Change, ...] = ()
    graph: tuple[Edit, ...] = ()
    order: tuple[str, ...] = ()
    grouped: tuple[Group, ...] = ()
    ungrouped: tuple[Group, ...] = ()

    def __bool__(self) -> bool:
        return any((self.added, self.removed, self.changed, self.graph, self.grouped, self.ungrouped))

    def __str__(self) -> str:
        if not self:
            return "no difference"
        lines = {op.name: [f"- {op_line(op)}"] for op in self.removed}
        lines |= {op.name: [f"+ {op_line(op)}"] for op in self.added}
        lines |= {change.name: [f"~ {change}"] for change in self.changed}
        around = [f"~ graph: {edit}" for edit in self.graph]
        inside = (line for name in self.order for line in lines.get(name, ()))
        return "\n".join([*around, *inside, *self._kernel_lines()])

    def _kernel_lines(self) -> Iterator[str]:
        """Kernels that are gone, then new ones; what is new under an old name stands below the old one."""
        lines: dict[str, list[str]] = {}
        for sign, groups in (("-", self.ungrouped), ("+", self.grouped)):
            for group in groups:
                lines.setdefault(group.name, []).append(f"{sign} {kernel_line(group)}")
        return (line for found in lines.values() for line in found)


def diff(a: Graph, b: Graph) -> GraphDiff:
    """What to do to `a` to get `b`.

    Ops are matched by name, which both graphs keep unique; a renamed op is one removed and one added.
    """
    added = tuple(op for op in b.ops if op.name not in a.by_name)
    removed = tuple(op for op in a.ops if op.name not in b.by_name)
    pairs = [(a.by_name[op.name], op) for op in b.ops if op.name in a.by_name]
    changes = [Change(after.name, _edits(_op_texts(before), _op_texts(after))) for before, after in pairs]
    changed = tuple(change for change in changes if change.edits)
    around = _edits(_graph_texts(a), _graph_texts(b)) + _reordered(a, b)
    before, after = frozenset(a.groups), frozenset(b.groups)
    grouped = tuple(group for group in b.groups if group not in before)
    ungrouped = tuple(group for group in a.groups if group not in after)
    return GraphDiff(added, removed, changed, around, tuple(_merged(a, b)), grouped, ungrouped)


def _edits(before: dict[str, str], after: dict[str, str]) -> tuple[Edit, ...]:
    fields = dict.fromkeys([*before, *after])
    edits = [Edit(field, before.get(field, ""), after.get(field, "")) for field in fields]
    return tuple(edit for edit in edits if edit.before != edit.after)


def _op_texts(op: Op) -> dict[str, str]:
    outputs = ", ".join(f"{tensor_word(t.name)} : {described(t, op.phase)}" for t in op.outputs)
    inputs = ", ".join(tensor_word(t.name) for t in op.inputs)
    return {
        "phase": op.phase.value,
        "kind": word(op.kind),
        "outputs": outputs,
        "inputs": inputs,
        **dict(op_fields(op)),
    }


def _graph_texts(graph: Graph) -> dict[str, str]:
    header = {("name" if key == "graph" else key): text for key, text in header_fields(graph)}
    inputs = {f"input {tensor_word(t.name)}": described(t) for t in entering(graph)}
    outputs = " ".join(tensor_word(t.name) for t in graph.outputs)
    return {**header, **inputs, "outputs": outputs}


def _reordered(a: Graph, b: Graph) -> tuple[Edit, ...]:
    """The first places where ops, or kernels, that both graphs have stand in another order."""
    ops = _first_moved("order from here", [op.name for op in a.ops], [op.name for op in b.ops])
    return ops + _first_moved("kernels from here", [g.name for g in a.groups], [g.name for g in b.groups])


def _first_moved(field: str, before: list[str], after: list[str]) -> tuple[Edit, ...]:
    old_names, new_names = set(before), set(after)
    pairs = zip((n for n in before if n in new_names), (n for n in after if n in old_names), strict=False)
    return next(((Edit(field, word(old), word(new)),) for old, new in pairs if old != new), ())


def _merged(a: Graph, b: Graph) -> Iterator[str]:
    """Names in the order of `b`; what only `a` has stands after the op that it followed there."""
    follow: dict[str | None, list[str]] = {}
    anchor = None
    for op in a.ops:
        if op.name in b.by_name:
            anchor = op.name
        else:
            follow.setdefault(anchor, []).append(op.name)
    yield from follow.get(None, ())
    yield from _with_followers((op.name for op in b.ops), follow)


def _with_followers(names: Iterable[str], follow: dict[str | None, list[str]]) -> Iterator[str]:
    for name in names:
        yield name
        yield from follow.get(name, ())
