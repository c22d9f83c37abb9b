"""Laws for models with more than one kind of layer, and with experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepgraph.errors import InputError
from stepgraph.hwtargets import load_target
from stepgraph.ir.program import Program, shown_runs
from stepgraph.ir.verifier import verify, verify_program
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import count_parts, lower
from stepgraph.passes.base import setting
from stepgraph.passes.costing import costs
from stepgraph.passes.exchanges import exchanges
from stepgraph.passes.iteration import iterate
from stepgraph.passes.modelflops import count_params

H100 = setting(load_target("h100"))
CONFIGS = sorted((Path(__file__).parent / "data/hf").glob("*.json"))
STACKS = {
    "dense then experts": ("DeepSeek-V3", {"num_hidden_layers": 6}, Layout(dp=4, ep=4, seq=512, pp=2)),
    "five sliding, one full": ("gemma-3-27b-it", {"num_hidden_layers": 12}, Layout(tp=2, seq=2048)),
    "alternating": ("gpt-oss-20b", {"num_hidden_layers": 6}, Layout(tp=2, dp=4, ep=4, seq=512, recompute="full")),
    "chunked experts": ("Llama-4-Scout-17B-16E-Instruct", {"num_hidden_layers": 8}, Layout(dp=2, ep=2, seq=512, pp=2)),
    "predicting further": ("DeepSeek-V3", {"num_hidden_layers": 5}, Layout(dp=2, ep=2, seq=256, mtp=1)),
}


def lowered(name: str) -> Program:
    config, changes, layout = STACKS[name]
    return lower(load_model(Path(__file__).parent / f"data/hf/{config}.json", changes), layout)


@pytest.mark.parametrize("name", STACKS)
def test_rolled_totals_equal_unrolled_totals(name: str) -> None:
    program = lowered(name)
    for index, stage in enumerate(program.stages):
        long = program.unroll(index)
        verify(long)
        total = costs(long, H100)
        parts = [(costs(program[run.template], H100), run.count) for run in stage.runs]
        parts.append((costs(program[stage.step], H100), 1))
        for column in ("flops", "hbm_bytes", "comm_bytes", "kernels"):
            assert getattr(total, column).sum() == sum(n * int(getattr(cost, column).sum()) for cost, n in parts)
        assert total.time_s.sum() == pytest.approx(sum(n * cost.time_s.sum() for cost, n in parts), rel=1e-12)


@pytest.mark.parametrize("name", STACKS)
def test_buckets_add_up(name: str) -> None:
    iteration = iterate(lowered(name), H100)
    for buckets in iteration.buckets:
        assert buckets.total == pytest.approx(iteration.step_s, rel=1e-12)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_lowers_to_few_ops_or_is_refused(path: Path) -> None:
    try:
        model = load_model(path)
    except InputError as refused:
        assert all(problem.code.startswith("config-") for problem in refused.problems)
        return
    program = lower(model, Layout(seq=512))
    verify_program(program)
    assert sum(len(graph.ops) for graph in program.templates) < 600


def matmul_flops(layout: Layout) -> int:
    program = lower(load_model("mixtral-8x7b", {"num_hidden_layers": 4}), layout)
    per_rank = sum(
        run.count * int(costs(program[run.template], H100).flops.sum())
        for stage in program.stages
        for run in stage.runs
    )
    return per_rank * layout.tp * layout.dp * program.microbatches


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=8, ep=8, seq=64, global_batch=16),
        Layout(tp=2, dp=4, ep=4, etp=2, seq=64, global_batch=16),
        Layout(tp=4, dp=2, ep=8, seq=64, global_batch=16),
        Layout(tp=4, dp=2, ep=2, etp=2, pp=2, seq=64, global_batch=16),
    ],
    ids=str,
)
def test_matmul_flops_over_all_ranks_do_not_depend_on_expert_parallelism(layout: Layout) -> None:
    assert matmul_flops(layout) == matmul_flops(Layout(seq=64, global_batch=16))


def test_the_busiest_rank_is_what_counts() -> None:
    model = load_model("mixtral-8x7b", {"num_hidden_layers": 2})
    even, uneven = (lower(model, Layout(dp=8, ep=8, seq=256, expert_imbalance=x))["moe"] for x in (1.0, 1.5))
    name = "moe.experts.gate_up"
    assert uneven[name].outputs[0].elements == 1.5 * even[name].outputs[0].elements
    capacity = lower(model, Layout(dp=8, ep=8, seq=256, capacity_factor=1.25))["moe"]
    assert capacity[name].outputs[0].fraction == (2 * 5, 8 * 4)  # top-2 of 8, times 5/4


def test_the_inter_node_term() -> None:
    model = load_model("mixtral-8x7b", {"num_hidden_layers": 2})
    target = load_target("h100")
    inside = exchanges(lower(model, Layout(dp=8, ep=8, seq=4096)), target)[0]
    across = exchanges(lower(model, Layout(tp=2, dp=8, ep=8, etp=2, seq=4096)), target)[0]
    assert (inside.domains, inside.inter_fraction) == (1, 0.0)
    assert (across.domains, across.inter_fraction) == (2, 0.5)
    assert inside.size_bytes == 2 * 4096 * 4096 * 2  # k copies of m tokens, d wide, bf16
    assert across.flat_scale_up_s < across.time_s < across.flat_nic_s


def test_a_rack_of_72_is_one_level() -> None:
    model = load_model("deepseek-v3", {"num_hidden_layers": 4})
    found = exchanges(lower(model, Layout(dp=64, ep=64, seq=512)), load_target("gb200"))
    assert {exchange.domains for exchange in found} == {1}


@pytest.mark.parametrize("name", ["gemma-2-9b", "gpt-oss-20b", "DeepSeek-V3"])
def test_the_optimizer_updates_every_parameter_of_a_mixed_stack(name: str) -> None:
    model = load_model(Path(__file__).parent / f"data/hf/{name}.json")
    program = lower(model, Layout(seq=64))
    updated = sum(op.inputs[0].elements for op in program["step"].ops if op.kind == "adamw")
    assert updated == count_params(count_parts(model, 1, 64)).total


def test_every_stage_names_dense_and_expert_buffers_alike() -> None:
    layout = Layout(pp=4, dp=16, ep=8, seq=64)
    program = lower(load_model("mixtral-8x7b"), layout)
    for index, stage in enumerate(program.stages):
        step = program[stage.step]
        moved = {op.name: op for op in step.ops if op.kind == "reduce_scatter"}
        assert list(moved) == ["step.grads.reduce_scatter", "step.experts.grads.reduce_scatter"]
        dense, experts = moved.values()
        assert [axis.size for axis in experts.group] == [16 // 8]
        # 8 layers of q and out 4096 x 4096, k and v 4096 x 1024, a router 4096 x 8 and two norms
        layers = 8 * (2 * 4096**2 + 2 * 4096 * 1024 + 4096 * 8 + 2 * 4096)
        table, norm = 32000 * 4096, 4096
        assert dense.inputs[0].elements == layers + (table if index in (0, 3) else 0) + (norm if index == 3 else 0)
        assert experts.inputs[0].elements == 8 * 3 * 4096 * 14336  # one expert of each of 8 layers


@pytest.mark.parametrize("dp", [1, 8])
def test_experts_that_are_summed_over_the_same_ranks_share_the_dense_buffer(dp: int) -> None:
    program = lower(load_model("mixtral-8x7b", {"num_hidden_layers": 2}), Layout(dp=dp, seq=64))
    assert [op.name for op in program["step"].ops if op.kind == "adamw"] == ["step.adamw"]


def test_a_repeating_stage_is_shown_once() -> None:
    program = lower(load_model(Path(__file__).parent / "data/hf/gemma-2-9b.json"), Layout(seq=64))
    assert shown_runs(program.stages[0].runs) == "embedding, (sliding_dense, dense) x 21, head"


def test_large_counts_do_not_wrap() -> None:
    model = load_model("llama-3-8b")
    small, large = (
        iterate(lower(model, Layout(micro_batch=n, seq=8192)), H100).stages[0].backward.flops for n in (10_000, 100_000)
    )
    assert large == 10 * small
