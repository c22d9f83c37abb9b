"""Shapes, FLOPs and efficiencies that the compute rule gives to named ops."""

from __future__ import annotations

import pytest

from stepgraph.hwtargets.efficiency import eta_shape_gemm, eta_shape_sdpa
from stepgraph.hwtargets.reading import load_target
from stepgraph.ir.rows import flops_of
from stepgraph.ir.table import row_of
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import lower
from stepgraph.passes.base import setting
from stepgraph.passes.buckets import bucket_of
from stepgraph.passes.gemm import efficiency, gemm_shape

H100 = load_target("h100")
SHAPE = setting(H100, eta="shape")


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        ("moe.router", (4096, 8, 4096)),  # tokens x experts, over d = 4096
        ("moe.router.dx", (4096, 4096, 8)),
        ("moe.router.dw", (8, 4096, 4096)),
        ("moe.experts.gate_up", (1024, 28672, 4096)),  # 2 of 8 experts: 4096 x 2 / 8 tokens each; 2 x 14336 wide
        ("moe.experts.down", (1024, 4096, 14336)),
    ],
)
def test_gemm_shapes_of_an_expert_layer(op: str, shape: tuple[int, int, int]) -> None:
    graph = lower(load_model("mixtral-8x7b"), Layout(seq=4096))["moe"]
    assert gemm_shape(graph[op], row_of(graph[op].kind)) == shape


def test_a_router_has_the_efficiency_of_its_shape() -> None:
    graph = lower(load_model("mixtral-8x7b", {"num_local_experts": 64}), Layout(seq=8192))["moe"]
    op = graph["moe.router"]
    expected = eta_shape_gemm(H100, 8192, 64, 4096, role="fwd", out_bytes=4)  # fp32 logits
    assert efficiency(op, row_of(op.kind), SHAPE) == expected
    assert 0.1 < expected < 0.4


def test_attention_in_a_window_has_the_efficiency_of_the_window() -> None:
    program = lower(load_model("gpt-oss-20b"), Layout(seq=8192))
    found = set()
    for graph in program.templates:
        for op in graph.ops:
            if op.kind == "sdpa_sink":
                found.add((op.attr("window"), efficiency(op, row_of(op.kind), SHAPE)))
    assert found == {(128, eta_shape_sdpa(H100, 128, 64, "fwd")), (None, eta_shape_sdpa(H100, 8192, 64, "fwd"))}


def test_flash_backward_of_latent_attention_counts_both_widths() -> None:
    graph = lower(load_model("deepseek-v3"), Layout(seq=4096))["dense"]
    forward, backward = (flops_of(op, row_of(op.kind)) for op in graph.ops if op.kind in ("sdpa", "sdpa_dx"))
    pairs = 128 * 4096 * 4096 // 2  # heads x causal half
    assert forward == 2 * pairs * (192 + 128)
    assert backward == 2 * pairs * (3 * 192 + 2 * 128)


def test_gradients_of_experts_are_data_parallel_time_whatever_their_atoms_are_called() -> None:
    program = lower(load_model("mixtral-8x7b"), Layout(tp=8, seq=4096))  # etp 1: experts are replicated over TP ranks
    buckets = {op.name: bucket_of(op) for op in program[program.stages[0].step].ops if op.group}
    assert buckets.pop("step.replicated_grads.all_reduce") == "tp"  # norm weights under sequence parallelism
    assert len(buckets) > 1 and set(buckets.values()) == {"dp"}
