"""The text form: one op per line, names and never running numbers, nothing aligned, so that one edit is one line.

    graph NAME
    facts FACT ...                      sorted
    mesh AXIS=SIZE:STRIDE ...           outermost first
    ports enters=%T leaves=%T grad_enters=%T grad_leaves=%T
    inputs
      %T : DTYPE[LETTER/AXIS=SIZE ...] sum(AXIS,...) part(K/N) KIND
    forward | backward | step
      %T : ..., %T : ... = OP_KIND(%T, ...) as NAME FIELDS KEY=VALUE ...
    kernel NAME = OP OP ... rule=RULE launches=COUNT efficiency=PART
    outputs %T ...

FIELDS: at=AXIS:LETTER,... group=AXIS+AXIS of=OP role=ROLE module=MODULE origin=ORIGIN, in this order.
A tensor is described where it enters or is made, with its global sizes and with its kind when that is not the usual one
there (forward act, backward grad, step state), and is named where it is read. Defaults are left out; `as NAME` is left
out when the first output carries the op's name. A kernel line is a fused kernel, its ops by name. What stands after ` ; ` is for people and is not read back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from stepgraph.ir.graph import Graph, Group
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.program import Program, Run, SeamGroups, Stage
from stepgraph.ir.reader import parse, parse_program
from stepgraph.ir.tensor import Axis, Tensor
from stepgraph.ir.words import TextError, attr_key, default_kind, tensor_word, value, word

__all__ = ["dump", "parse", "dump_program", "parse_program", "TextError", "op_line", "op_fields", "kernel_line"]

Columns = Mapping[str, Sequence[object]]
"""Numbers to show beside the ops: by heading, one entry per op in program order."""


def dump(graph: Graph, columns: Columns | None = None) -> str:
    """The graph as text; `parse` gives it back field by field.

    columns: shown after ` ; ` on each op's line, and not read back.
    The graph must be sound: a tensor is the same wherever it stands, and its placements are in mesh order.

    Raises: ValueError when a column does not have one entry per op.
    """
    notes = _notes(len(graph.ops), columns or {})
    return "\n".join([*_header(graph), *_body(graph, notes), *_footer(graph)]) + "\n"


def dump_program(program: Program) -> str:
    """The program as text: stages, seams with the kernels that span them, templates; `parse_program` gives it back."""
    head = [f"program {word(program.name)}"]
    if program.microbatches != 1:
        head.append(f"microbatches {program.microbatches}")
    stages = [_stage(index, stage) for index, stage in enumerate(program.stages)]
    seams = [line for seam in program.seam_groups for line in _seam(seam)]
    return "\n".join(["\n".join([*head, *stages, *seams, ""]), *map(dump, program.templates)])


def op_line(op: Op) -> str:
    """One op as it stands in the text: outputs described, operands named."""
    made = ", ".join(f"{tensor_word(t.name)} : {described(t, op.phase)}" for t in op.outputs)
    call = f"{word(op.kind)}({', '.join(tensor_word(t.name) for t in op.inputs)})"
    name = "" if op.outputs and op.outputs[0].name == op.name else f" as {word(op.name)}"
    fields = "".join(f" {key}={text}" for key, text in op_fields(op))
    return f"{made} = {call}{name}{fields}" if made else f"{call}{name}{fields}"


def op_fields(op: Op) -> tuple[tuple[str, str], ...]:
    """Fields and attributes that are not at their defaults, as (name, text), in the order of the line."""
    splits = ",".join(f"{word(axis)}:{letter if letter == '+' else word(letter)}" for axis, letter in op.at)
    group = "+".join(word(axis.name) for axis in op.group)
    names = (("of", op.of), ("role", op.role), ("module", op.module), ("origin", op.origin))
    fields = [("at", splits), ("group", group), *((key, word(text)) for key, text in names if text)]
    return (*((k, v) for k, v in fields if v), *((attr_key(k), value(v)) for k, v in op.attrs))


def kernel_line(group: Group) -> str:
    """One fused kernel as it stands in the text: its ops by name, and what is not at its default."""
    members = "".join(f" {word(name)}" for name in group.members)
    rule = f" rule={word(group.rule)}" if group.rule else ""
    launches = f" launches={group.kernels}" if group.kernels != 1 else ""
    efficiency = f" efficiency={value(float(group.efficiency))}" if group.efficiency != 1 else ""
    return f"kernel {word(group.name)} ={members}{rule}{launches}{efficiency}"


def described(tensor: Tensor, phase: Phase | None = None) -> str:
    """A tensor's description: `bf16[b/dp=4 s=4096] sum(tp)`, and its kind unless it is usual for what `phase` makes."""
    dims = " ".join(_dim(tensor, i) for i in range(len(tensor.dims)))
    pending = ",".join(word(p.axis.name) for p in tensor.place if p.dim is None)
    usual = phase is not None and tensor.kind is default_kind(phase)
    part = "" if tensor.fraction == (1, 1) else f" part({tensor.fraction[0]}/{tensor.fraction[1]})"
    return f"{word(tensor.dtype)}[{dims}]" + (f" sum({pending})" if pending else "") + part + _kind(tensor, usual)


def entering(graph: Graph) -> tuple[Tensor, ...]:
    """Tensors that the graph does not make: read by an op, or handed straight to the outputs."""
    read = {t.name: t for t in graph.inputs}
    through = {t.name: t for t in graph.outputs if t.name not in graph.producers}
    return tuple({**through, **read}[name] for name in {**read, **through})


def mesh(graph: Graph) -> tuple[Axis, ...]:
    """Mesh axes of everything that the text describes, outermost first."""
    known = {axis.name: axis for axis in graph.axes}
    more = {p.axis.name: p.axis for t in graph.outputs for p in t.place}
    return tuple(sorted({**more, **known}.values(), key=lambda axis: -axis.stride))


def header_fields(graph: Graph) -> tuple[tuple[str, str], ...]:
    """Lines above the ops that are not empty, as (keyword, text)."""
    axes = " ".join(f"{word(axis.name)}={axis.size}:{axis.stride}" for axis in mesh(graph))
    named = [(field.name, getattr(graph.ports, field.name)) for field in attrs.fields(type(graph.ports))]
    ports = " ".join(f"{key}={tensor_word(name)}" for key, name in named if name)
    facts = " ".join(word(fact) for fact in sorted(graph.facts))
    fields = (("graph", word(graph.name)), ("facts", facts), ("mesh", axes), ("ports", ports))
    return tuple((key, text) for key, text in fields if text)


def _header(graph: Graph) -> Iterator[str]:
    for key, text in header_fields(graph):
        yield f"{key} {text}"
    tensors = entering(graph)
    if tensors:
        yield "inputs"
    for tensor in tensors:
        yield f"  {tensor_word(tensor.name)} : {described(tensor)}"


def _body(graph: Graph, notes: Sequence[str]) -> Iterator[str]:
    phase = None
    for op, note in zip(graph.ops, notes, strict=True):
        if op.phase is not phase:
            yield op.phase.value
        phase = op.phase
        yield f"  {op_line(op)}{note}"


def _footer(graph: Graph) -> Iterator[str]:
    yield from map(kernel_line, graph.groups)
    if graph.outputs:
        yield f"outputs {' '.join(tensor_word(t.name) for t in graph.outputs)}"


def _notes(n_ops: int, columns: Columns) -> list[str]:
    for heading, entries in columns.items():
        if len(entries) != n_ops:
            raise ValueError(f"column {heading!r} has {len(entries)} entries; expected one per op: {n_ops}")
    if not columns:
        return [""] * n_ops
    return [" ; " + " ".join(f"{key}={_flat(column[i])}" for key, column in columns.items()) for i in range(n_ops)]


def _flat(entry: object) -> str:
    # a line break inside an entry would start a line of its own, which would be read back
    return " ".join(str(entry).split())


def _dim(tensor: Tensor, index: int) -> str:
    splits = "".join(f"/{word(p.axis.name)}" for p in tensor.place if p.dim == index)
    return f"{word(tensor.dims[index])}{splits}={tensor.shape[index]}"


def _kind(tensor: Tensor, usual: bool) -> str:
    return "" if usual else f" {tensor.kind.value}"


def _stage(index: int, stage: Stage) -> str:
    runs = ", ".join(map(_run, stage.runs))
    rank = "" if stage.rank == index else f" rank {stage.rank}"
    return f"stage {index}{rank}:{' ' + runs if runs else ''} | {word(stage.step)}"


def _seam(seam: SeamGroups) -> Iterator[str]:
    yield f"seam {word(seam.left)} {word(seam.right)}"
    yield from (f"  {kernel_line(group)}" for group in seam.groups)


def _run(run: Run) -> str:
    return word(run.template) + (f" x {run.count}" if run.count != 1 else "")
