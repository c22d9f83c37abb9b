"""The part of memory that needs no model of activations: parameters, gradients and optimizer state of one rank."""

from __future__ import annotations

from collections import Counter

from stepgraph.ir.gradients import param_gradients
from stepgraph.ir.graph import Graph
from stepgraph.ir.program import Program
from stepgraph.ir.tensor import DTYPE_BYTES, Kind, is_of_experts


def static_bytes(step: Graph, dtype: str) -> int:
    """Bytes that a rank holds all through the step: a lower bound of its memory.

    Formula: parameters n x bytes of the type + fp32 gradients 4 n + what AdamW keeps on this rank (two moments, and
    master weights where the parameters are narrower), n / ranks of it under ZeRO-1. Activations, workspace and
    fragmentation come on top. Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1.
    """
    grads = [t for t in step.inputs if t.kind is Kind.GRAD and t.name.endswith(".grads")]
    held = {t.name: t for t in step.inputs if t.kind is Kind.STATE}
    if dtype == "fp32":  # the master weights are the parameters
        held = {name: t for name, t in held.items() if not name.endswith(".master")}
    parameters = sum(t.elements for t in grads) * DTYPE_BYTES[dtype]
    return parameters + sum(t.nbytes for t in grads) + sum(t.nbytes for t in held.values())


def expert_share(program: Program, rank: int) -> float:
    """Part of the parameters of a pipeline rank that belongs to single experts, from 0 to 1.

    Formula: elements of experts' parameters on one GPU / elements of all, each template times how often it runs.
    """
    counts: Counter[str] = Counter()
    for run in (run for stage in program.chunks_of(rank) for run in stage.runs):
        counts[run.template] += run.count
    held = [(p, count) for name, count in counts.items() for p, _ in param_gradients(program[name])]
    experts = sum(count * param.elements for param, count in held if is_of_experts(param))
    return experts / max(sum(count * param.elements for param, count in held), 1)
