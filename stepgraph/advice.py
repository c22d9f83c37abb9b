"""Warnings: the source text's rules of thumb, applied to one prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from stepgraph.hwtargets.target import Target
from stepgraph.ir.program import Program
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.model import Experts, Model
from stepgraph.lowering.resolution import uneven_stages_note
from stepgraph.lowering.stages import layers_per_stage
from stepgraph.passes.exchanges import Exchange
from stepgraph.passes.footprint import expert_share, static_bytes
from stepgraph.passes.iteration import Iteration

LAUNCH_SHARE = 0.10
"""From which share of a micro-batch on launches are worth a word."""

HOST_SHARE = 0.01
"""From which share of a micro-batch on waits for the host are worth a word."""

UNEVEN_SHARE = 0.10
"""By how much the busiest stage may exceed the mean before it is worth a word."""

DOMINANT_SHARE = 0.5
"""From which share of a rank's parameters on experts are what fills its memory."""


@attrs.frozen
class Findings:
    """What the rules look at besides the iteration.

    uneven_layers: what the layout says about stages of unequal length. static_bytes: parameters, gradients and
    optimizer state of the fullest rank; hbm_bytes: what there is. expert_share: part of that rank's parameters that are
    experts', and experts_per_rank how many of them there are; scale_up_ranks: GPUs of a scale-up domain.
    """

    microbatches: int
    uneven_layers: str
    exchanges: Sequence[Exchange]
    static_bytes: int
    hbm_bytes: float
    expert_share: float
    experts_per_rank: int
    scale_up_ranks: int


def findings_of(program: Program, found: Sequence[Exchange], model: Model, layout: Layout, target: Target) -> Findings:
    """What the rules look at, of a program on a target. The fullest rank is the one whose parameters need most."""
    held = {stage.rank: static_bytes(program[stage.step], model.dtype) for stage in program.stages}
    fullest = max(held, key=lambda rank: held[rank])
    experts = max((layer.mlp.experts for layer in model.distinct_layers if isinstance(layer.mlp, Experts)), default=0)
    return Findings(
        microbatches=program.microbatches,
        uneven_layers=uneven_stages_note(layers_per_stage(program)),
        exchanges=found,
        static_bytes=held[fullest],
        hbm_bytes=target.hbm.size_bytes,
        expert_share=expert_share(program, fullest),
        experts_per_rank=experts // layout.ep,
        scale_up_ranks=target.scale_up.ranks,
    )


def advise(iteration: Iteration, findings: Findings) -> tuple[str, ...]:
    """What the source text would warn about, each with its code first.

    Source: How to Think About Asymptotic Times, sections 9 to 11.
    """
    rules = (
        _memory(findings),
        _bubble(iteration, findings.microbatches),
        _stages(iteration, findings.uneven_layers),
        _launches(iteration),
        _small_matmuls(iteration),
        _all_to_all(findings),
    )
    return tuple(text for rule in rules for text in rule)


def _memory(findings: Findings) -> Iterator[str]:
    if findings.static_bytes <= findings.hbm_bytes:
        return
    yield (
        f"memory: parameters, gradients and optimizer state alone need {findings.static_bytes / 2**30:.0f} of "
        f"{findings.hbm_bytes / 2**30:.0f} GiB per GPU, before any activation: this run does not fit; {_relief(findings)}"
    )


def _relief(findings: Findings) -> str:
    """What to split further: TP leaves experts whole, so where they dominate it relieves nothing."""
    if findings.expert_share <= DOMINANT_SHARE:
        return "use more tp, pp or (with ZeRO-1) dp"
    finer = "ep (or etp)" if findings.experts_per_rank > 1 else "etp (ep already leaves one expert per rank)"
    return (
        f"experts are {findings.expert_share:.0%} of the rank's parameters and tp does not split them: use more {finer}, "
        "then pp or (with ZeRO-1) dp"
    )


def _small_matmuls(iteration: Iteration) -> Iterator[str]:
    """GEMMs stay on the compute rule; with a constant efficiency a very small one is then too fast."""
    part = iteration.ranks[iteration.slowest].micro_batch
    busy = part.buckets.gemm + part.buckets.attention + part.buckets.hbm
    if part.roofline_s > busy:
        yield (
            "small-matmuls: the roofline takes longer than the predicted kernels, because a constant efficiency does "
            "not know that these GEMMs are bound by HBM; use --eta shape"
        )


def _bubble(iteration: Iteration, n: int) -> Iterator[str]:
    stages, chunks = len(iteration.ranks), len(iteration.stages) // len(iteration.ranks)
    if stages == 1 or n * chunks >= 4 * stages:
        return
    bound = "2P" if n * chunks < 2 * stages else "4P"
    form = "(P - 1)/n" if chunks == 1 else "(P - 1)/(n V)"
    yield (
        f"bubble: n = {n} micro-batches{f' x V = {chunks} chunks' if chunks > 1 else ''} are fewer than {bound} = "
        f"{int(bound[0]) * stages}: the pipeline idles "
        f"{form} = {iteration.bubble_closed_form:.0%} on top of the work ({iteration.bubble_simulated:.0%} simulated); "
        "raise the global batch or lower the micro-batch or pp"
    )


def _stages(iteration: Iteration, uneven_layers: str) -> Iterator[str]:
    if uneven_layers:
        yield uneven_layers
    times = [rank.micro_batch.time_s for rank in iteration.ranks]
    mean, longest = sum(times) / len(times), max(times)
    if longest <= (1 + UNEVEN_SHARE) * mean:
        return
    yield (
        f"uneven-stages: stage {times.index(longest)} takes {longest / mean - 1:.0%} longer than the mean; every other "
        f"stage waits for it, and the closed form, which spreads work evenly, is too fast; {_moves(iteration)} away from it"
    )


def _moves(iteration: Iteration) -> str:
    """What deals layers otherwise: counts at the ends, or, with chunks, only the notation says it stage by stage."""
    if len(iteration.stages) > len(iteration.ranks):
        return "--pipeline-layout moves layers"
    return "--first-stage-layers, --last-stage-layers or --pipeline-layout move layers"


def _launches(iteration: Iteration) -> Iterator[str]:
    rank = iteration.ranks[iteration.slowest]
    buckets = rank.micro_batch.buckets
    gaps, dry = (buckets.launch - rank.dry_s) / buckets.total, rank.dry_s / buckets.total
    if gaps > LAUNCH_SHARE:
        yield (
            f"launch-bound: gaps between kernels take {gaps:.0%} of a micro-batch; a larger micro-batch or fewer "
            "kernels (fusion) would win most"
        )
    if dry > HOST_SHARE:
        yield (
            f"host-bound: the device waits for its host in {dry:.0%} of a micro-batch; CUDA graphs, fewer kernels "
            "(fusion) or a larger micro-batch would win most"
        )


def _all_to_all(findings: Findings) -> Iterator[str]:
    """Dispatch and combine that leave the scale-up domain, with what a flat S / beta would have said."""
    crossing = [exchange for exchange in findings.exchanges if exchange.domains > 1]
    if not crossing:
        return
    worst = max(crossing, key=lambda exchange: exchange.time_s)
    yield (
        f"all-to-all: expert parallelism spans {worst.domains} scale-up domains; {worst.inter_fraction:.0%} of the bytes "
        f"leave the domain and a call takes {worst.time_s * 1e3:.2f} ms, where S / beta of the scale-up link alone says "
        f"{worst.flat_scale_up_s * 1e3:.2f} ms and of the NIC alone {worst.flat_nic_s * 1e3:.2f} ms (without "
        f"efficiency); keep ep inside a scale-up domain of {findings.scale_up_ranks}"
    )
