"""templates: one phase of one layer under a policy: what its seconds become, op by op."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Phase
from stepgraph.passes.base import Setting
from stepgraph.passes.overlap.experts import segments_of, shared_windows
from stepgraph.passes.overlap.linears import linear_partners
from stepgraph.passes.overlap.plan import Partners, Step, seconds_of, steps_of_parts, tasks_of
from stepgraph.passes.overlap.policies import Policy
from stepgraph.passes.overlap.prefetch import ahead_of, loose_of
from stepgraph.passes.overlap.streams import Exposure, schedule
from stepgraph.passes.overlap.work import Work, work_of

Floats = NDArray[np.float64]


@attrs.frozen(eq=False)
class Scheduled:
    """One phase under a policy.

    seconds: from its first op to its last. op_s: what each op adds to that, by its position in the graph (0 for other
    phases): compute with what contention added, of a collective only what is exposed; they sum to `seconds`.
    communicators: total, exposed and hidden time of each.
    """

    seconds: float
    slowdown_s: float
    op_s: Floats
    communicators: tuple[Exposure, ...]


def schedule_phase(
    graph: Graph,
    phase: Phase,
    seconds: Sequence[float],
    policy: Policy,
    setting: Setting,
    last: Sequence[int] = (),
) -> Scheduled:
    """Put one phase of a graph on streams.

    seconds: what each op takes by itself, launches included, by position (entries of other phases are not read). Without
    an overlapped collective the result is the plain sum of the phase. What a policy overlaps across micro-batches or
    with the optimizer does not show here: see `merge_layers` and the gradient buckets. last: positions of ops that are
    issued after all others, as weight gradients are where they run apart; no reduce-scatter of dgrad hides under them.

    Raises: ValueError for as many times as the graph has no ops: a caller's bug.
    Source: as named by `stepgraph.passes.overlap.policies.WORDS`.
    """
    work = work_of(graph, seconds, phase)
    apart = set(last)
    partners = partners_of(graph, work, policy, delayed=bool(last))
    steps = steps_of_parts(work, partners, [[i for i in work.chosen if i not in apart], last])
    return run_steps(work, steps, policy, setting)


def run_steps(work: Work, steps: Sequence[Step], policy: Policy, setting: Setting) -> Scheduled:
    """A plan on the target's streams."""
    tasks, owners = tasks_of(work, steps)
    timeline = schedule(tasks, sms_of(policy, setting))
    spent = seconds_of(timeline, tasks, owners, len(work.ops))
    return Scheduled(timeline.makespan_s, timeline.slowdown_s, np.array(spent), timeline.communicators)


def sms_of(policy: Policy, setting: Setting) -> int | None:
    """Multiprocessors that compute and collectives share; None where the policy leaves contention out."""
    return setting.target.compute.sms if policy.contention else None


def partners_of(graph: Graph, work: Work, policy: Policy, *, delayed: bool = False) -> Partners:
    """Which ops of the work run beside which under a policy. delayed: weight gradients come later."""
    windows = shared_windows(work, segments_of(graph)) if policy.shared_expert else {}
    apart = {guest for guests in windows.values() for guest in guests}
    linears = linear_partners(work, policy, apart=apart, delayed=delayed)
    loose = linears.loose | loose_of(work, policy)
    return attrs.evolve(linears, windows=windows, ahead=ahead_of(work, policy), loose=loose)
