"""How far data can wander and still come back through kernels: the bound on the search for cycles."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stepgraph.ir.graph import Graph, Group
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import lower
from stepgraph.passes.fusing.taken import Taken

GRAPH: Graph = lower(load_model("llama-3-8b", {"num_hidden_layers": 1}), Layout(seq=128))["dense"]
NAMES = tuple(op.name for op in GRAPH.ops)
PLACES = st.integers(0, len(NAMES) - 1)


def group(places: tuple[int, ...]) -> Group:
    members = tuple(NAMES[place] for place in sorted(places))
    return Group("+".join(members), "rule", members)


@given(st.lists(st.tuples(PLACES, PLACES), max_size=8), PLACES)
def test_the_horizon_is_the_end_of_the_chain_of_overlapping_kernels(spans: list[tuple[int, int]], start: int) -> None:
    taken = Taken(GRAPH, map(group, spans))
    furthest = start
    for _ in spans:  # each round can lengthen the chain by one kernel
        furthest = max([furthest, *(max(span) for span in spans if min(span) <= furthest)])
    assert taken.horizon(start) == furthest


def test_an_op_runs_with_the_members_of_its_kernel() -> None:
    pair = group((1, 3))
    taken = Taken(GRAPH)
    assert NAMES[3] not in taken and taken.unit(NAMES[3]) == (NAMES[3],)
    taken.add(pair)
    assert taken[NAMES[3]] == pair.name
    assert taken.unit(NAMES[3]) == (NAMES[1], NAMES[3])
    assert (taken.horizon(0), taken.horizon(1), taken.horizon(2), taken.horizon(4)) == (0, 3, 3, 4)
