"""Rewrites in lowering: which act when, and that what they leave is sound."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from stepgraph.errors import refuse
from stepgraph.ir.graph import Graph
from stepgraph.ir.rewriting import TIMES, Rewrite
from stepgraph.ir.verifier import VerifyError, verify
from stepgraph.lowering.builder import PIN


def apply_rewrites(graph: Graph, rewrites: Sequence[Rewrite], *times: str) -> Graph:
    """The graph after every rewrite of these times, in the order given; of all times when none is named.

    Raises: InputError (rewrite) when what one leaves is not a sound graph.
    """
    for rewrite in rewrites:
        if rewrite.at in (times or TIMES):
            changed = rewrite.apply(graph)
            if changed is not graph:
                _require_sound(changed, rewrite)
            graph = changed
    return graph


def _require_sound(graph: Graph, rewrite: Rewrite) -> None:
    """Verify a graph; in a logical one pins, which have no row, are looked at as ops that change nothing."""
    seen = attrs.evolve(graph, ops=tuple(attrs.evolve(op, kind="cast") if op.kind == PIN else op for op in graph.ops))
    try:
        verify(seen)
    except VerifyError as error:
        what = f"leaves a graph that is not sound\n{error}"
        raise refuse("rewrite", f"rewrite {rewrite.name!r} at {rewrite.at}", what) from error
