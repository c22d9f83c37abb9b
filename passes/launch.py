"""kernels: how many a block launches (kappa), and what the launches cost.

Source: How to Think About Asymptotic Times, section 8: T_kl = L kappa t_launch.
"""

from __future__ import annotations

import attrs

from stepgraph.hwtargets.target import Target
from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Phase
from stepgraph.passes.profiles import Profile, kernels_of


@attrs.frozen
class Kappa:
    """Kernels that one execution of a template launches, by phase."""

    forward: int
    backward: int
    step: int

    @property
    def total(self) -> int:
        """Kernels of all phases together."""
        return self.forward + self.backward + self.step


def kappa(graph: Graph, profile: Profile) -> Kappa:
    """Count the kernels of a template; collectives and point-to-point calls are kernels too."""
    counts = dict.fromkeys(Phase, 0)
    for op in graph.ops:
        counts[op.phase] += kernels_of(op, profile[op.kind])
    return Kappa(counts[Phase.FORWARD], counts[Phase.BACKWARD], counts[Phase.STEP])


def launch_s(kernels: int, target: Target) -> float:
    """The additive launch tax: kernels x the device gap of the target."""
    return kernels * target.launch.gap_s
