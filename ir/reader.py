"""Reading the text form back: text to graphs and programs. The form itself is told in `text`.

Definitions are collected first and reads are resolved last, so a text in a wrong order is still read: whether a graph
is sound is for the verifier to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import attrs

from stepgraph.errors import did_you_mean
from stepgraph.ir.graph import Graph, Group, Ports
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.pieces import Made, Read, kernel_line, made_tensor, new_axis, one_of, op_line, read_tensor, until_end
from stepgraph.ir.program import Program, Run, SeamGroups, Stage
from stepgraph.ir.tensor import Axis, Tensor
from stepgraph.ir.words import Line, TextError

T = TypeVar("T")

_PHASES = tuple(phase.value for phase in Phase)
_PORTS = tuple(field.name for field in attrs.fields(Ports))
_HEADS = ("graph", "facts", "mesh", "ports", "inputs", *_PHASES, "kernel", "outputs")


def parse(text: str) -> Graph:
    """The graph that `dump` wrote.

    Raises: TextError with the line, its number and what was expected there.
    """
    return _graph(_lines(text, "'graph NAME'"))


def parse_program(text: str) -> Program:
    """The program that `dump_program` wrote.

    Raises: TextError with the line, its number and what was expected there.
    """
    lines = _lines(text, "'program NAME'")
    name = _title(lines[0], "program")
    starts = [i for i, line in enumerate(lines) if _begins_graph(line)] + [len(lines)]
    head = _ProgramHead()
    for line in lines[1 : starts[0]]:
        _take_program_line(head, line)
    templates = tuple(_graph(lines[i:j]) for i, j in pairwise(starts))
    return Program(name, templates, tuple(head.stages), head.microbatches, tuple(head.seams))


@attrs.define
class _Draft:
    """A graph while it is being read."""

    name: str
    facts: frozenset[str] = frozenset()
    axes: dict[str, Axis] = attrs.Factory(dict)
    ports: Ports = attrs.Factory(Ports)
    tensors: dict[str, Tensor] = attrs.Factory(dict)
    ops: list[tuple[Op, tuple[Read, ...]]] = attrs.Factory(list)
    groups: list[Group] = attrs.Factory(list)
    outputs: tuple[Read, ...] = ()
    section: str = ""

    def define(self, made: Made) -> None:
        """Remember a tensor. Raises: TextError when it is defined already."""
        if made.tensor.name in self.tensors:
            raise made.line.error("a tensor that nothing above defines", made.column)
        self.tensors[made.tensor.name] = made.tensor

    def finish(self) -> Graph:
        """Resolve what is read. Raises: TextError for a tensor that nothing defines."""
        ops = tuple(attrs.evolve(op, inputs=self._resolved(reads)) for op, reads in self.ops)
        return Graph(self.name, ops, self._resolved(self.outputs), self.ports, self.facts, tuple(self.groups))

    def _resolved(self, reads: tuple[Read, ...]) -> tuple[Tensor, ...]:
        for read in reads:
            if read.name not in self.tensors:
                raise read.line.error(f"a tensor that enters or is made in this graph{self._hint(read)}", read.column)
        return tuple(self.tensors[read.name] for read in reads)

    def _hint(self, read: Read) -> str:
        hint = did_you_mean(read.name, self.tensors)
        return f" ({hint})" if hint.startswith("did you mean") else ""  # a list of all tensors would help nobody


def _lines(text: str, first: str) -> list[Line]:
    """Lines that say something."""
    lines = [Line(number, line) for number, line in enumerate(text.split("\n"), 1)]
    lines = [line for line in lines if not line.done()]
    if not lines:
        raise TextError(1, "", first)
    return lines


def _head(line: Line, heads: tuple[str, ...]) -> str | None:
    """Read the keyword that the line begins with; an op's kind is followed by its bracket, so it is none."""
    for head in heads:
        if line.accept_word(head):
            if not line.ahead("("):
                return head
            line.column = 0
    return None


def _begins_graph(line: Line) -> bool:
    found = _head(line, ("graph",)) is not None
    line.column = 0
    return found


def _title(line: Line, keyword: str) -> str:
    if _head(line, (keyword,)) is None:
        raise line.error(f"'{keyword} NAME'")
    return _whole(line, lambda: line.word(f"the {keyword}'s name"))


def _whole(line: Line, read: Callable[[], T]) -> T:
    """Read something that ends with the line."""
    found = read()
    line.need_end()
    return found


def _graph(lines: Sequence[Line]) -> Graph:
    draft = _Draft(_title(lines[0], "graph"))
    for line in lines[1:]:
        _take(draft, line)
    return draft.finish()


def _take(draft: _Draft, line: Line) -> None:
    head = _head(line, _HEADS)
    if head is None:
        _take_item(draft, line)
    elif head == "graph":
        raise line.error("one graph only", 0)
    elif head in ("inputs", *_PHASES):
        draft.section = _whole(line, lambda: head)
    elif head == "kernel":
        draft.groups.append(kernel_line(line))
    else:
        _take_header(draft, line, head)


def _take_header(draft: _Draft, line: Line, head: str) -> None:
    if head == "facts":
        draft.facts = frozenset(until_end(line, lambda: line.word("a fact")))
    elif head == "mesh":
        draft.axes = {axis.name: axis for axis in until_end(line, lambda: new_axis(line))}
    elif head == "ports":
        draft.ports = attrs.evolve(draft.ports, **dict(until_end(line, lambda: _port(line))))
    else:
        draft.outputs = until_end(line, lambda: read_tensor(line))


def _take_item(draft: _Draft, line: Line) -> None:
    if not draft.section:
        raise line.error(f"one of: {', '.join(_HEADS[1:])}")
    if draft.section == "inputs":
        draft.define(_whole(line, lambda: made_tensor(line, draft.axes, None)))
        return
    found = op_line(line, draft.axes, Phase(draft.section))
    for made in found.made:
        draft.define(made)
    draft.ops.append((found.op, found.reads))


def _port(line: Line) -> tuple[str, str]:
    key = one_of(line, _PORTS, "a port")
    line.need("=")
    return key, line.tensor_word()


@attrs.define
class _ProgramHead:
    """What stands above a program's templates, while it is being read."""

    microbatches: int = 1
    stages: list[Stage] = attrs.Factory(list)
    seams: list[SeamGroups] = attrs.Factory(list)


_PROGRAM_HEADS = ("microbatches", "stage", "seam", "kernel")


def _take_program_line(head: _ProgramHead, line: Line) -> None:
    keyword = _head(line, _PROGRAM_HEADS)
    if keyword is None:
        raise line.error(f"one of: {', '.join(_PROGRAM_HEADS)}, graph")
    if keyword == "stage":
        head.stages.append(_stage(line, len(head.stages)))
    elif keyword == "seam":
        head.seams.append(SeamGroups(line.word("the left template"), line.word("the right template"), ()))
    elif keyword == "kernel":
        _take_seam_kernel(head, line)
    else:
        head.microbatches = line.integer("how many micro-batches")
    line.need_end()


def _take_seam_kernel(head: _ProgramHead, line: Line) -> None:
    if not head.seams:
        raise line.error("'seam LEFT RIGHT' above a kernel", 0)
    seam = head.seams[-1]
    head.seams[-1] = attrs.evolve(seam, groups=(*seam.groups, kernel_line(line)))


def _stage(line: Line, index: int) -> Stage:
    column = line.here()
    if line.integer("the stage's number") != index:
        raise line.error(f"stage {index}", column)
    rank = line.integer("the pipeline rank that runs it") if line.accept_word("rank") else index
    line.need(":")
    runs = () if line.ahead("|") else line.listed(lambda: _run(line), ",")
    line.need("|")
    return Stage(runs, line.word("the step template"), rank)


def _run(line: Line) -> Run:
    template = line.word("a template's name")
    return Run(template, line.integer("how many in a row") if line.accept_word("x") else 1)
