"""launch: how many kernels a block launches (kappa), and what the launches cost: gaps on the device, and a host floor.

Source: How to Think About Asymptotic Times, section 8, for the additive tax: T_kl = L kappa t_launch.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np
from numpy.typing import ArrayLike

from stepgraph.errors import did_you_mean, refuse
from stepgraph.hwtargets.target import Target
from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Phase
from stepgraph.passes.profiles import Profile, kernels_of

LAUNCHES = ("additive", "host", "both")
"""Launch models by name: a gap per kernel on the device, a floor from the host's queue, or both."""


@attrs.frozen
class Launching:
    """What launches cost under one model on one target.

    gap_s: device seconds added to every kernel. issue_s: host seconds to issue one kernel; the device idles when it is
    done with all that was issued.
    Source: facts on either are figures of the target (`launch.gap_s`, `launch.host_issue_s`, `launch.graph_node_s`).
    """

    gap_s: float
    issue_s: float


def launch_name(name: str, *, cuda_graphs: bool = False) -> str:
    """The name of a launch model. Raises: InputError (launch) for an unknown one, or CUDA graphs without a host."""
    if name not in LAUNCHES:
        raise refuse(
            "launch", "--launch", f"no launch model {name!r}", ", ".join(LAUNCHES), did_you_mean(name, LAUNCHES)
        )
    if cuda_graphs and name == "additive":
        what = "CUDA graphs shorten the host's work, which the additive model does not have"
        raise refuse("launch", "--cuda-graphs", what, "launch host or both")
    return name


def launching(target: Target, name: str = "both", *, cuda_graphs: bool = False) -> Launching:
    """The launch model of that name on a target. cuda_graphs: the host issues whole graphs, whose nodes cost it little.

    Raises: InputError (launch): as `launch_name`, or for CUDA graphs on a target that has no figure for them.
    """
    launch_name(name, cuda_graphs=cuda_graphs)
    issue_s = target.launch.graph_node_s if cuda_graphs else target.launch.host_issue_s
    if issue_s is None:
        what = f"target {target.name} has no figure for a node of a CUDA graph"
        raise refuse("launch", "--cuda-graphs", what, "launch.graph_node_s in the target file")
    return Launching(0.0 if name == "host" else target.launch.gap_s, 0.0 if name == "additive" else issue_s)


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


@attrs.frozen
class Stretch:
    """Work that the host issues without waiting for the device: a (max, +) law of two clocks.

    issue_s: what the host needs to issue it. device_s: what the device needs when nothing holds it up. reach_s: when
    the device ends if only the host holds it up; minus infinity for no kernel. The first kernel is there at the start.
    Formula: reach = max over kernels i of (issue time of the kernels before i + device time from i on).
    """

    issue_s: float = 0.0
    device_s: float = 0.0
    reach_s: float = float("-inf")

    def times(self, count: int) -> Stretch:
        """`count` of these in a row. The latest end is that of the first or of the last, whichever is held up more."""
        if count == 0:
            return Stretch()
        more = max(self.issue_s, self.device_s)
        return Stretch(count * self.issue_s, count * self.device_s, self.reach_s + (count - 1) * more)

    @property
    def dry_s(self) -> float:
        """Seconds in which the device idles because its queue is empty, when both begin together."""
        return max(0.0, self.reach_s - self.device_s)


def in_a_row(stretches: Iterable[Stretch]) -> Stretch:
    """Stretches one right after the other, host and device each carrying on."""
    issue_s = device_s = 0.0
    reach_s = float("-inf")
    for own in stretches:
        reach_s = max(reach_s + own.device_s, issue_s + own.reach_s)
        issue_s += own.issue_s
        device_s += own.device_s
    return Stretch(issue_s, device_s, reach_s)


def stretch_of(kernels: ArrayLike, seconds: ArrayLike, launch: Launching) -> Stretch:
    """The stretch of ops in their order.

    kernels, seconds: launches of each op and its time on the device, gaps included; kernels of one op share its time
    evenly. Source: the (max, +) recurrence end_i = max(end_(i-1), issued_i) + seconds_i of a queue with one server.
    """
    count, time_s = np.asarray(kernels, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    total, launched = float(time_s.sum()), count > 0
    if not launch.issue_s or not launched.any():
        return Stretch(0.0, total)
    issued = count.cumsum() * launch.issue_s
    after = total - time_s.cumsum()
    each = np.divide(time_s, count, out=np.zeros_like(time_s), where=launched)
    first = issued - count * launch.issue_s + time_s  # held up at the op's first kernel
    last = issued - launch.issue_s + each  # held up at its last
    reach = float((np.maximum(first, last) + after)[launched].max())
    return Stretch(float(issued[-1]), total, reach)
