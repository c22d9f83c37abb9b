"""Step costs: a program costed once, then put through the pipeline with any number of micro-batches."""

from __future__ import annotations

import attrs

from stepgraph.ir.program import Program
from stepgraph.passes.base import Setting
from stepgraph.passes.costing import costs
from stepgraph.passes.iteration import Iteration, StageCost, cost_stages, time_step
from stepgraph.passes.iteration import _hops as hops_s
from stepgraph.passes.seating import seat


@attrs.frozen
class StepCost:
    """What a program costs whatever the number of its micro-batches: its stages, and the hops between them.

    Units: seconds; hops: one entry per stage boundary, forwards and backwards.
    """

    stages: tuple[StageCost, ...]
    hops_forward_s: tuple[float, ...]
    hops_backward_s: tuple[float, ...]

    def at(self, microbatches: int) -> Iteration:
        """The step with that many micro-batches. Raises: InputError when the pipeline cannot run them."""
        return time_step(self.stages, microbatches, self.hops_forward_s, self.hops_backward_s)


def step_cost(program: Program, setting: Setting) -> StepCost:
    """Cost a program as `iterate` does: `step_cost(p, s).at(p.microbatches)` is `iterate(p, s)`."""
    setting = seat(setting, program)
    costed = {graph.name: costs(graph, setting) for graph in program.templates}
    forward, backward = hops_s(program, costed, setting)
    return StepCost(cost_stages(program, costed, setting), tuple(forward), tuple(backward))
