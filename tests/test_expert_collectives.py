"""Collectives of expert layers: all-to-alls as recorded, and the four that experts with tensor parallelism need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Phase
from stepgraph.ir.rows import Rule
from stepgraph.ir.table import row_of
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import lower
from stepgraph.lowering.model import Attention, Experts, Layer, Mlp, Model
from stepgraph.passes.collective import comm_bytes

COMM: dict[str, Any] = json.loads((Path(__file__).parent / "data/comm.json").read_text())
ARGS: dict[str, int] = COMM["args"]
EP, EXPERTS, TOP_K = 4, 16, 2
TOKENS = ARGS["b"] * ARGS["s"]  # of one data rank: 2 x 64
ROW_BYTES = ARGS["d"] * 2  # bf16
Found = list[tuple[str, str, int]]


def sparse_layer(**changes: Any) -> Graph:
    """A layer of experts, lowered with ep = 4 in dp = 4 unless changed."""
    width = ARGS["d"] // ARGS["nh"]
    attention = Attention(ARGS["nh"], ARGS["nkv"], width, qkv_bias=False, out_bias=False, rotary_dim=width)
    moe = Experts(EXPERTS, TOP_K, Mlp(ARGS["f"], gated=True, activation="silu", bias=False))
    layers = (Layer(attention, moe, "rmsnorm"),) * ARGS["layers"]
    model = Model("tiny", "mixtral", ARGS["d"], ARGS["vocab"], layers, "rmsnorm", False, 0, "bf16", 4096)
    layout = Layout(dp=EP, ep=EP, micro_batch=ARGS["b"], seq=ARGS["s"])
    return lower(model, attrs.evolve(layout, **changes))["moe"]


def collectives(graph: Graph, phase: Phase) -> Found:
    """Kind, group and bytes of what the experts' part of a layer sends, in order."""
    ops = [op for op in graph.phase(phase) if op.module == "moe" and row_of(op.kind).rule is Rule.COLLECTIVE]
    return [(op.kind, op.group_name, comm_bytes(op)) for op in ops]


@pytest.mark.parametrize(("name", "phase"), [("fwd", Phase.FORWARD), ("bwd", Phase.BACKWARD)])
def test_all_to_alls_equal_the_oracle(name: str, phase: Phase) -> None:
    found = collectives(sparse_layer(), phase)
    assert {kind for kind, _, _ in found} == {"all_to_all"}
    expected = COMM["ep_all_to_all"][name]["all_to_all/bfloat16"]
    assert (len(found), sum(size for _, _, size in found)) == (expected["count"], expected["bytes"])


def test_token_counts_travel_once_forward_and_are_listed_but_not_costed() -> None:
    assert COMM["ep_all_to_all"]["fwd"]["all_to_all/int64"] == {"count": 1, "bytes": EXPERTS * 8}
    listed = [op.name for op in sparse_layer().phase(Phase.FORWARD) if op.attr("metadata")]
    assert listed == ["moe.permute"]


def test_experts_with_tensor_parallelism_gather_after_dispatch_and_scatter_before_combine() -> None:
    layer = sparse_layer(tp=2, etp=2)
    # E / ep = 4 experts on a rank; each gets 4 x 128 x 2 / 16 = 64 of the copies of all four data ranks
    arrived = (EXPERTS // EP) * (EP * TOKENS * TOP_K // EXPERTS) * ROW_BYTES
    assert arrived == 4 * 64 * 128 * 2
    sent = arrived // 2  # sequence parallelism: each of the two ranks dispatches and combines half of them
    there = [("all_to_all", "dp", sent), ("all_gather", "tp", arrived)]
    back = [("reduce_scatter", "tp", arrived), ("all_to_all", "dp", sent)]
    assert collectives(layer, Phase.FORWARD) == there + back
    assert collectives(layer, Phase.BACKWARD) == there + back  # the gradient goes to the experts as the tokens did


def test_expert_tensor_parallelism_needs_no_tensor_parallelism_of_attention() -> None:
    # tp = 1: each of the 8 data ranks has 128 x 2 copies, and two neighbours share their experts
    layer = sparse_layer(dp=8, etp=2)
    sent = TOKENS * TOP_K * ROW_BYTES
    there = [("all_to_all", "ep", sent), ("all_gather", "etp", 2 * sent)]
    back = [("reduce_scatter", "etp", 2 * sent), ("all_to_all", "ep", sent)]
    assert collectives(layer, Phase.FORWARD) == collectives(layer, Phase.BACKWARD) == there + back


def test_experts_over_the_tensor_parallel_ranks_too_send_less_each_and_gather_nothing() -> None:
    layer = sparse_layer(tp=2, ep=8)  # 8 = tp x dp; sequence parallelism leaves 64 tokens on a rank
    sent = TOKENS // 2 * TOP_K * ROW_BYTES
    assert collectives(layer, Phase.FORWARD) == collectives(layer, Phase.BACKWARD) == [("all_to_all", "ep", sent)] * 2


def test_without_expert_parallelism_nothing_is_sent() -> None:
    layer = sparse_layer(ep=1)
    assert collectives(layer, Phase.FORWARD) == collectives(layer, Phase.BACKWARD) == []


@pytest.mark.parametrize(("factor", "part", "whole"), [(1.0, 1, 1), (1.25, 5, 4), (2.0, 2, 1)])
def test_padding_to_a_capacity_is_sent_too(factor: float, part: int, whole: int) -> None:
    sent = TOKENS * TOP_K * ROW_BYTES * part // whole
    assert collectives(sparse_layer(capacity_factor=factor), Phase.FORWARD) == [("all_to_all", "dp", sent)] * 2
