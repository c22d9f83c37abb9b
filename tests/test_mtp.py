"""Multi-token prediction modules: asked for, left out, counted, and the table that they read at the last stage."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner

from stepgraph.cli import main
from stepgraph.errors import InputError
from stepgraph.ir.graph import Graph
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import lower
from stepgraph.lowering.model import Model
from stepgraph.lowering.resolution import resolve_layout
from stepgraph.prediction import predict
from stepgraph.report import Prediction

DEEPSEEK = load_model("deepseek-v3")  # one module, untied
MINIMAX = load_model(Path(__file__).parent / "data/hf/MiniMax-M2.5.json")  # three modules
LAYOUT = Layout(pp=16, dp=8, ep=8, seq=512)


def predicted(mtp: int) -> Prediction:
    return predict(DEEPSEEK, attrs.evolve(LAYOUT, mtp=mtp), "h200")


def warned(prediction: Prediction) -> list[str]:
    return [text for text in prediction.warnings if text.startswith("mtp:")]


@pytest.mark.parametrize(
    ("model", "asked", "held"),
    [
        (load_model("llama-3-8b"), 2, "the configuration has none"),
        (DEEPSEEK, 3000, "the configuration has 1"),
        (MINIMAX, 4, "the configuration has 3"),
    ],
)
def test_more_modules_than_the_configuration_has_are_refused(model: Model, asked: int, held: str) -> None:
    with pytest.raises(InputError, match="mtp-modules") as caught:
        resolve_layout(Layout(mtp=asked), model)
    (problem,) = caught.value.problems
    assert problem.what.startswith(f"{asked} multi-token") and problem.what.endswith(held)
    assert problem.fix == f"nearest possible: {model.mtp}"


def test_only_modules_that_are_left_out_are_warned_of() -> None:
    expected = "mtp: 1 multi-token prediction module is not part of the training step; --mtp 1 adds it"
    assert warned(predicted(0)) == [expected]
    assert not warned(predicted(1))
    two = predict(MINIMAX, Layout(dp=8, ep=8, seq=64, mtp=1), "h200")
    assert warned(two) == [
        "mtp: 2 of 3 multi-token prediction modules are not part of the training step; --mtp 3 adds them"
    ]


def test_the_graph_command_warns_beside_its_output() -> None:
    left, taken = (
        CliRunner().invoke(main, ["graph", "deepseek-v3", "--seq", "512", "--mtp", mtp, "--list"]) for mtp in "01"
    )
    assert "warning: mtp: 1 multi-token prediction module" in left.stderr
    assert "warning" not in left.stdout
    assert "mtp" not in taken.stderr


def module_params(d: int, routed: int) -> int:
    """Two norms and a projection of 2 d to d, a layer with so many routed experts, and its final norm."""
    query = d * 1536 + 1536 + 1536 * 128 * (128 + 64)
    key_value = d * (512 + 64) + 512 + 512 * 128 * (128 + 128)
    attention = query + key_value + 128 * 128 * d
    experts = d * 256 + (routed + 1) * 3 * d * 2048  # the router, routed and one shared
    return 2 * d + 2 * d * d + attention + 2 * d + experts + d


def test_modules_count_as_parameters_and_in_6_n() -> None:
    left, taken = predicted(0), predicted(1)
    assert left.params.total == 671_026_404_352
    assert taken.params.total - left.params.total == module_params(7168, 256)
    # a token visits 8 of 256 experts; the embedding and the head are the model's own
    assert taken.params.active - left.params.active == module_params(7168, 8)
    assert taken.params.multiplied - left.params.multiplied == module_params(7168, 8)
    assert taken.params.embedding == left.params.embedding == 129280 * 7168
    peak = taken.gpus * 989.4e12
    assert taken.mfu.active == pytest.approx(6 * taken.params.multiplied * taken.tokens_per_s / peak)
    # per second, the module's matmuls are model FLOPs too: at least those of its layer and its head
    counted = [p.mfu.model_flops / p.tokens_per_s for p in (left, taken)]
    least = 6 * (module_params(7168, 8) - 2 * 7168**2 - 7 * 7168 + 129280 * 7168 - 1536 - 512)
    assert counted[1] - counted[0] >= least / peak


def moved(step: Graph) -> dict[str, tuple[int, int]]:
    """Elements and ranks of what the pipeline's ends sum."""
    return {
        op.name: (op.inputs[0].elements, op.group[0].size) for op in step.ops if op.name.startswith("step.tied_grads")
    }


def test_the_table_of_the_modules_is_summed_over_the_ends() -> None:
    program = lower(DEEPSEEK, attrs.evolve(LAYOUT, mtp=1))
    both = {"step.tied_grads.all_reduce": (129280 * 7168, 2)}
    found = [moved(program[stage.step]) for stage in program.stages]
    assert found == [both, *[{}] * 14, both]
    (axis,) = program[program.stages[0].step]["step.tied_grads.all_reduce"].group
    assert axis.stride == 15 * 8  # from the first stage to the last, 8 ranks each


def test_nothing_is_summed_over_the_ends_without_a_shared_table() -> None:
    program = lower(DEEPSEEK, LAYOUT)
    assert not any(moved(program[stage.step]) for stage in program.stages)


def test_modules_away_from_the_head_are_refused_with_everything_else() -> None:
    model = load_model("deepseek-v3", {"num_hidden_layers": 4})
    layout = Layout(pp=3, mtp=1, pipeline_layout="Ett|ttm|L", global_batch=3, micro_batch=0)
    with pytest.raises(InputError) as caught:
        resolve_layout(layout, model)
    assert {problem.code for problem in caught.value.problems} >= {"pipeline-mtp", "layout-value"}
