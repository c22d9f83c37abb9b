"""Overlap for the front: whether a policy fits a layout, and what it hides of each communicator on one rank."""

from __future__ import annotations

from collections.abc import Iterator

from stepgraph.errors import InputError, Problem
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.model import Experts, Model
from stepgraph.passes.buckets import Buckets
from stepgraph.passes.iteration import Iteration
from stepgraph.passes.overlap.policies import Policy
from stepgraph.passes.overlap.policychecks import check_policy
from stepgraph.report import Communication, Exposure


def check_overlap(policy: Policy, layout: Layout, model: Model) -> None:
    """Raises: InputError with every flag of the policy that the layout or the model rules out."""
    experts = [layer.mlp for layer in model.distinct_layers if isinstance(layer.mlp, Experts)]
    problems = check_policy(
        policy,
        tp=layout.tp,
        sp=bool(layout.sp),
        ep=layout.ep,
        pp=layout.pp,
        schedule=layout.schedule or "1f1b",
        recompute=layout.recompute,
        has_shared_expert=any(mlp.shared for mlp in experts),
        zero=layout.zero,
    )
    if policy.expert_comm and layout.mtp > 1:
        what = f"overlap-moe-expert-parallel-comm with {layout.mtp} MTP modules"
        problems.append(Problem("overlap-expert-comm", "--overlap", what, "1 at most, as in Megatron-LM", "--mtp 1"))
    if problems:
        raise InputError(problems)


def overlap_warnings(policy: Policy, iteration: Iteration, microbatches: int) -> Iterator[str]:
    """What a policy does not do here, or does to the worse."""
    if policy.expert_comm and not any(change.inside.hidden.ep for change in iteration.changes):
        yield (
            f"overlap: with {microbatches} micro-batch{'es' if microbatches > 1 else ''} per step no forward finds a "
            "backward to run with; overlap-moe-expert-parallel-comm hides nothing"
        )
    longer_s = max((change.inside.time_s for change in iteration.changes), default=0.0)
    if policy.expert_comm and longer_s > 0:
        yield (
            f"overlap: overlap-moe-expert-parallel-comm costs {longer_s * 1e3:.0f} ms per step more than it hides: weight "
            "gradients come later in a pair, so TP collectives that ran beside them show"
        )
    if not policy.param_gather or len(iteration.ranks) == 1 or len(iteration.stages) > len(iteration.ranks):
        return
    paid = sum(change.inside.buckets.dp for change in iteration.changes)
    saved = max(-change.after_norm.buckets.dp for change in iteration.changes)
    if paid > saved > 0:
        yield (
            f"overlap: without chunks every stage gathers its parameters when its first activation has arrived, one stage "
            f"after the other: {paid * 1e3:.0f} ms on the way down, where all gathers after the update take "
            f"{saved * 1e3:.0f} ms; leave overlap-param-gather out, or use --vpp"
        )


def overlap_notes(policy: Policy, iteration: Iteration, *, splits_backward: bool) -> Iterator[str]:
    """What to know to read the other numbers under a policy."""
    if policy.expert_comm and any(change.inside.hidden.ep for change in iteration.changes):
        yield "stages: forward and backward are those of a micro-batch by itself; as a pair they take less"
    if policy.tp_backward and splits_backward and any(rank.backward.buckets.tp for rank in iteration.ranks):
        yield "overlap: weight gradients run apart under this schedule, so no TP collective hides under them"


def communication_of(iteration: Iteration, rank: int) -> Communication:
    """Seconds of every communicator in a step of one rank.

    tp, ep, cp, dp: exposed is what the buckets hold. pp: total is the links' time for what the rank receives, and for
    what it sends where it has to wait for that.
    """
    exposed, hidden = iteration.buckets[rank], iteration.hidden[rank]
    return Communication(*(_exposure(name, exposed, hidden) for name in ("tp", "ep", "cp", "dp", "pp_transfer")))


def _exposure(name: str, exposed: Buckets, hidden: Buckets) -> Exposure:
    seen, unseen = getattr(exposed, name), getattr(hidden, name)
    return Exposure(seen + unseen, unseen, seen)
