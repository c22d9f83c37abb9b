"""predict: one training step of a model under a layout on a target, as typed numbers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

import attrs

from stepgraph.advice import advise, findings_of
from stepgraph.errors import refuse
from stepgraph.hwtargets.reading import load_target
from stepgraph.hwtargets.target import Target
from stepgraph.ir.graph import Graph
from stepgraph.ir.program import Program, shown_runs
from stepgraph.ir.rewriting import Rewrite
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import count_parts, lower
from stepgraph.lowering.model import Model
from stepgraph.lowering.mtpchecks import mtp_warnings
from stepgraph.lowering.resolution import resolve_layout
from stepgraph.microbatches import check_microbatches
from stepgraph.overlapping import check_overlap, communication_of, overlap_notes, overlap_warnings
from stepgraph.passes.base import Setting, setting
from stepgraph.passes.exchanges import exchanges
from stepgraph.passes.iteration import Iteration, iterate
from stepgraph.passes.modelflops import Mfu, count_flops, count_params, mfu
from stepgraph.passes.overlap.policies import Policy
from stepgraph.passes.pipeline.schedules import schedule_of
from stepgraph.passes.seating import seat, seating_note
from stepgraph.passes.stepping.parts import Part, StageCost
from stepgraph.report import BackwardOverForward, Bubble, Prediction, StageReport

if TYPE_CHECKING:
    from stepgraph.passes.fusing.grouping import AnyRule


def predict(
    model: Model | str | os.PathLike[str],
    layout: Layout,
    target: Target | str | os.PathLike[str],
    *,
    fusions: str | Sequence[AnyRule] = "none",
    profile: str = "reference",
    eta: str = "constant",
    launch: str = "both",
    cuda_graphs: bool = False,
    overlap: str = "none",
    p2p: str = "auto",
    rank: int | None = None,
) -> Prediction:
    """Predict one training step.

    model, target: what `load_model` and `load_target` return, or the names or paths that they take. fusions: rules to
    fuse by, or what names them: a set, a file that ends in .py, or several with commas. profile: "reference" or "exact"
    HBM passes. eta: "constant" per named op or the "shape" law. rank: whose buckets to show (default: a rank of the
    slowest stage). launch: "additive", "host" or "both", with or without cuda_graphs. overlap: a policy such as
    "megatron" or its flags. p2p: how transfers between stages are issued; "auto" is what is usual for the schedule.
    Raises: InputError for an impossible layout or unknown names.
    """
    model = model if isinstance(model, Model) else load_model(model)
    target = target if isinstance(target, Target) else load_target(target)
    chosen = setting(target, profile, eta, launch, cuda_graphs=cuda_graphs, overlap=overlap, p2p=p2p)
    return predict_under(model, layout, chosen, named_rules(fusions), rank)


def predict_under(
    model: Model, layout: Layout, machine: Setting, rules: Sequence[AnyRule] = (), rank: int | None = None
) -> Prediction:
    """Predict one training step under a whole setting: see `predict`. Raises: InputError."""
    layout, notes = modelled_layout(layout, model, machine.overlap)
    shown = _stage_of(rank, layout)
    program = lower(model, layout)
    chosen = seat(machine, program)
    notes = (*notes, *seating_note(machine.target, chosen.target), *dropping_note(layout))
    if rules:
        from stepgraph.soundfusing import fuse_soundly

        program, notes = fuse_soundly(program, rules)[0], (*notes, *_rewrite_notes(rules))
    iteration = iterate(program, chosen)
    finite(iteration.step_s)
    stage = iteration.slowest if shown is None else shown
    rank = stage * _ranks_per_stage(layout) if rank is None else rank
    found = _assemble(model, layout, chosen, program, iteration, rank, stage, notes)
    return attrs.evolve(found, fusions=tuple(rule.name for rule in rules))


def named_rules(fusions: str | Sequence[AnyRule]) -> tuple[AnyRule, ...]:
    """The rules of the argument `fusions`. Raises: InputError."""
    if fusions in ("none", ()):
        return ()  # most predictions fuse nothing, and need not import the rules
    from stepgraph.passes.fusing.sets import as_rules

    return as_rules(fusions)


def _rewrite_notes(rules: Sequence[AnyRule]) -> tuple[str, ...]:
    from stepgraph.passes.fusing.grouping import relower_site

    return tuple(str(relower_site(rule).reasons[0]) for rule in rules if isinstance(rule, Rewrite))


def modelled_layout(layout: Layout, model: Model, policy: Policy) -> tuple[Layout, tuple[str, ...]]:
    """The resolved layout, and what was decided for the user.

    Raises: InputError also where the overlap policy does not fit it, or its schedule does not take its micro-batches.
    """
    layout, notes = resolve_layout(layout, model)
    check_overlap(policy, layout, model)
    check_microbatches(layout, policy)
    return layout, notes


def finite(step_s: float) -> None:
    """Refuse a step time that is no number. Raises: InputError."""
    if not isfinite(step_s):
        raise refuse(
            "not-finite", "step", "the step time is not a finite number", fix="check the figures of the target"
        )


def mfu_of(parts: Sequence[tuple[Graph, int]], model: Model, layout: Layout, target: Target, step_time_s: float) -> Mfu:
    """MFU of a step that takes so long. parts: what `count_parts` says of the model; the layout is a resolved one."""
    assert layout.global_batch is not None and layout.seq is not None  # resolved
    tokens_per_s = layout.global_batch * layout.seq / step_time_s
    flops_per_token = sum(family.total for family in count_flops(parts).values()) / layout.seq
    peak = layout.gpus * target.peak_flops_per_s(model.dtype)
    return mfu(count_params(parts), flops_per_token, tokens_per_s, peak)


def dropping_note(layout: Layout) -> tuple[str, ...]:
    """Dropped tokens are no work of this step, but they are work of the model."""
    if layout.capacity_factor is None or layout.capacity_factor >= 1:
        return ()
    dropped = f"{1 - layout.capacity_factor:.0%} of the routed tokens"
    return (f"capacity factor {layout.capacity_factor:g} drops {dropped}; MFU counts a model that drops none",)


def _ranks_per_stage(layout: Layout) -> int:
    return layout.tp * layout.cp * layout.dp


def _stage_of(rank: int | None, layout: Layout) -> int | None:
    """The pipeline stage of a global rank; ranks of a stage are neighbours."""
    if rank is None:
        return None
    if isinstance(rank, bool) or not 0 <= rank < layout.gpus:
        raise refuse("rank", "rank", f"there is no rank {rank!r}", f"0 to {layout.gpus - 1}")
    return rank // _ranks_per_stage(layout)


def _assemble(
    model: Model,
    layout: Layout,
    chosen: Setting,
    program: Program,
    iteration: Iteration,
    rank: int,
    stage: int,
    notes: tuple[str, ...],
) -> Prediction:
    assert layout.global_batch is not None and layout.seq is not None  # resolved
    cost = iteration.ranks[stage]
    tokens_per_s = layout.global_batch * layout.seq / iteration.step_s
    parts = count_parts(model, 1, layout.seq, layout.mtp)
    n = program.microbatches
    found = exchanges(program, chosen.target)
    findings = findings_of(program, found, model, layout, chosen.target)
    return Prediction(
        model=model.name,
        target=chosen.target.name,
        gpus=layout.gpus,
        layout=layout,
        profile=chosen.profile.name,
        eta=chosen.eta,
        step_time_s=iteration.step_s,
        step_time_closed_form_s=iteration.closed_form_s,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=tokens_per_s / layout.gpus,
        mfu=mfu_of(parts, model, layout, chosen.target, iteration.step_s),
        n_microbatches=n,
        bubble=Bubble(iteration.bubble_closed_form, iteration.bubble_simulated),
        rank=rank,
        buckets_s=iteration.buckets[stage],
        roofline_s=n * cost.micro_batch.roofline_s + cost.step.roofline_s,
        params=count_params(parts),
        kernels_per_rank=n * cost.micro_batch.kernels + cost.step.kernels,
        backward_over_forward=_backward_over_forward(iteration.stages),
        host_wait_s=n * cost.dry_s,
        launch=chosen.launch,
        cuda_graphs=chosen.cuda_graphs,
        overlap=chosen.overlap.name,
        p2p_mode=str(iteration.mode),
        communication_s=communication_of(iteration, stage),
        stages=tuple(_stage(rank, program, iteration) for rank in range(layout.pp)),
        all_to_alls=found,
        warnings=(
            *model.warnings,
            *mtp_warnings(layout, model),
            *advise(iteration, findings),
            *overlap_warnings(chosen.overlap, iteration, n),
        ),
        notes=(
            *notes,
            *overlap_notes(chosen.overlap, iteration, splits_backward=schedule_of(program.schedule).splits_backward),
        ),
    )


def _backward_over_forward(stages: tuple[StageCost, ...]) -> BackwardOverForward:
    forward = sum((stage.forward for stage in stages), Part()).buckets
    backward = sum((stage.backward for stage in stages), Part()).buckets

    def ratio(*names: str) -> float | None:
        before, after = (sum(getattr(side, name) for name in names) for side in (forward, backward))
        return after / before if before else None

    return BackwardOverForward(
        ratio("gemm"),
        ratio("attention"),
        ratio("hbm"),
        ratio("tp", "ep", "cp"),
        backward.total / forward.total,
    )


def _stage(index: int, program: Program, iteration: Iteration) -> StageReport:
    cost, run = iteration.ranks[index], iteration.pipeline.ranks[index]
    return StageReport(
        stage=index,
        runs=" | ".join(shown_runs(chunk.runs) for chunk in program.chunks_of(index)),
        forward_s=cost.forward.time_s,
        backward_s=cost.backward.time_s,
        step_s=cost.step.time_s,
        kernels_forward=cost.forward.kernels,
        kernels_backward=cost.backward.kernels,
        wait_send_s=run.wait_send_s,
        wait_recv_s=run.wait_recv_s,
        longest_wait_s=run.longest_wait_s,
        peak_micro_batches=run.peak_microbatches,
        buckets_s=iteration.buckets[index],
    )
