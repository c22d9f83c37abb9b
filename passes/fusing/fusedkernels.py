"""The fused kernels of a program, one record per distinct kernel, with the arithmetic of what each stopped moving."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from stepgraph.ir.graph import Graph, Group
from stepgraph.ir.program import Program, seam_graph, seam_name
from stepgraph.passes.base import Setting
from stepgraph.passes.fusing.programs import seam_counts, template_counts
from stepgraph.passes.profiles import kernels_of
from stepgraph.passes.traffic import Saving, launches, savings


@attrs.frozen
class FusedKernel:
    """A fused kernel as it appears in a program, and what it no longer reads and writes.

    where: the template, or the seam as `left -> right`. times: how often it runs per micro-batch, all stages together
    (in the step: once). launches: of one run; launches_before: of its members by themselves. Units: bytes of one run on
    one rank.
    """

    rule: str
    where: str
    members: tuple[str, ...]
    times: int
    launches: int
    launches_before: int
    savings: tuple[Saving, ...]

    @property
    def saved_bytes(self) -> int:
        """What one run saves."""
        return sum(saving.bytes for saving in self.savings)


def fused_kernels(program: Program, setting: Setting) -> tuple[FusedKernel, ...]:
    """Every distinct fused kernel of a program, templates first, then seams; unused templates left out."""
    return tuple(_found(program, setting))


def _found(program: Program, setting: Setting) -> Iterator[FusedKernel]:
    counts = template_counts(program)
    for graph in (graph for graph in program.templates if counts[graph.name]):
        yield from (_kernel(graph, group, graph.name, counts[graph.name], setting) for group in graph.groups)
    for (left, right), times in seam_counts(program).items():
        spanning = program.groups_between(left, right)
        if spanning:
            joined = seam_graph(program, left, right)
            yield from (_kernel(joined, group, seam_name(left, right), times, setting) for group in spanning)


def _kernel(graph: Graph, group: Group, where: str, times: int, setting: Setting) -> FusedKernel:
    ops = (graph.by_name[name] for name in group.members)
    before = sum(kernels_of(op, setting.profile[op.kind]) for op in ops)
    found = savings(graph, group, setting.profile)
    return FusedKernel(group.rule, where, group.members, times, launches(graph, group, setting.profile), before, found)
