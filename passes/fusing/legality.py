"""What makes a match illegal: checked by the framework for every rule, all reasons collected.

| code | refused because |
|---|---|
| phase | members of more than one phase, or not of the rule's |
| recompute | recomputed copies beside first executions, or a kernel across a recomputed layer's boundary |
| scope | members of more than two neighbouring layers |
| stage | the tensor between two members crosses a pipeline stage |
| collective | a member, or what lies between two members, is a collective |
| overlap | a member is in another kernel already |
| cycle | data leaves the kernel and comes back, through other kernels too |
| check | the rule's own check refused |
| relower | it replaces ops by others: a rewrite, to be handed to `lower` |

Notes are no refusals: an inner tensor that somebody outside reads is still written (`escape`), also when only backward
reads it (`saved`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NoReturn

import attrs

from stepgraph.ir.graph import Graph
from stepgraph.ir.joining import LEFT, RIGHT
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.rows import Rule
from stepgraph.ir.table import row_of
from stepgraph.ir.tensor import Tensor
from stepgraph.passes.fusing.findings import Found
from stepgraph.passes.fusing.pattern import FusionRule, runs_in
from stepgraph.passes.fusing.recorder import PatternError
from stepgraph.passes.fusing.taken import Taken

REJECTIONS = ("phase", "scope", "stage", "recompute", "collective", "overlap", "cycle", "check", "relower")
NOTES = ("escape", "saved")


@attrs.frozen
class Reason:
    """Why a match was refused, or what was noted: code, op and what is the matter."""

    code: str = attrs.field(validator=attrs.validators.in_((*REJECTIONS, *NOTES)))
    op: str
    text: str

    def __str__(self) -> str:
        return f"[{self.code}] {self.op}: {self.text}"


LAYER = re.compile(r"L(\d+)\.")
"""How the ops of a layer begin where a stage is written out."""

SIDE = re.compile(rf"{re.escape(LEFT)}|{re.escape(RIGHT)}|L\d+\.")
"""How the ops of a layer begin where several layers are one graph."""


class Rejected(Exception):
    """Raised by a check through `m.reject`."""


@attrs.frozen
class Match:
    """What a rule's own check sees: `m.<parameter>` is the tensor that is bound to it.

    inputs: tensors that enter; outputs: tensors that leave or are read outside; interior: made and read inside;
    escaping: interior tensors that somebody outside reads too.
    """

    graph: Graph
    ops: tuple[Op, ...]
    tensors: Mapping[str, Tensor]

    def __getattr__(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise AttributeError(f"the match has no tensor {name!r}; it has {', '.join(self.tensors)}")
        return self.tensors[name]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Tensors that the kernel reads and does not make."""
        made = {t.name for op in self.ops for t in op.outputs}
        return tuple({t.name: t for op in self.ops for t in op.inputs if t.name not in made}.values())

    @property
    def interior(self) -> tuple[Tensor, ...]:
        """Tensors that are made and read inside."""
        read = {t.name for op in self.ops for t in op.inputs}
        return tuple(t for op in self.ops for t in op.outputs if t.name in read)

    @property
    def escaping(self) -> tuple[Tensor, ...]:
        """Interior tensors that are read outside too."""
        names = {op.name for op in self.ops}
        return tuple(t for t in self.interior if is_read_outside(self.graph, t, names))

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Tensors that leave the kernel."""
        names = {op.name for op in self.ops}
        return tuple(t for op in self.ops for t in op.outputs if is_read_outside(self.graph, t, names))

    def reject(self, why: str) -> NoReturn:
        """Refuse the match, with a reason."""
        raise Rejected(why)


def is_read_outside(graph: Graph, tensor: Tensor, members: set[str] | frozenset[str]) -> bool:
    """Whether somebody besides the members reads a tensor: another op, or whoever reads the graph's outputs."""
    return tensor.name in graph.output_names or any(op.name not in members for op in graph.users(tensor))


def judge(graph: Graph, rule: FusionRule, found: Found, taken: Taken) -> tuple[Reason, ...]:
    """Every reason why a match may not become a kernel; empty when it may.

    taken: the kernels that are there already.
    """
    simple = [
        *(Reason(gap.code, gap.op, gap.text) for gap in found.gaps),
        *_phase(rule, found),
        *_scope(found),
        *_recompute(graph, found),
        *_collectives(found),
        *_overlap(found, taken),
        *(() if found.gaps else _own_checks(graph, rule, found)),  # tensors beyond a gap may be unknown
    ]
    return tuple(simple) or tuple(_cycle(graph, found, taken))


def running_phase(op: Op) -> Phase:
    """The phase that a rule sees: a recomputed op is a forward op that runs again."""
    return Phase.FORWARD if op.role == "recompute" else op.phase


def _phase(rule: FusionRule, found: Found) -> Iterator[Reason]:
    phases = {running_phase(op) for op in found.members}
    if len(phases) > 1:
        yield Reason("phase", found.members[-1].name, f"spans {' and '.join(sorted(p.value for p in phases))}")
        return
    phase = phases.pop()
    if not runs_in(rule, phase):
        yield Reason("phase", found.members[-1].name, f"runs in {phase.value}, the rule is for {rule.phase}")


def _scope(found: Found) -> Iterator[Reason]:
    """Layers of a stage that is written out are numbered."""
    layers = sorted({int(layer[1]) for op in found.members if (layer := LAYER.match(op.name))})
    if layers and layers[-1] - layers[0] > 1:
        last = found.members[-1].name
        yield Reason("scope", last, f"spans layers {layers[0]} to {layers[-1]}: at most one seam is spanned")


def _recompute(graph: Graph, found: Found) -> Iterator[Reason]:
    again = [op for op in found.members if op.role == "recompute"]
    if again and len(again) < len(found.members):
        yield Reason("recompute", again[0].name, "is a recomputed copy, other members are first executions")
    sides = {layer[0] for op in found.members if (layer := SIDE.match(op.name))}
    if len(sides) > 1 and any(_has_copy(graph, op) for op in found.members):
        yield Reason(
            "recompute",
            found.members[0].name,
            "lies across the boundary of a recomputed layer, which starts from its own input",
        )


def _has_copy(graph: Graph, op: Op) -> bool:
    return op.role == "recompute" or f"{op.name}.again" in graph.by_name


def _collectives(found: Found) -> Iterator[Reason]:
    for op in found.members:
        if row_of(op.kind).rule in (Rule.COLLECTIVE, Rule.POINT_TO_POINT):
            yield Reason("collective", op.name, f"is a collective ({op.kind})")
        elif row_of(op.kind).awaited and len(found.members) > 1:
            yield Reason("collective", op.name, f"is summed over all ranks before anything can use it ({op.kind})")


def _overlap(found: Found, taken: Taken) -> Iterator[Reason]:
    for op in found.members:
        if op.name in taken:
            yield Reason("overlap", op.name, f"is in kernel {taken[op.name]} already")


def _own_checks(graph: Graph, rule: FusionRule, found: Found) -> Iterator[Reason]:
    match = Match(graph, found.members, found.tensors)
    for check in rule.checks:
        try:
            answer = check(match)
        except Rejected as refused:
            yield Reason("check", found.members[-1].name, str(refused))
            continue
        if answer is not None:
            what = f"the check of rule {rule.name!r} returned {answer!r}; call m.reject(reason) to refuse a match"
            raise PatternError(f"{check.__code__.co_filename}:{check.__code__.co_firstlineno}: {what}")


def _cycle(graph: Graph, found: Found, taken: Taken) -> Iterator[Reason]:
    """A path that leaves the members and comes back to them, with every other kernel as one op.

    A kernel may lead back from behind the last member: it runs as one, so its first op waits for its last. Hence the
    horizon, behind which nothing leads back.
    """
    members = {op.name for op in found.members}
    horizon = taken.horizon(max(graph.positions[name] for name in members))
    waiting = [op for member in found.members for op in _readers(graph, member) if op.name not in members]
    seen: set[str] = set()
    while waiting:
        op = waiting.pop()
        if op.name in seen or graph.positions[op.name] > horizon:
            continue
        unit = taken.unit(op.name)
        seen.update(unit)
        for reader in (r for name in unit for r in _readers(graph, graph.by_name[name])):
            if reader.name in members:
                yield Reason("cycle", op.name, f"lies between members: {reader.name} needs what comes out of it")
                return
            waiting.append(reader)


def _readers(graph: Graph, op: Op) -> Iterator[Op]:
    return (reader for tensor in op.outputs for reader in graph.users(tensor))


def notes_of(graph: Graph, found: Found) -> tuple[Reason, ...]:
    """Inner tensors that are written all the same, and why."""
    match = Match(graph, found.members, found.tensors)
    names = {op.name for op in found.members}
    noted = []
    for tensor in match.escaping:
        outside = [op for op in graph.users(tensor) if op.name not in names]
        code = "saved" if outside and all(op.phase is Phase.BACKWARD for op in outside) else "escape"
        who = outside[0].name if outside else "the next layer"
        noted.append(Reason(code, who, f"reads %{tensor.name}, so it is still written"))
    return tuple(noted)
