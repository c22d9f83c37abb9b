"""Launch models: the host's queue against a kernel by kernel walk, and what the front makes of it."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepgraph
from stepgraph.errors import InputError
from stepgraph.lowering.lowering import lower
from stepgraph.passes.base import Setting, setting
from stepgraph.passes.costing import costs
from stepgraph.passes.launch import Launching, Stretch, in_a_row, launching, stretch_of
from stepgraph.passes.stepping.stagecosts import cost_stages, cost_template

H100 = stepgraph.load_target("h100")
TINY = stepgraph.load_model("llama-3-8b", {"num_hidden_layers": 4})

times = st.floats(0, 10, allow_subnormal=False)
ops = st.lists(st.tuples(st.integers(0, 3), times), max_size=8)
issue = st.floats(0.01, 5, allow_subnormal=False)


def walked(found: list[tuple[int, float]], issue_s: float) -> float:
    """When the last kernel ends: the first is there at the start, each next one issue_s later."""
    issued = ended = 0.0
    for kernels, seconds in found:
        if not kernels:
            ended += seconds
        for _ in range(kernels):
            ended = max(ended, issued) + seconds / kernels
            issued += issue_s
    return ended


def stretch(found: list[tuple[int, float]], issue_s: float) -> Stretch:
    return stretch_of([k for k, _ in found], [t for _, t in found], Launching(0.0, issue_s))


@given(ops, issue)
def test_the_queue_is_a_walk_over_its_kernels(found: list[tuple[int, float]], issue_s: float) -> None:
    own = stretch(found, issue_s)
    assert own.device_s + own.dry_s == pytest.approx(walked(found, issue_s), abs=1e-9)


@given(ops, ops, st.integers(1, 5), issue)
def test_stretches_in_a_row_are_one_stretch(
    first: list[tuple[int, float]], second: list[tuple[int, float]], count: int, issue_s: float
) -> None:
    row = in_a_row([stretch(first, issue_s).times(count), stretch(second, issue_s)])
    whole = walked([*first * count, *second], issue_s)
    assert row.device_s + row.dry_s == pytest.approx(whole, abs=1e-9)
    assert row.issue_s == pytest.approx(issue_s * sum(n for n, _ in [*first * count, *second]))


def test_a_late_host_is_not_hidden_by_a_large_kernel_at_the_end() -> None:
    """Three kernels of 1 that are issued every 10, then one of 100: it starts at 30, ends at 130; work is 103."""
    late = stretch([(1, 1.0)] * 3 + [(1, 100.0)], 10.0)
    assert late.device_s == 103
    assert late.dry_s == 130 - 103


def test_no_kernels_take_no_time() -> None:
    assert stretch([], 1.0).dry_s == 0
    assert Stretch(1.0, 2.0, 3.0).times(0) == Stretch()


def test_models_differ_in_gap_and_host() -> None:
    gap, host = H100.launch.gap_s, H100.launch.host_issue_s
    found = {name: launching(H100, name) for name in ("additive", "host", "both")}
    assert {name: (own.gap_s, own.issue_s) for name, own in found.items()} == {
        "additive": (gap, 0.0),
        "host": (0.0, host),
        "both": (gap, host),
    }
    assert launching(H100, "both", cuda_graphs=True).issue_s == H100.launch.graph_node_s


@pytest.mark.parametrize(
    ("name", "graphs", "said"),
    [("addative", False, "Did you mean 'additive'"), ("additive", True, "launch host or both")],
)
def test_unknown_models_are_refused(name: str, graphs: bool, said: str) -> None:
    with pytest.raises(InputError, match=said):
        launching(H100, name, cuda_graphs=graphs)


def test_a_target_without_a_figure_for_graphs_is_told() -> None:
    bare = attrs.evolve(H100, launch=attrs.evolve(H100.launch, graph_node_s=None))
    with pytest.raises(InputError, match=r"launch\.graph_node_s in the target file"):
        setting(bare, cuda_graphs=True)


def step_s(seq: int, launch: str, **more: Any) -> float:
    return stepgraph.predict(TINY, stepgraph.Layout(seq=seq), H100, launch=launch, **more).step_time_s


def test_where_the_host_keeps_up_both_is_additive() -> None:
    assert step_s(4096, "both") == step_s(4096, "additive") > step_s(4096, "host")


def test_where_it_does_not_the_step_is_its_issue_time() -> None:
    """A micro-batch of 8 tokens: forward and backward each take what the host needs to issue their kernels."""
    chosen = setting(H100, launch="host")
    program = lower(TINY, stepgraph.Layout(seq=8))
    (stage,) = cost_stages(program, {graph.name: costs(graph, chosen) for graph in program.templates}, chosen)
    issue_s = H100.launch.host_issue_s
    assert stage.forward.time_s == pytest.approx(stage.forward.kernels * issue_s, rel=0.25)
    assert stage.forward.time_s >= (stage.forward.kernels - 1) * issue_s
    assert stage.dry_s == pytest.approx(stage.forward.buckets.launch + stage.backward.buckets.launch)
    assert step_s(8, "both") < step_s(8, "additive") + stage.dry_s
    assert step_s(8, "both", cuda_graphs=True) == pytest.approx(step_s(8, "additive"), rel=1e-6)


def test_what_would_help_depends_on_what_is_slow() -> None:
    def warned(seq: int, **more: Any) -> str:
        return " ".join(stepgraph.predict(TINY, stepgraph.Layout(seq=seq), H100, **more).warnings)

    assert "launch-bound" in warned(128) and "host-bound" not in warned(128)
    assert "host-bound: the device waits" in warned(16) and "CUDA graphs" in warned(16)
    assert "CUDA graphs" not in warned(16, cuda_graphs=True)
    found = stepgraph.predict(TINY, stepgraph.Layout(seq=16), H100)
    assert 0 < found.host_wait_s < found.buckets_s.launch


@pytest.mark.parametrize("launch", ["host", "both"])
@pytest.mark.parametrize("model", ["llama-3-8b", "gemma-2-9b"])
def test_a_rolled_stage_waits_as_its_layers_written_out(model: str, launch: str) -> None:
    """Kernel by kernel over the unrolled stage: the rolled one sums and repeats templates."""
    chosen = setting(H100, launch=launch)
    layers = {"num_hidden_layers": 6}
    program = lower(stepgraph.load_model(model, layers), stepgraph.Layout(seq=64, pp=2, global_batch=2))
    stages = cost_stages(program, {graph.name: costs(graph, chosen) for graph in program.templates}, chosen)
    for index, stage in enumerate(stages):
        written = cost_template(costs(program.unroll(index), chosen), chosen)
        assert stage.dry_s == pytest.approx(written.forward.stretch.dry_s + written.backward.stretch.dry_s, rel=1e-9)
        assert stage.dry_s > 0


def test_a_setting_has_the_launch_model_it_was_given() -> None:
    assert Setting(setting(H100).profile, target=H100).launching == launching(H100, "both")
