"""Random graphs for property tests: sound in structure, unusual in names and values.

Names are unique, every tensor is made before it is read, phases stand in order, sizes divide over their axes, and a
backward op belongs to a forward op. Kinds are rows of the op table that count no FLOPs; loop nests are not obeyed.
"""

from __future__ import annotations

from math import prod

import attrs
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from stepgraph.ir.graph import Graph, Group, Ports
from stepgraph.ir.op import Attr, Op, Phase
from stepgraph.ir.program import Program, Run, SeamGroups, Stage
from stepgraph.ir.rows import Flops
from stepgraph.ir.table import ROWS
from stepgraph.ir.tensor import Axis, Kind, Place, Placement, Tensor

AXES = ("pp", "dp", "ep", "cp", "tp", "odd axis", "a+b", "x/y", "sum")
KINDS = tuple(row.kind for row in ROWS if row.flops is Flops.NONE)
PLAIN = st.text("abcXYZ019_.#-", min_size=1, max_size=6)
ODD = st.text(' "\\%()[]=,;:+/|\n\tλé\u2028x.', min_size=1, max_size=6)
WORDS = (
    "true",
    "inf",
    "nan",
    "-1",
    "1e5",
    "1e+16",
    "007",
    "as",
    "of",
    "kind",
    "sum",
    "rule",
    "kernel",
    "forward",
    "graph",
    "x",
    "-",
    ".5",
)


def names() -> SearchStrategy[str]:
    """Names: plain, with every sign that means something in the text form, and words that it uses itself."""
    return st.one_of(PLAIN, PLAIN, ODD, st.sampled_from(WORDS))


def texts() -> SearchStrategy[str]:
    """Names, or nothing."""
    return st.one_of(st.just(""), names())


def attr_values() -> SearchStrategy[Attr]:
    """Values of attributes of every type."""
    return st.one_of(st.integers(), st.floats(allow_nan=False), texts(), st.text(max_size=8), st.booleans())


@st.composite
def meshes(draw: DrawFn) -> tuple[Axis, ...]:
    """Up to four axes, outermost first; strides are products of the sizes further in."""
    chosen = draw(st.lists(st.sampled_from(AXES), max_size=4, unique=True))
    axes: list[Axis] = []
    stride = 1
    for name in chosen:
        size = draw(st.sampled_from((2, 3, 8)))
        axes.append(Axis(name, size, stride))
        stride *= size
    return tuple(reversed(axes))


@st.composite
def tensors(draw: DrawFn, mesh: tuple[Axis, ...], name: str) -> Tensor:
    """A tensor of up to four dimensions over some axes of the mesh; letters may repeat."""
    dims = draw(st.text("bsdhcft+=]λ", max_size=4))
    place: Place = ()
    for axis in mesh:
        dim = draw(st.sampled_from(("absent", None, *range(len(dims)))))
        place += () if isinstance(dim, str) else (Placement(axis, dim),)
    ways = [prod(p.axis.size for p in place if p.dim == i) for i in range(len(dims))]
    shape = tuple(draw(st.integers(1, 64)) * way for way in ways)
    dtype = draw(st.sampled_from(("bf16", "fp32", "fp8", "int64")))
    fraction = draw(st.sampled_from(((1, 1), (8, 64), (2, 3))))
    return Tensor(name, dims, shape, dtype, draw(st.sampled_from(Kind)), place, fraction)


@st.composite
def ops(draw: DrawFn, mesh: tuple[Axis, ...], name: str, known: list[Tensor], made: list[str], phase: Phase) -> Op:
    """An op that reads known tensors and makes those named in `made`."""
    reads = draw(st.lists(st.sampled_from(known), max_size=4)) if known else []
    outputs = tuple(draw(tensors(mesh, output)) for output in made)
    pairs = draw(st.dictionaries(names(), attr_values(), max_size=3))
    some = st.lists(st.sampled_from(mesh), max_size=3, unique=True) if mesh else st.just([])
    group, split = tuple(draw(some)), draw(some)
    at = tuple((axis.name, draw(st.sampled_from(("h", "d", "+", "=", "λ")))) for axis in split)
    role, module, origin = draw(texts()), draw(texts()), draw(texts())
    kind = draw(st.sampled_from(KINDS))
    return Op(
        name, kind, tuple(reads), outputs, tuple(sorted(pairs.items())), at, phase, "", role, group, module, origin
    )


@st.composite
def graphs(draw: DrawFn, max_ops: int = 6) -> Graph:
    """A graph with forward, backward and step ops, several outputs per op or none, and outputs that pass through."""
    mesh = draw(meshes())
    pool = draw(st.lists(names(), min_size=4 + 3 * max_ops, max_size=4 + 3 * max_ops, unique=True))
    known = [draw(tensors(mesh, pool.pop())) for _ in range(draw(st.integers(0, 3)))]
    phases = sorted(draw(st.lists(st.sampled_from(Phase), max_size=max_ops)), key=list(Phase).index)
    made: list[Op] = []
    for phase in phases:
        name = pool.pop()
        first = [name] if draw(st.booleans()) else []
        outputs = first + [pool.pop() for _ in range(draw(st.integers(0, 2)))]
        op = draw(ops(mesh, name, known, outputs, phase))
        made.append(_belonging(draw, op, made))
        known = [*known, *op.outputs]
    return _finished(draw, tuple(made), known)


def _belonging(draw: DrawFn, op: Op, before: list[Op]) -> Op:
    forward = [other.name for other in before if other.phase is Phase.FORWARD]
    if op.phase is not Phase.BACKWARD or not forward:
        return op
    return attrs.evolve(op, of=draw(st.sampled_from(forward)))


def _finished(draw: DrawFn, made: tuple[Op, ...], known: list[Tensor]) -> Graph:
    some = st.lists(st.sampled_from(known), max_size=3, unique_by=lambda t: t.name) if known else st.just([])
    port = st.one_of(st.just(""), st.sampled_from([t.name for t in known])) if known else st.just("")
    ports = Ports(*(draw(port) for _ in attrs.fields(Ports)))
    facts = draw(st.frozensets(names(), max_size=3))
    return Graph(draw(names()), made, tuple(draw(some)), ports, facts, draw(groups([op.name for op in made])))


@st.composite
def groups(draw: DrawFn, members: list[str]) -> tuple[Group, ...]:
    """Disjoint groups of some members, in their order; whether they may be fused is not asked."""
    labels = draw(st.lists(names(), max_size=3, unique=True))
    chosen = [draw(st.sampled_from((None, *labels))) for _ in members]
    held = [
        (label, tuple(name for name, into in zip(members, chosen, strict=True) if into == label)) for label in labels
    ]
    return tuple(draw(_groups(label, inside)) for label, inside in held if inside)


def _groups(name: str, members: tuple[str, ...]) -> SearchStrategy[Group]:
    rate = st.floats(0, 1, exclude_min=True)
    return st.builds(Group, st.just(name), texts(), st.just(members), st.integers(1, 4), st.one_of(st.just(1.0), rate))


@st.composite
def seams(draw: DrawFn) -> SeamGroups:
    """Groups of members with any names between two templates, known or not."""
    left, right = draw(names()), draw(names())
    return SeamGroups(left, right, draw(groups(draw(st.lists(names(), max_size=4, unique=True)))))


@st.composite
def programs(draw: DrawFn) -> Program:
    """A program of small templates; its stages name templates, known or not."""
    templates = draw(st.lists(graphs(2), max_size=2, unique_by=lambda graph: graph.name))
    template = st.one_of(names(), st.sampled_from([g.name for g in templates])) if templates else names()
    run = st.builds(Run, template, st.integers(1, 80))
    stages = st.lists(st.builds(Stage, st.lists(run, max_size=3).map(tuple), texts(), st.integers(0, 3)), max_size=3)
    spanning = tuple(draw(st.lists(seams(), max_size=2)))
    return Program(draw(names()), tuple(templates), tuple(draw(stages)), draw(st.integers(1, 64)), spanning)
