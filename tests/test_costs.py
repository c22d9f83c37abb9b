"""Laws of the cost passes: what must hold whatever the constants."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.errors import InputError
from stepgraph.hwtargets import Target, load_target
from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.program import Program
from stepgraph.ir.rows import Rule
from stepgraph.ir.table import ROWS, UnknownKindError, row_of
from stepgraph.ir.tensor import Axis, Tensor
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import lower
from stepgraph.passes.base import setting
from stepgraph.passes.buckets import Buckets
from stepgraph.passes.collective import collective_s, crosses_domain, geometry_of
from stepgraph.passes.costing import Costs, costs
from stepgraph.passes.iteration import iterate, time_step
from stepgraph.passes.launch import kappa
from stepgraph.passes.profiles import PROFILES, operand_bytes
from stepgraph.passes.stepping.parts import Part, StageCost
from stepgraph.passes.stepping.stagecosts import cost_stages

H100 = setting(load_target("h100"))
LAYOUTS = (
    Layout(seq=256),
    Layout(tp=2, seq=256),
    Layout(tp=4, sp=False, seq=256),
    Layout(tp=2, dp=4, pp=2, global_batch=32, seq=256),
    Layout(tp=2, dp=2, zero=0, global_batch=4, seq=256, recompute="selective"),
    Layout(pp=4, global_batch=8, seq=256, recompute="full"),
)


def small(name: str = "llama-3-8b", layers: int = 8) -> Program:
    return lower(load_model(name, {"num_hidden_layers": layers}), Layout(tp=2, seq=256))


def program_of(layout: Layout) -> Program:
    return lower(load_model("llama-3-8b", {"num_hidden_layers": 8}), layout)


def slower_hbm(target: Target) -> Target:
    return attrs.evolve(
        target, hbm=attrs.evolve(target.hbm, bandwidth_bytes_per_s=target.hbm.bandwidth_bytes_per_s / 2)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_halving_the_hbm_rate_doubles_every_op_on_the_hbm_rule_and_no_other(layout: Layout, profile: str) -> None:
    fast, slow = setting(H100.target, profile), setting(slower_hbm(H100.target), profile)
    for graph in program_of(layout).templates:
        before, after = costs(graph, fast), costs(graph, slow)
        is_hbm = np.array([row_of(op.kind).rule is Rule.HBM for op in graph.ops])
        np.testing.assert_allclose(after.hbm_s, 2 * before.hbm_s, rtol=1e-12)
        assert (before.hbm_s[~is_hbm] == 0).all()
        np.testing.assert_array_equal(after.compute_s, before.compute_s)
        np.testing.assert_array_equal(after.comm_s, before.comm_s)


def matmul_flops_over_ranks(layout: Layout) -> int:
    """Forward, input-gradient and weight-gradient FLOPs of all ranks for one global batch."""
    program = program_of(layout)
    ranks = layout.tp * layout.dp
    total = 0
    for stage in program.stages:
        for run in stage.runs:
            cost = costs(program[run.template], H100)
            total += run.count * int(cost.flops.sum())
    return total * ranks * program.microbatches


@settings(max_examples=25)
@given(tp=st.sampled_from([1, 2, 4, 8]), pp=st.sampled_from([1, 2, 4, 8]), dp=st.sampled_from([1, 2]), sp=st.booleans())
def test_matmul_flops_over_all_ranks_do_not_depend_on_the_layout(tp: int, pp: int, dp: int, sp: bool) -> None:
    one = matmul_flops_over_ranks(Layout(seq=64, global_batch=8))
    laid_out = Layout(tp=tp, pp=pp, dp=dp, sp=sp and tp > 1, seq=64, global_batch=8)
    assert matmul_flops_over_ranks(laid_out) == one


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rolled_totals_equal_unrolled_totals(layout: Layout) -> None:
    program = program_of(layout)
    for index, stage in enumerate(program.stages):
        long = costs(program.unroll(index), H100)
        layers = [(costs(program[run.template], H100), run.count) for run in stage.runs]
        layers.append((costs(program[stage.step], H100), 1))
        for column in ("flops", "hbm_bytes", "comm_bytes", "kernels"):
            assert getattr(long, column).sum() == sum(n * int(getattr(cost, column).sum()) for cost, n in layers)
        assert long.time_s.sum() == pytest.approx(sum(n * cost.time_s.sum() for cost, n in layers), rel=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_buckets_add_up_to_the_step_on_every_stage(layout: Layout) -> None:
    iteration = iterate(program_of(layout), H100)
    for buckets in iteration.buckets:
        assert buckets.total == pytest.approx(iteration.step_s, rel=1e-12)
        assert min(attrs.astuple(buckets)) >= 0


@given(
    stages=st.integers(1, 9),
    n=st.integers(1, 40),
    forward=st.floats(1e-6, 1.0),
    backward=st.floats(1e-6, 3.0),
    before=st.floats(0, 1.0),
    after=st.floats(0, 1.0),
)
def test_closed_form_equals_simulation_on_equal_stages_with_free_transfers(
    stages: int, n: int, forward: float, backward: float, before: float, after: float
) -> None:
    f, b, start, end = (Part(Buckets(gemm=time)) for time in (forward, backward, before, after))
    free = [0.0] * (stages - 1)
    step = time_step([StageCost(f, b, start, end)] * stages, n, free, free)
    assert step.step_s == pytest.approx(step.closed_form_s, rel=1e-9)
    assert step.bubble_simulated == pytest.approx(step.bubble_closed_form, abs=1e-9)


def test_step_is_never_below_its_busiest_stage() -> None:
    iteration = iterate(program_of(Layout(pp=4, global_batch=8, seq=256)), H100)
    work = max(8 * stage.micro_batch.time_s + stage.step.time_s for stage in iteration.stages)
    assert iteration.step_s >= work


def layer_passes(profile: str, phase: Phase, tokens: int = 8192) -> float:
    """HBM traffic of a Llama-3-8B layer outside GEMMs and attention, in tensors of m x d x 2 bytes."""
    program = lower(load_model("llama-3-8b"), Layout(seq=tokens))
    ops = [op for op in program["dense"].phase(phase) if row_of(op.kind).rule is Rule.HBM]
    traffic = sum(operand_bytes(op, PROFILES[profile][op.kind]) for op in ops)
    return traffic / (tokens * 4096 * 2)


def test_reference_passes_of_a_layer_are_the_source_text_counts() -> None:
    # two norms 2 x 3, RoPE on q and k 3 x 1.25, two residuals 2 x 2, GLU 3 x 3.5
    assert layer_passes("reference", Phase.FORWARD) == pytest.approx(6 + 3.75 + 4 + 10.5, rel=2e-3)
    # two norms 2 x 5, RoPE 3 x 1.25, two forks 2 x 3, GLU 5 x 3.5
    assert layer_passes("reference", Phase.BACKWARD) == pytest.approx(10 + 3.75 + 6 + 17.5, rel=2e-3)


def test_exact_passes_of_a_layer_are_those_of_the_best_single_op_kernels() -> None:
    # norms 2 x 2, RoPE 2 x 1.25, residuals 2 x 3, GLU 3 x 3.5; the published figure 23.1 counts RoPE's tables too
    assert layer_passes("exact", Phase.FORWARD) == pytest.approx(4 + 2.5 + 6 + 10.5, rel=2e-3)
    assert layer_passes("exact", Phase.FORWARD) == pytest.approx(23.1, rel=0.02)
    # norms 2 x (3 + 0.06 of partial weight gradients), RoPE 2.5, forks 6, GLU 17.5
    assert layer_passes("exact", Phase.BACKWARD) == pytest.approx(6.13 + 2.5 + 6 + 17.5, rel=2e-3)
    assert layer_passes("exact", Phase.BACKWARD) == pytest.approx(32.2, rel=0.02)


def test_kernels_of_a_dense_layer_by_hand() -> None:
    program = lower(load_model("llama-3-8b"), Layout(tp=2, seq=256))
    # norm, qkv, rope q, rope k, attention, out, add; norm, gate_up, swiglu, down, add; four collectives
    assert kappa(program["dense"], PROFILES["reference"]).forward == 7 + 5 + 4
    # down 2, swiglu, gate_up 2, norm 2, fork; out 2, attention 3, rope 2, qkv 2, norm 2, fork; six collectives
    assert kappa(program["dense"], PROFILES["reference"]).backward == 8 + 12 + 6


def test_adamw_moves_what_the_source_says() -> None:
    step = lower(load_model("llama-3-8b"), Layout(dp=4, seq=256, global_batch=4))["step"]
    cost = costs(step, H100)
    position = [op.name for op in step.ops].index("step.adamw")
    n = 8030261248 // 4  # parameters of one data rank
    assert cost.hbm_bytes[position] == 16 * n  # both fp32 moments, read and written: 2 x 8 bytes
    assert cost.flops[position] == 11 * n
    exact = costs(step, setting(H100.target, "exact"))
    assert exact.hbm_bytes[position] == 30 * n


def test_zero_0_reduces_all_gradients_and_zero_1_shards_them() -> None:
    sharded = lower(load_model("llama-3-8b"), Layout(dp=4, seq=256, global_batch=4))["step"]
    whole = lower(load_model("llama-3-8b"), Layout(dp=4, zero=0, seq=256, global_batch=4))["step"]
    assert [op.kind for op in sharded.ops] == ["reduce_scatter", "grad_norm", "adamw", "all_gather"]
    assert [op.kind for op in whole.ops] == ["all_reduce", "grad_norm", "adamw"]
    n = 8030261248
    assert [t.nbytes for t in sharded.ops[0].inputs] == [4 * n]  # fp32 gradients
    assert [t.nbytes for t in sharded.ops[-1].outputs] == [2 * n]  # bf16 parameters


def test_a_ring_by_hand() -> None:
    target = H100.target
    tp = Axis("tp", 8, 1)
    x = Tensor("x", "p", (32 * 2**20,), "bf16")
    op = Op("x.all_gather", "all_gather", (x,), (x,), group=(tp,))
    size = 64 * 2**20  # in the (16 MiB, 128 MiB] bucket of the fitted efficiencies: 0.64
    level = target.scale_up
    expected = level.t0_s + 7 * level.t_link_s + 7 / 8 * size / (0.64 * 450e9)
    geometry = geometry_of((tp,), 8)
    assert collective_s(op, size, target, geometry) == pytest.approx(expected, rel=1e-12)
    assert collective_s(attrs.evolve(op, kind="all_reduce"), size, target, geometry) == pytest.approx(2 * expected)


def test_a_data_parallel_ring_over_nodes_uses_the_nics_of_its_ranks() -> None:
    dp = Axis("dp", 4, 8)  # tp 8 fills a node, so each node has one rank of this group
    geometry = geometry_of((dp,), 8)
    assert (geometry.ranks_per_domain, geometry.domains) == (1, 4)
    assert crosses_domain(Axis("pp", 2, 8), 0, 1, 8)
    assert not crosses_domain(Axis("pp", 8, 1), 3, 4, 8)


def test_an_unknown_kind_is_an_error_with_a_suggestion() -> None:
    graph = Graph("g", (Op("a", "rmsnrm", (), ()),))
    with pytest.raises(UnknownKindError, match="did you mean 'rmsnorm'"):
        costs(graph, H100)


def test_every_kind_has_a_source_and_a_row_in_every_profile() -> None:
    for row in ROWS:
        assert row.source and row.meaning
        for profile in PROFILES.values():
            assert profile[row.kind].source


def test_unknown_profile_and_law_are_refused() -> None:
    with pytest.raises(InputError, match="Did you mean 'exact'"):
        setting(H100.target, "exakt")
    with pytest.raises(InputError, match="constant or shape"):
        setting(H100.target, eta="tuned")


def test_an_empty_graph_costs_nothing() -> None:
    cost: Costs = costs(Graph("empty", ()), H100)
    assert cost.time_s.sum() == 0


def test_stages_are_costed_once_per_template() -> None:
    program = program_of(Layout(pp=4, global_batch=8, seq=256))
    costed = {graph.name: costs(graph, H100) for graph in program.templates}
    stages = cost_stages(program, costed, H100)
    assert stages[1] == stages[2]
    assert stages[0].forward.time_s > stages[1].forward.time_s  # the embedding
    assert stages[3].backward.time_s > stages[1].backward.time_s  # the head
