"""Collectives per layer and per model equal what DTensor recorded and what Megatron-LM does: kind, phase, bytes."""

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
from stepgraph.ir.tensor import Axis
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import lower
from stepgraph.lowering.model import Attention, Layer, Mlp, Model
from stepgraph.passes.collective import comm_bytes

COMM: dict[str, Any] = json.loads((Path(__file__).parent / "data/comm.json").read_text())
ARGS: dict[str, int] = COMM["args"]
PHASES = {"fwd": Phase.FORWARD, "bwd": Phase.BACKWARD}
Table = dict[str, dict[str, dict[str, int]]]


def tiny_llama() -> Model:
    """The model that the oracle ran."""
    width = ARGS["d"] // ARGS["nh"]
    attention = Attention(ARGS["nh"], ARGS["nkv"], width, qkv_bias=False, out_bias=False, rotary_dim=width)
    layer = Layer(attention, Mlp(ARGS["f"], gated=True, activation="silu", bias=False), "rmsnorm")
    layers = (layer,) * ARGS["layers"]
    return Model("tiny", "llama", ARGS["d"], ARGS["vocab"], layers, "rmsnorm", False, 0, "bf16", 4096)


def layout(**changes: Any) -> Layout:
    return attrs.evolve(Layout(tp=ARGS["tp"], micro_batch=ARGS["b"], seq=ARGS["s"]), **changes)


def recorded(graph: Graph, times: int = 1) -> Table:
    """Count and bytes of a graph's collectives, as the oracle lists them."""
    table: Table = {"fwd": {}, "bwd": {}}
    for phase, name in ((phase, name) for name, phase in PHASES.items()):
        for op in graph.phase(phase):
            if row_of(op.kind).rule is Rule.COLLECTIVE:
                dtype = {"bf16": "bfloat16", "fp32": "float32"}[op.outputs[0].dtype]
                entry = table[name].setdefault(f"{op.kind}/{dtype}", {"count": 0, "bytes": 0})
                entry["count"] += times
                entry["bytes"] += times * comm_bytes(op)
    return table


def merged(*tables: Table) -> Table:
    whole: Table = {"fwd": {}, "bwd": {}}
    for table in tables:
        for phase, entries in table.items():
            for kind, entry in entries.items():
                total = whole[phase].setdefault(kind, {"count": 0, "bytes": 0})
                total["count"] += entry["count"]
                total["bytes"] += entry["bytes"]
    return whole


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("tp_sp_block", {"tp_regather": False}),
        ("megatron_sp_block", {}),
        ("tp_block_no_sp", {"sp": False}),
    ],
)
def test_one_layer_equals_the_oracle(case: str, changes: dict[str, Any]) -> None:
    program = lower(tiny_llama(), layout(**changes))
    assert recorded(program["dense"]) == COMM[case]


def test_the_whole_model_with_vocabulary_parallel_ends_equals_the_oracle() -> None:
    program = lower(tiny_llama(), layout(tp_regather=False))
    found = [recorded(program[run.template], run.count) for run in program.stages[0].runs]
    assert merged(*found) == COMM["tp_sp_model"]


def test_every_collective_runs_over_the_tensor_parallel_group() -> None:
    program = lower(tiny_llama(), layout())
    groups = {op.group for g in program.templates for op in g.ops if row_of(op.kind).rule is Rule.COLLECTIVE}
    assert groups == {(Axis("tp", 4, 1),)}


def test_without_tensor_parallelism_there_is_no_tensor_parallel_op() -> None:
    program = lower(tiny_llama(), layout(tp=1, dp=4))
    assert not [op for g in program.templates for op in g.ops if any(axis.name == "tp" for axis in op.group)]
    micro_batch = [op for g in program.templates for op in g.ops if op.phase is not Phase.STEP]
    assert not [op for op in micro_batch if op.group]


def test_norm_weight_gradients_wait_for_a_sum_over_tp_only_under_sequence_parallelism() -> None:
    with_sp = lower(tiny_llama(), layout())["dense"]["mlp.norm.dw"].outputs[0]
    without = lower(tiny_llama(), layout(sp=False))["dense"]["mlp.norm.dw"].outputs[0]
    assert str(with_sp) == "[d] sum(tp)"
    assert str(without) == "[d]"


def test_the_gradients_of_q_k_and_v_share_one_reduce_scatter() -> None:
    dense = lower(tiny_llama(), layout())["dense"]
    moved = [op for op in dense.phase(Phase.BACKWARD) if op.kind == "reduce_scatter"]
    assert [op.of for op in moved] == ["mlp.norm", "attn.norm"]
    assert [op.role for op in moved] == ["dx", "dx"]
