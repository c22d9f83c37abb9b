"""Programs: a layer is a graph, lowered once; a stage is a run-length list of layers.

Between two neighbours lies a seam, where a kernel may span both. Totals of a stage are sums over its layers (and
seams); `unroll` writes the same stage out as one long graph, and the two agree.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType

import attrs

from stepgraph.errors import did_you_mean, refuse
from stepgraph.ir.graph import Graph, Group
from stepgraph.ir.joining import LEFT, RIGHT, joined, prefixed, respanned


@attrs.frozen
class Run:
    """`count` equal templates in a row."""

    template: str
    count: int = 1


@attrs.frozen
class Seam:
    """Where `left` hands the stream to `right`, `count` times in a stage."""

    left: str
    right: str
    count: int


@attrs.frozen
class SeamGroups:
    """Fused kernels that span the seam between two templates.

    Members are named as in the seam's graph, `left.x` and `right.y`. So may the group be; written out, its name is
    changed as theirs are, and a name without a prefix gets that of the left layer.
    """

    left: str
    right: str
    groups: tuple[Group, ...]


@attrs.frozen
class Stage:
    """What a pipeline rank runs per micro-batch, in order, and the template that it runs once per step.

    rank: which pipeline rank; the virtual stages of one rank (its chunks) all name it.
    """

    runs: tuple[Run, ...]
    step: str
    rank: int = 0

    @property
    def instances(self) -> tuple[str, ...]:
        """Template names in order, written out."""
        return tuple(run.template for run in self.runs for _ in range(run.count))

    @property
    def seams(self) -> tuple[Seam, ...]:
        """Adjacent pairs with their counts: inside a run of n layers there are n - 1."""
        found: dict[tuple[str, str], int] = {}
        for run in self.runs:
            if run.count > 1:
                found[run.template, run.template] = found.get((run.template, run.template), 0) + run.count - 1
        for left, right in pairwise(self.runs):
            found[left.template, right.template] = found.get((left.template, right.template), 0) + 1
        return tuple(Seam(left, right, count) for (left, right), count in found.items())


def shown_runs(runs: Sequence[Run]) -> str:
    """Runs as people read them: `embedding, dense x 10, send`; a repeating pattern is written once, with its count."""
    if len(runs) < 3:
        return ", ".join(map(_shown_run, runs))
    first, *middle, last = runs
    for period in range(2, len(middle) // 2 + 1):
        times, rest = divmod(len(middle), period)
        if middle == (middle[:period] * (times + 1))[: len(middle)]:
            inner = ", ".join(map(_shown_run, middle[:period]))
            return ", ".join((_shown_run(first), f"({inner}) x {times}", *map(_shown_run, (*middle[:rest], last))))
    return ", ".join(_shown_run(run) for run in runs)


def _shown_run(run: Run) -> str:
    return run.template + (f" x {run.count}" if run.count > 1 else "")


@attrs.frozen
class Program:
    """One training step: templates and the stages that run them.

    stages: in the order in which the stream passes them, stage v on the rank that it names.
    microbatches: how often per step a stage runs its templates; the step template runs once. seam_groups: kernels
    that span two neighbouring layers. schedule: the pipeline, one of `stepgraph.ir.pipelines`.
    """

    name: str
    templates: tuple[Graph, ...]
    stages: tuple[Stage, ...]
    microbatches: int = 1
    seam_groups: tuple[SeamGroups, ...] = ()
    schedule: str = "1f1b"

    @cached_property
    def by_name(self) -> MappingProxyType[str, Graph]:
        """Templates by name."""
        return MappingProxyType({graph.name: graph for graph in self.templates})

    def __getitem__(self, name: str) -> Graph:
        """The template of that name. Raises: KeyError with a suggestion."""
        graph = self.by_name.get(name)
        if graph is None:
            raise KeyError(f"no template {name!r}; {did_you_mean(name, self.by_name)}")
        return graph

    def chunks_of(self, rank: int) -> tuple[Stage, ...]:
        """The stages that a pipeline rank runs, in the order of the stream; one unless the pipeline is interleaved."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    def groups_between(self, left: str, right: str) -> tuple[Group, ...]:
        """The kernels that span the seam of two templates, named as in the seam's graph."""
        found = [seam.groups for seam in self.seam_groups if (seam.left, seam.right) == (left, right)]
        return tuple(group for groups in found for group in groups)

    def unroll(self, stage: int = 0) -> Graph:
        """One stage as one long graph: forward of all its layers, backward in reverse, then the step."""
        return unroll(self, self.stages[stage], f"{self.name}.stage{stage}")


def unroll(program: Program, stage: Stage, name: str) -> Graph:
    """Write a stage out: every layer under its own prefix, streams and gradients joined at the seams.

    Kernels come along: those of the templates once per layer, those of a seam once per adjacent pair. A table that both
    ends share appears once per end, each with its part of the gradient.
    """
    prefixes = [f"L{i}." for i in range(len(stage.instances))]
    layers = [prefixed(program[t], prefix) for t, prefix in zip(stage.instances, prefixes, strict=True)]
    spanning = [
        respanned(group, before, after)
        for (left, right), (before, after) in zip(pairwise(stage.instances), pairwise(prefixes), strict=True)
        for group in program.groups_between(left, right)
    ]
    return joined(name, layers, spanning, program[stage.step])


def seam_name(left: str, right: str) -> str:
    """What a seam is called: `left -> right`."""
    return f"{left} -> {right}"


def seam_graph(program: Program, left: str, right: str) -> Graph:
    """Two neighbouring layers as one graph, which is where a kernel that spans both is looked for and measured.

    Ops, tensors and kernels of the templates have the prefixes LEFT and RIGHT, also when both are one template. The
    kernels of this seam that the program has already are there too, under their own names.

    Raises: KeyError for an unknown template; InputError (no-seam) when the left one hands nothing to the right one.
    """
    return seam_graphs(program, [(left, right)])[left, right]


def seam_graphs(program: Program, pairs: Collection[tuple[str, str]]) -> dict[tuple[str, str], Graph]:
    """The graphs of several seams, as `seam_graph` makes them; each layer is prefixed once per side."""
    sides: dict[tuple[str, str], Graph] = {}
    for pair in pairs:
        for name, prefix in zip(pair, (LEFT, RIGHT), strict=True):
            if (name, prefix) not in sides:
                sides[name, prefix] = prefixed(program[name], prefix)
    return {pair: _seam(program, pair, [sides[pair[0], LEFT], sides[pair[1], RIGHT]]) for pair in pairs}


def _seam(program: Program, pair: tuple[str, str], layers: list[Graph]) -> Graph:
    left, right = pair
    name = seam_name(left, right)
    if not (layers[0].ports.leaves and layers[1].ports.enters):
        raise refuse("no-seam", name, f"no stream leaves {left} and enters {right}", "templates that can be neighbours")
    return joined(name, layers, program.groups_between(left, right), None)
