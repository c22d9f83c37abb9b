"""Whether a schedule takes a layout's number of micro-batches, said in terms of its global batch."""

from __future__ import annotations

from stepgraph.errors import refuse
from stepgraph.lowering.layout import Layout
from stepgraph.passes.overlap.policies import Policy
from stepgraph.passes.pipeline.schedules import schedule_of


def check_microbatches(layout: Layout, policy: Policy) -> None:
    """Raises: InputError (pipeline-microbatches) with the nearest global batches that the schedule takes.

    layout: a resolved one. policy: one that pairs forwards and backwards runs the schedule's combined form.
    """
    schedule = schedule_of(str(layout.schedule))
    if policy.expert_comm and schedule.combined is not None:
        schedule = schedule.combined
    n = layout.n_microbatches
    if schedule.takes(layout.pp, layout.vpp, n):
        return
    share = layout.dp * layout.micro_batch
    what = (
        f"{schedule.title} with pp = {layout.pp} cannot take n = {n} micro-batches (global batch / (dp x micro-batch))"
    )
    near = " or ".join(str(number * share) for number in schedule.nearest(layout.pp, layout.vpp, n))
    raise refuse("pipeline-microbatches", "global_batch", what, f"n: {schedule.takes_text}", f"nearest: {near}")
