"""Model FLOPs and parameters: what the model is, whatever the layout.

Model FLOPs are those of the matmuls: backward is twice forward, recomputation and what a flash kernel computes again
do not count.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from stepgraph.ir.graph import Graph, param_identity
from stepgraph.ir.op import Op
from stepgraph.ir.rows import Rule, flops_of
from stepgraph.ir.table import row_of
from stepgraph.ir.tensor import Kind, Tensor, is_of_experts

INPUT_TABLES = ("embedding", "position_add")
"""Kinds whose parameter is looked up by token or position, not multiplied with."""

FAMILIES = (
    *("qkv", "sdpa", "attn_out", "mlp_up", "mlp_down", "lm_head"),
    *("router", "experts_up", "experts_down", "shared_up", "shared_down"),
    "mtp",
)
"""Families of matmuls, in the order of the model."""


@attrs.frozen
class Family:
    """FLOPs of one family: forward, input gradient and weight gradient (attention has no weights: all in dgrad)."""

    fwd: int
    dgrad: int
    wgrad: int

    @property
    def total(self) -> int:
        """All three."""
        return self.fwd + self.dgrad + self.wgrad


@attrs.frozen
class Params:
    """Parameters of a model. active: those that a token passes through; embedding: input tables among them.

    multiplied: the active ones without the input embedding, unless the head is tied to it: the N of 6 N.
    """

    total: int
    active: int
    embedding: int
    multiplied: int


def count_flops(parts: Iterable[tuple[Graph, int]], *, attention: str = "causal") -> dict[str, Family]:
    """FLOPs by family of logical forward graphs, each times how often it runs.

    attention: "causal" halves the square, "full" counts all of it. Backward is twice forward, for attention too.
    """
    found: dict[str, Family] = {}
    for graph, count in parts:
        for op in graph.ops:
            if row_of_matmul(op):
                name = str(op.attr("family"))
                found[name] = _plus(found.get(name, Family(0, 0, 0)), op, count, attention)
    return {name: found[name] for name in FAMILIES if name in found}


def row_of_matmul(op: Op) -> bool:
    """Whether the op is a matmul or attention. Pins, which are resolved by placement, are not."""
    return op.kind != "pin" and row_of(op.kind).rule in (Rule.GEMM, Rule.ATTENTION)


def _plus(family: Family, op: Op, count: int, attention: str) -> Family:
    row = row_of(op.kind)
    counted = attrs.evolve(op, attrs=()) if attention == "full" else op
    fwd = flops_of(counted, row) * count
    if row.rule is Rule.ATTENTION:
        return Family(family.fwd + fwd, family.dgrad + 2 * fwd, 0)
    return Family(family.fwd + fwd, family.dgrad + fwd, family.wgrad + fwd)


def count_params(parts: Iterable[tuple[Graph, int]]) -> Params:
    """Parameters of logical graphs, each times how often it stands in the model; a tied table is one parameter."""
    totals: dict[str, int] = {}
    active: dict[str, int] = {}
    lookups: dict[str, int] = {}
    multiplied: set[str] = set()
    for graph, count in parts:
        for op in graph.ops:
            for t in (t for t in op.inputs if t.kind is Kind.PARAM):
                name = param_identity(graph, t)
                totals[name] = count * t.elements
                active[name] = count * _visited(op, t)
                _note(op, t, name, lookups, multiplied)
    only_looked_up = sum(elements for name, elements in lookups.items() if name not in multiplied)
    n_active = sum(active.values())
    return Params(sum(totals.values()), n_active, sum(lookups.values()), n_active - only_looked_up)


def _visited(op: Op, param: Tensor) -> int:
    """Elements of a parameter that one token meets: of experts' weights the fraction that it visits."""
    if not is_of_experts(param):
        return param.elements
    part, whole = op.inputs[0].fraction
    return param.elements * part // whole


def _note(op: Op, tensor: Tensor, name: str, lookups: dict[str, int], multiplied: set[str]) -> None:
    if op.kind in INPUT_TABLES:
        lookups[name] = tensor.elements
    else:
        multiplied.add(name)


@attrs.frozen
class Mfu:
    """Model FLOPs utilisation against the dense peak of all devices.

    active: 6 N tokens/s with the parameters that a token is multiplied with; total: 6 x all parameters, which flatters
    sparse models; model_flops: the matmuls counted one by one, attention halved when causal.
    """

    active: float
    total: float
    model_flops: float


def mfu(params: Params, flops_per_token: float, tokens_per_s: float, peak_flops_per_s: float) -> Mfu:
    """6 N tokens/s over the peak (Kaplan et al. 2020, arXiv:2001.08361), and the same with counted FLOPs."""
    per_parameter = 6 * tokens_per_s / peak_flops_per_s
    return Mfu(
        per_parameter * params.multiplied,
        per_parameter * params.total,
        flops_per_token * tokens_per_s / peak_flops_per_s,
    )
