"""fuse: kernels for a graph, or for a whole program with the seams between its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import TypeVar

import attrs

from stepgraph.ir.graph import Graph, Group
from stepgraph.ir.joining import LEFT, RIGHT
from stepgraph.ir.program import Program, SeamGroups, seam_graphs
from stepgraph.ir.rewriting import Rewrite
from stepgraph.passes.fusing.findings import kinds_handed_over
from stepgraph.passes.fusing.grouping import (
    AnyRule,
    Bench,
    FusionReport,
    Site,
    fuse_graph,
    relower_site,
    summarise,
    try_rule,
    unfuse_graph,
)

Pair = tuple[str, str]
"""Names of two templates that are neighbours."""

T = TypeVar("T", Graph, Program)


def fuse(target: T, rules: Sequence[AnyRule]) -> tuple[T, FusionReport]:
    """Group the ops of every legal match of every rule, first rule first.

    target: a graph, or a program: then kernels may also span one seam between neighbouring layers, and the report
    counts as if all stages were written out (one rank each, one micro-batch). Nothing is replaced: `unfuse` gives back
    exactly what was there.
    """
    if isinstance(target, Graph):
        graph, sites = fuse_graph(target, rules)
        return graph, summarise(rules, sites)
    program, sites = _fuse_program(target, rules)
    return program, summarise(rules, sites)


def _fuse_program(program: Program, rules: Sequence[AnyRule]) -> tuple[Program, list[Site]]:
    """Rule by rule, first inside the layers and then across the seams: an earlier rule has the first choice."""
    counts, seams = template_counts(program), seam_counts(program)
    floor = Floor(program, seams)
    sites: list[Site] = []
    for rule in rules:
        if isinstance(rule, Rewrite):
            sites.append(relower_site(rule))
            continue
        for name, bench in floor.layers.items():
            sites.extend(attrs.evolve(site, times=counts[name], templates=(name,)) for site in try_rule(bench, rule))
        for pair, bench in floor.seams.items():
            sites.extend(attrs.evolve(site, times=seams[pair], templates=pair) for site in try_rule(bench, rule))
    return floor.fused(), sites


class Floor:
    """A bench for every layer and every seam of a program, each told which of its ops the others have taken.

    What one neighbour takes is taken wherever the layer stands, also where it has other neighbours: a layer is one
    graph. So kernels of all seams fit together when the stages are written out.
    """

    def __init__(self, program: Program, pairs: Collection[Pair]) -> None:
        self.program = program
        plain = attrs.evolve(program, seam_groups=())
        joined = seam_graphs(plain, pairs)
        sent = kinds_handed_over(joined.values())
        before, after = _makers(plain, pairs, 1), _makers(plain, pairs, 0)
        self.layers = {
            graph.name: Bench(graph, handed_over=sent, heard=partial(self._inside, graph.name))
            for graph in program.templates
        }
        self.seams = {
            pair: Bench(
                graph,
                spanning=True,
                repeated=pair[0] == pair[1],
                handed_over=sent,
                beyond={
                    LEFT + program[pair[0]].ports.enters: before.get(pair[0], frozenset()),
                    RIGHT + program[pair[1]].ports.grad_enters: after.get(pair[1], frozenset()),
                },
                heard=partial(self._across, pair),
            )
            for pair, graph in joined.items()
        }
        for graph in program.templates:
            for group in graph.groups:
                self._inside(graph.name, group)
        for seam in program.seam_groups:
            pair = seam.left, seam.right
            for group in seam.groups if pair in self.seams else ():
                self.seams[pair].taken.add(group)
                self._across(pair, group)

    def _inside(self, name: str, group: Group) -> None:
        """A kernel inside a layer is one in all its seams."""
        for (left, right), bench in self.seams.items():
            if left == name:
                bench.taken.add(_renamed(group, LEFT))
            if right == name:
                bench.taken.add(_renamed(group, RIGHT))

    def _across(self, pair: Pair, group: Group) -> None:
        """A kernel across a seam takes ops of two layers, wherever else these stand."""
        self._take_side(pair[0], _side(group, LEFT, "after"), RIGHT)
        self._take_side(pair[1], _side(group, RIGHT, "before"), LEFT)

    def _take_side(self, name: str, part: Group, side: str) -> None:
        """Note a layer's part of a kernel across one of its seams in the layer, and in the seams on its other side."""
        self.layers[name].taken.add(part)
        for pair, bench in self.seams.items():
            if pair[side == RIGHT] == name:
                bench.taken.add(_renamed(part, side))

    def fused(self) -> Program:
        """The program with its new kernels; the same object where there are none."""
        if not any(bench.made for bench in (*self.layers.values(), *self.seams.values())):
            return self.program
        known = {(seam.left, seam.right): seam.groups for seam in self.program.seam_groups}
        new = {pair: tuple(bench.made) for pair, bench in self.seams.items()}
        groups = {pair: known.get(pair, ()) + new.get(pair, ()) for pair in (*known, *new)}
        return attrs.evolve(
            self.program,
            templates=tuple(bench.fused for bench in self.layers.values()),
            seam_groups=tuple(SeamGroups(*pair, made) for pair, made in groups.items() if made),
        )


def _renamed(group: Group, prefix: str) -> Group:
    members = tuple(prefix + member for member in group.members)
    return attrs.evolve(group, name=prefix + group.name, members=members)


def _side(group: Group, prefix: str, where: str) -> Group:
    """What a kernel across a seam has of the layer on one side."""
    members = tuple(member.removeprefix(prefix) for member in group.members if member.startswith(prefix))
    return attrs.evolve(group, name=f"{group.name} (across the seam {where})", members=members)


def _makers(program: Program, pairs: Iterable[Pair], side: int) -> dict[str, frozenset[str]]:
    """By template: kinds that make the stream that its neighbours before it hand it, or with side 0 the gradient."""
    found: dict[str, frozenset[str]] = {}
    for pair in pairs:
        neighbour = program[pair[1 - side]]
        maker = neighbour.producers.get(neighbour.ports.leaves if side else neighbour.ports.grad_leaves)
        if maker is not None:
            found[pair[side]] = found.get(pair[side], frozenset()) | {maker.kind}
    return found


def template_counts(program: Program) -> Counter[str]:
    """How often each template runs in all stages together, per micro-batch; step templates once per stage."""
    counts: Counter[str] = Counter()
    for stage in program.stages:
        counts.update({stage.step: 1})
        for run in stage.runs:
            counts[run.template] += run.count
    return counts


def seam_counts(program: Program) -> dict[tuple[str, str], int]:
    """How often each pair of templates are neighbours, in all stages together."""
    counts: dict[tuple[str, str], int] = {}
    for stage in program.stages:
        for seam in stage.seams:
            counts[seam.left, seam.right] = counts.get((seam.left, seam.right), 0) + seam.count
    return counts


def unfuse(target: T, *rules: str) -> T:
    """A graph or program without the kernels of the named rules, or without any: exactly what it was before."""
    return unfuse_graph(target, *rules) if isinstance(target, Graph) else _unfuse_program(target, *rules)


def _unfuse_program(program: Program, *rules: str) -> Program:
    templates = tuple(unfuse_graph(graph, *rules) for graph in program.templates)
    seams = tuple(
        attrs.evolve(seam, groups=tuple(group for group in seam.groups if rules and group.rule not in rules))
        for seam in program.seam_groups
    )
    return attrs.evolve(program, templates=templates, seam_groups=tuple(seam for seam in seams if seam.groups))
