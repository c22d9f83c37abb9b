"""The device mesh of a layout, and where every kind of tensor is at home on it.

The ranks of a stage are cut twice: into tp x cp x dp for the dense parts and into etp x ep x edp for experts, both
fastest first (NVIDIA/Megatron-LM megatron/core/parallel_state.py). The atoms of the mesh are what remains when both
cuts are made; a group is a run of atoms. An axis of one rank does not exist: with TP = 1 no TP op can be emitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from math import prod
from types import MappingProxyType

import attrs

from stepgraph.errors import refuse
from stepgraph.ir.tensor import Axis, Place, Placement, Tensor, is_of_experts
from stepgraph.lowering.layout import Layout

DENSE = ("tp", "cp", "dp")
EXPERT = ("etp", "ep", "edp")
"""The two ways to cut the ranks of a stage, fastest axis first."""

PARAM_LETTERS = (("tp", "hfv"),)
"""What a group splits of a parameter: TP its heads, its FFN width or its vocabulary."""

EXPERT_LETTERS = (("ep", "E"), ("etp", "f"))
"""What a group splits of an expert's parameter."""

TOKEN_LETTERS = (("dp", "b"), ("cp", "s"))
"""What a group splits of token ids and labels."""


@attrs.frozen
class Mesh:
    """Axes with more than one rank, outermost first, and the groups that are runs of them.

    groups: atoms of each group by its name (tp, cp, dp, etp, ep, edp, pp), outermost first.
    """

    axes: tuple[Axis, ...]
    groups: MappingProxyType[str, tuple[Axis, ...]] = attrs.field(hash=False)
    sequence_parallel: bool

    @cached_property
    def splitting(self) -> tuple[Axis, ...]:
        """Axes that split tensors: all but the pipeline."""
        return tuple(axis for axis in self.axes if axis.name != "pp")

    def axis(self, name: str) -> Axis | None:
        """The axis of that name, or None when it has one rank."""
        return next((axis for axis in self.axes if axis.name == name), None)

    def runs(self, axes: Iterable[Axis]) -> list[tuple[Axis, ...]]:
        """The axes in groups that one collective may span: those of one declared group together.

        The largest group that holds nothing but these axes comes first.
        """
        left = list(axes)
        found = []
        for group in sorted(self.groups.values(), key=lambda group: -len(group)):
            if len(group) > 1 and all(axis in left for axis in group):
                found.append(group)
                left = [axis for axis in left if axis not in group]
        return found + [(axis,) for axis in left]

    def named(self, axes: tuple[Axis, ...]) -> tuple[tuple[str, str], ...]:
        """The attribute that names the declared group which several atoms are together; none for a single one."""
        span = next((name for name, group in self.groups.items() if len(group) > 1 and group == axes), "")
        return (("span", span),) if span else ()

    def home_of_param(self, param: Tensor) -> Place:
        """Where a parameter lives."""
        return self._split(param.dims, EXPERT_LETTERS if is_of_experts(param) else PARAM_LETTERS)

    def home_of_tokens(self, dims: str) -> Place:
        """Where token ids and labels live."""
        return self._split(dims, TOKEN_LETTERS)

    def home_of_stream(self, dims: str) -> Place:
        """Where the residual stream lives: with sequence parallelism TP splits its tokens too."""
        letters = (*TOKEN_LETTERS, ("tp", "s")) if self.sequence_parallel else TOKEN_LETTERS
        return self._split(dims, letters)

    def home_of_routed(self, dims: str) -> Place:
        """Where tokens live that have been sent to their experts: EP splits experts, what is left splits tokens."""
        experts = {axis.name for axis in self.groups["ep"]}
        kept = [p for p in self.home_of_stream(dims) if p.axis.name not in experts]
        moved = [Placement(axis, dims.index("E")) for axis in self.groups["ep"]]
        return tuple(sorted((*kept, *moved), key=lambda p: -p.axis.stride))

    def _split(self, dims: str, letters: Sequence[tuple[str, str]]) -> Place:
        found = [placement for group, chosen in letters for placement in self._placements(dims, group, chosen)]
        return tuple(sorted(found, key=lambda p: -p.axis.stride))

    def _placements(self, dims: str, group: str, letters: str) -> Iterator[Placement]:
        dim = next((i for i, letter in enumerate(dims) if letter in letters), None)
        if dim is not None:
            yield from (Placement(axis, dim) for axis in self.groups[group])


def mesh_of(layout: Layout) -> Mesh:
    """The mesh of a layout: the atoms of both cuts, strides from the rank order.

    Formula: cut the ranks of a stage at every product of tp, cp, dp and of etp, ep, edp; the ratio of neighbouring
    cuts is an atom. Raises: InputError when the cuts do not nest.
    """
    ranks = layout.tp * layout.cp * layout.dp
    sizes = {"etp": layout.etp, "ep": layout.ep, "edp": ranks // (layout.etp * layout.ep)}
    sizes |= {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp}
    spans = {name: span for names in (DENSE, EXPERT) for name, span in _spans(names, sizes)}
    atoms = _atoms(sorted({edge for span in spans.values() for edge in span}), spans, layout)
    pipeline = (Axis("pp", layout.pp, ranks),) if layout.pp > 1 else ()
    groups = {name: tuple(a for a in reversed(atoms) if span[0] <= a.stride < span[1]) for name, span in spans.items()}
    axes = (*pipeline, *reversed(atoms))
    return Mesh(axes, MappingProxyType({**groups, "pp": pipeline}), bool(layout.sp))


def _spans(names: Sequence[str], sizes: dict[str, int]) -> Iterator[tuple[str, tuple[int, int]]]:
    """From which stride to which each axis of a cut reaches."""
    for i, name in enumerate(names):
        start = prod(sizes[faster] for faster in names[:i])
        yield name, (start, start * sizes[name])


def _atoms(edges: list[int], spans: dict[str, tuple[int, int]], layout: Layout) -> list[Axis]:
    atoms = []
    for start, end in pairwise(edges):
        if end % start:
            raise _do_not_nest(layout)
        atoms.append(Axis(_atom_name(start, end, spans), end // start, start))
    return atoms


def _atom_name(start: int, end: int, spans: dict[str, tuple[int, int]]) -> str:
    """The name of the group that the atom is, or of both groups that it is a part of."""
    within = [name for name in (*DENSE, *EXPERT) if spans[name][0] <= start and end <= spans[name][1]]
    return next((name for name in within if spans[name] == (start, end)), ".".join(within))


def _do_not_nest(layout: Layout) -> Exception:
    what = f"tp {layout.tp} cp {layout.cp} dp {layout.dp} and etp {layout.etp} ep {layout.ep} do not nest"
    fix = "choose ep so that it divides dp, or is a multiple of tp / etp that fits into it"
    return refuse("mesh-nesting", "ep", what, "groups that are unions of whole blocks of ranks", fix)
