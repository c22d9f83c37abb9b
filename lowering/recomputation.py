"""recompute: forward ops that run again in backward instead of keeping what they made."""

from __future__ import annotations

import attrs

from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.rows import Rule
from stepgraph.ir.table import row_of
from stepgraph.ir.tensor import Tensor


def recompute(graph: Graph, policy: str) -> Graph:
    """Repeat forward ops in backward.

    policy: "none", "selective" (core attention) or "full" (every op and collective of the layer's forward, as
    Megatron-LM's checkpoint function re-runs it; only the layer's input is kept). Copies have role "recompute" and
    belong to their original; backward then reads the copies, so what is saved shrinks by itself.
    """
    chosen = [op for op in graph.phase(Phase.FORWARD) if policy == "full" or _is_core_attention(op)]
    if policy == "none" or not chosen:
        return graph
    copies, renamed = _copies(chosen)
    return attrs.evolve(graph, ops=_insert(graph, copies, renamed), facts=graph.facts | {"recompute"})


def _is_core_attention(op: Op) -> bool:
    """One kernel, or what a rewrite made of it: its ops keep the family.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 5.
    """
    return row_of(op.kind).rule is Rule.ATTENTION or op.attr("family") == "sdpa"


def _copies(chosen: list[Op]) -> tuple[list[Op], dict[str, Tensor]]:
    renamed = {t.name: attrs.evolve(t, name=f"{t.name}.again") for op in chosen for t in op.outputs}
    copies = [
        attrs.evolve(_reading(op, renamed), name=f"{op.name}.again", phase=Phase.BACKWARD, of=op.name, role="recompute")
        for op in chosen
    ]
    return [attrs.evolve(op, outputs=tuple(renamed[t.name] for t in op.outputs)) for op in copies], renamed


def _reading(op: Op, renamed: dict[str, Tensor]) -> Op:
    return attrs.evolve(op, inputs=tuple(renamed.get(t.name, t) for t in op.inputs), origin="recompute")


def _insert(graph: Graph, copies: list[Op], renamed: dict[str, Tensor]) -> tuple[Op, ...]:
    """The copies run together, just before the first backward op that reads one of them."""
    ops: list[Op] = []
    waiting = copies
    for op in graph.ops:
        reads = op.phase is Phase.BACKWARD and any(t.name in renamed for t in op.inputs)
        if reads:
            ops.extend(waiting)
            waiting = []
            inputs = tuple(renamed.get(t.name, t) for t in op.inputs)
            op = attrs.evolve(op, inputs=inputs)
        ops.append(op)
    return tuple(ops)
