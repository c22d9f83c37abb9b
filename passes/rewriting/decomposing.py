"""decompose: ops that stand for a fused kernel become the ops that PyTorch eager runs."""

from __future__ import annotations

from collections.abc import Iterator

from stepgraph.errors import InputError, Problem, did_you_mean
from stepgraph.ir.graph import Graph
from stepgraph.ir.rewriting import LOGICAL, Rewrite, expand
from stepgraph.passes.rewriting.expansions import EXPANSIONS, GATES
from stepgraph.passes.rewriting.packed import PACKINGS, unpack

NAME = "decompose"

DECOMPOSABLE = (*EXPANSIONS, *PACKINGS)
"""What can be decomposed: kinds of ops, and packed projections by family."""


def decompose(*kinds: str) -> Rewrite:
    """The rewrite that splits every op of some kinds into what PyTorch eager runs.

    kinds: out of `DECOMPOSABLE`; "qkv" and "gate_up" are the packed projections. Model FLOPs and parameters stay as
    they are; executed FLOPs of attention are those of all pairs. AdamW is split in the step's templates.

    Raises: InputError (decompose) for kinds that it cannot split, for none at all, and for "gate_up" without the
    activation that reads it packed.
    """
    problems = list(_problems(kinds))
    if problems:
        raise InputError(problems)
    how = {kind: EXPANSIONS[kind] for kind in kinds if kind in EXPANSIONS}
    packings = [PACKINGS[kind] for kind in kinds if kind in PACKINGS]

    def apply(graph: Graph) -> Graph:
        graph = expand(graph, NAME, how)
        for packing in packings:
            graph = unpack(graph, packing, NAME)
        return graph

    return Rewrite(NAME, LOGICAL, apply)


def _problems(kinds: tuple[str, ...]) -> Iterator[Problem]:
    where = f"decompose({', '.join(map(repr, kinds))})"
    if not kinds:
        yield Problem(NAME, where, "no kinds", f"some of {', '.join(DECOMPOSABLE)}", "name what to split")
    for kind in kinds:
        if kind not in DECOMPOSABLE:
            what = f"{kind!r} has no decomposition"
            yield Problem(NAME, where, what, f"one of {', '.join(DECOMPOSABLE)}", did_you_mean(kind, DECOMPOSABLE))
    if "gate_up" in kinds and not any(kind in GATES for kind in kinds):
        expected = f"the activation too: one of {', '.join(GATES)}"
        yield Problem(NAME, where, "gate_up would be split while the activation reads it packed", expected)
