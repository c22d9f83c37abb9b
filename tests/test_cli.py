"""The command line as its users meet it: output, JSON, and one clear error with exit code 2 for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result

from stepgraph.cli import COMMANDS, main
from stepgraph.passes.buckets import NAMES
from stepgraph.tables import seconds

CONFIGS = Path(__file__).parents[1] / "lowering/configs"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def run_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def refused(*arguments: str) -> str:
    """Standard error of a refused command: exit code 2, nothing on standard output, no traceback."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"stepgraph {command}" in result.stdout.split("Examples:")[1]


def test_predict_json_has_the_documented_fields() -> None:
    found = run_json("predict", "llama-3-8b", "--tp", "2", "--pp", "2", "--gpus", "8", "--global-batch", "16")
    assert list(found["buckets_s"]) == list(NAMES)
    assert (
        *("gemm", "attention", "hbm", "tp", "ep", "cp", "pp_transfer", "pp_wait", "dp", "launch", "optimizer", "idle"),
    ) == NAMES
    assert sum(found["buckets_s"].values()) == pytest.approx(found["step_time_s"])
    for stage in found["stages"]:
        assert sum(stage["buckets_s"].values()) == pytest.approx(found["step_time_s"])
    assert found["n_microbatches"] == 16 // 2
    assert found["tokens_per_s"] == pytest.approx(16 * 4096 / found["step_time_s"])
    assert found["tokens_per_s_per_gpu"] == pytest.approx(found["tokens_per_s"] / 8)
    assert found["mfu"]["active"] == pytest.approx(
        6 * (8030261248 - 525336576) * found["tokens_per_s"] / (8 * 989.4e12)
    )
    assert set(found["params"]) >= {"total", "active", "embedding"}
    assert set(found["bubble"]) == {"closed_form", "simulated"}
    for name in ("step_time_closed_form_s", "roofline_s", "kernels_per_rank", "backward_over_forward", "warnings"):
        assert name in found


def fields(found: object) -> set[str]:
    """Every key at any depth."""
    if isinstance(found, list):
        return set().union(*map(fields, found))
    return set(found).union(*map(fields, found.values())) if isinstance(found, dict) else set()


@pytest.mark.parametrize(
    "arguments",
    [
        ("predict", "llama-3-8b", "--pp", "2", "--global-batch", "8"),
        ("predict", "mixtral-8x7b", "--gpus", "8", "--ep", "8"),
        ("flops", "mixtral-8x7b", "--set", "num_hidden_layers=1"),
    ],
)
def test_every_field_of_the_json_is_documented(arguments: tuple[str, ...]) -> None:
    text = (Path(__file__).parents[1] / "docs/json.md").read_text(encoding="utf-8")
    found = run_json(*arguments)
    if arguments[0] == "flops":
        found["families"] = list(found["families"].values())  # named by what the model has
    assert {name for name in fields(found) if f"`{name}`" not in text} == set()


@pytest.mark.parametrize("arguments", [("predict", "llama-3-8b", "--pp", "2"), ("flops", "llama-3-8b"), ("models",)])
def test_tables_have_no_blanks_at_the_end_of_a_line(arguments: tuple[str, ...]) -> None:
    lines = run(*arguments).stdout.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    if arguments[0] == "flops":
        assert "" not in lines[3:]  # below the title of the table


@pytest.mark.parametrize(("value", "shown"), [(0.0, "0"), (7e-8, "0"), (2e-7, "0.2 us"), (0.0025, "2.500 ms")])
def test_durations(value: float, shown: str) -> None:
    assert seconds(value) == shown


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_bars_are_drawn_with_what_the_terminal_has(encoding: str) -> None:
    result = CliRunner(charset=encoding).invoke(main, ["predict", "llama-3-8b"])
    assert result.exit_code == 0
    assert "####" in result.stdout
    assert "?" not in result.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [["--help"], ["predict", "--help"], ["--version"], ["targets"]])
def test_a_full_disk_is_said_in_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "stepgraph", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr == "error: the output could not be written: No space left on device [output]\n"


def test_predict_prints_a_table() -> None:
    result = run("predict", "llama-3-8b", "--gpus", "16", "--tp", "4", "--pp", "2", "--global-batch", "8")
    assert result.exit_code == 0
    for word in ("step ", "MFU", "bubble", "gemm", "Stages", "warning: bubble: n = 4 micro-batches are fewer than 4P"):
        assert word in result.stdout


def test_the_table_says_what_is_out_of_the_ordinary() -> None:
    dense = run("predict", "llama-3-8b", "--gpus", "2").stdout
    assert dense.startswith("llama-3-8b on 2 x h100: tp 1, pp 1, dp 2, zero 1\n")
    assert "parameters      8,030,261,248\n" in dense
    options = ("--gpus", "16", "--tp", "2", "--ep", "4", "--etp", "2", "--seq", "64")
    sparse = run("predict", "mixtral-8x7b", *options, "--capacity-factor", "1.25", "--pad-vocab", "128").stdout
    line = (
        "mixtral-8x7b on 16 x h100: tp 2 (sp), ep 4, etp 2, pp 1, dp 8, zero 1, capacity factor 1.25, pad vocab 128\n"
    )
    assert sparse.startswith(line)
    # of 8 experts of 3 x 4096 x 14336 in 32 layers a token leaves out 6
    total = 46_702_792_704
    active = total - 32 * 6 * 3 * 4096 * 14336
    assert f"parameters      {total:,}   {active:,} active\n" in sparse
    further = run(
        "predict", "deepseek-v3", "--gpus", "64", "--pp", "8", "--ep", "8", "--seq", "64", "--mtp", "1"
    ).stdout
    assert further.startswith("deepseek-v3 on 64 x h100: tp 1, ep 8, pp 8, dp 8, zero 1, mtp 1\n")


def test_the_rank_option_chooses_the_stage() -> None:
    arguments = ("predict", "llama-3-8b", "--pp", "4", "--tp", "2", "--global-batch", "16")
    first, last = (run_json(*arguments, "--rank", rank) for rank in ("1", "7"))
    assert first["buckets_s"] == first["stages"][0]["buckets_s"]
    assert last["buckets_s"] == last["stages"][3]["buckets_s"]
    assert "0 to 7" in refused(*arguments, "--rank", "8")


def test_check_verifies_before_it_predicts() -> None:
    result = run("predict", "llama-3-8b", "--tp", "2", "--check", "--json")
    assert result.exit_code == 0
    assert result.stderr == "every graph verifies\n"


def test_set_changes_the_model() -> None:
    short = run_json("flops", "llama-3-8b", "--set", "num_hidden_layers=4")
    long = run_json("flops", "llama-3-8b")
    assert 8 * short["families"]["qkv"]["fwd"] == long["families"]["qkv"]["fwd"]


def test_flops_json_has_the_documented_fields() -> None:
    found = run_json(
        "flops", str(CONFIGS / "llama-3-8b.json"), "--seq", "4100", "--micro-batch", "2", "--attention", "full"
    )
    assert set(found["params"]) >= {"total", "active", "embedding"}
    assert list(found["families"]) == ["qkv", "sdpa", "attn_out", "mlp_up", "mlp_down", "lm_head"]
    assert all(set(family) == {"fwd", "dgrad", "wgrad"} for family in found["families"].values())
    sdpa = found["families"]["sdpa"]
    assert (sdpa["dgrad"], sdpa["wgrad"]) == (2 * sdpa["fwd"], 0)
    # 4 m h s head_dim per layer: m = 2 x 4100 tokens, 32 heads of 128
    assert found["families"]["sdpa"]["fwd"] == 32 * 4 * (2 * 4100) * 4100 * 32 * 128


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--seq", "5000"), "seq-positions"),  # the table has 1024 rows
        (("--seq", "0"), "layout-value"),
        (("--micro-batch", "0"), "layout-value"),
        (("--micro-batch", "1000000000"), "too-many-tokens"),
    ],
)
def test_flops_has_the_limits_of_predict(options: tuple[str, ...], code: str) -> None:
    assert code in refused("flops", "gpt2-xl", *options)
    assert code in refused("predict", "gpt2-xl", *options)


def test_tables_of_ops_targets_and_models() -> None:
    assert "rmsnorm_dx" in run("ops").stdout
    assert "arXiv:1910.07467" in run("ops", "rmsnorm").stdout
    assert {row["kind"] for row in run_json("ops")} >= {"linear", "adamw"}
    names = [row["name"] for row in run_json("targets")]
    assert names == ["a100-40", "a100-80", "b200", "gb200", "h100", "h200", "mi300x"]
    assert all(figure["source"] for row in run_json("targets") for figure in row["figures"].values())
    assert "measured" in run("targets", "H100").stdout
    carried = run_json("models")
    assert {"llama-3-8b", "llama-3-70b", "qwen2.5-7b"} <= {row["name"] for row in carried}


def test_doctor_says_what_is_installed() -> None:
    found = run_json("doctor")
    assert found["missing"] == []
    assert found["versions"]["stepgraph"] == "0.1.0"


def test_graph_prints_text_that_reads_back() -> None:
    from stepgraph.ir.text import parse
    from stepgraph.lowering.huggingface import load_model
    from stepgraph.lowering.layout import Layout
    from stepgraph.lowering.lowering import lower

    result = run("graph", "llama-3-8b", "--tp", "2")
    assert result.exit_code == 0
    assert parse(result.stdout) == lower(load_model("llama-3-8b"), Layout(tp=2))["dense"]
    listed = run("graph", "llama-3-8b", "--pp", "2", "--list").stdout
    assert "stage 0: embedding, dense x 16, send | step.0" in listed


def test_graph_writes_dot_and_text_files(tmp_path: Path) -> None:
    for name, start in (("layer.dot", "digraph"), ("layer.txt", "graph dense")):
        result = run("graph", "llama-3-8b", "--tp", "2", "-o", str(tmp_path / name))
        assert result.exit_code == 0, result.output
        assert start in (tmp_path / name).read_text()


def test_a_folder_that_is_not_there_is_refused_whatever_the_suffix(tmp_path: Path) -> None:
    for name in ("x.txt", "x.TXT", "x.dot", "x.svg"):
        assert "[no-folder]" in refused("graph", "llama-3-8b", "-o", str(tmp_path / "nowhere" / name))


def test_a_suffix_in_capitals_means_the_same(tmp_path: Path) -> None:
    for name, start in (("layer.TXT", "graph dense"), ("layer.Dot", "digraph")):
        result = run("graph", "llama-3-8b", "--max-ops", "1", "-o", str(tmp_path / name))  # no limit for a text
        assert result.exit_code == 0, result.output
        assert (tmp_path / name).read_text().startswith(start)


@pytest.mark.parametrize("stages", ["E|t*16|t*16|L", "Et*16|t*16||L"])
def test_graph_shows_the_first_layer_wherever_it_runs(stages: str) -> None:
    result = run("graph", "llama-3-8b", "--pp", "4", "--pipeline-layout", stages)
    assert result.exit_code == 0
    assert result.stdout.startswith("graph dense")


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_a_truncated_config_is_refused(tmp_path: Path) -> None:
    text = (CONFIGS / "llama-3-8b.json").read_text()
    stderr = refused("predict", write(tmp_path, "config.json", text[: len(text) // 2]))
    assert "config.json" in stderr and "line" in stderr


def test_a_config_without_layers_is_refused(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "llama-3-8b.json").read_text())
    del config["num_hidden_layers"]
    assert "num_hidden_layers" in refused("predict", write(tmp_path, "config.json", json.dumps(config)))


def test_all_problems_of_a_config_are_named_at_once(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "llama-3-8b.json").read_text())
    config |= {"hidden_size": "4096", "num_attention_heads": -32, "vocab_size": None}
    stderr = refused("predict", write(tmp_path, "config.json", json.dumps(config)))
    assert all(name in stderr for name in ("hidden_size", "num_attention_heads", "vocab_size"))


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "llama-3-8b.json").read_text()) | {
        "model_type": "lama",
        "architectures": ["LamaForCausalLM"],
    }
    assert "llama" in refused("predict", write(tmp_path, "config.json", json.dumps(config)))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--tp", "3"), "tp-heads"),
        (("--micro-batch", "-1"), "micro_batch"),
        (("--global-batch", "-8"), "global_batch"),
        (("--global-batch", "7", "--gpus", "2"), "batch-multiple"),
        (("--pp", "33"), "pp-layers"),
        (("--cp", "2"), "layout-not-modelled"),
        (("--ep", "2"), "ep-needs-experts"),
        (("--etp", "2"), "ep-needs-experts"),
        (("--capacity-factor", "2"), "capacity_factor = 2.0, but llama-3-8b has no experts"),
        (("--expert-imbalance", "3"), "expert_imbalance = 3.0, but llama-3-8b has no experts"),
        (("--dp", "3", "--gpus", "2"), "gpus-dp"),
        (("--pp", "8", "--schedule", "gpipe", "--global-batch", "100000000"), "too-many-micro-batches"),
        (("--vpp", "2"), "vpp-needs-pp"),
        (("--vpp", "2", "--pp", "2", "--schedule", "1f1b"), "schedule-chunks"),
        (("--zero", "3"), "zero"),
        (("--schedule", "gpip"), "Did you mean 'gpipe'"),
        (("--recompute", "some"), "recompute"),
        (("--gpus", "6", "--tp", "4"), "gpus-multiple"),
        (("--target", "h1000"), "target-unknown"),
        (("--profile", "exakt"), "profile"),
        (("--eta", "tuned"), "eta"),
        (("--set", "num_hidden_layers"), "set-syntax"),
        (("--seq", "0"), "seq"),
    ],
)
def test_impossible_options_are_refused_with_a_code(options: tuple[str, ...], expected: str) -> None:
    stderr = refused("predict", "llama-3-8b", *options)
    assert expected in stderr
    assert stderr.startswith("error: ")


def test_every_unknown_name_is_reported_at_once() -> None:
    stderr = refused("predict", "llama-3-8b", "--profile", "foo", "--eta", "bar")
    assert [line.split(":")[1] for line in stderr.splitlines()] == [" --profile", " --eta"]


def test_the_list_names_ranks_and_chunks_and_each_step_once() -> None:
    result = run("graph", "llama-3-8b", "--pp", "4", "--vpp", "3", "--list")
    lines = [line for line in result.stdout.splitlines() if line.startswith("stage")]
    assert lines[0] == "stage 0 (rank 0, chunk 0): embedding, dense x 2, send | step.0"
    assert lines[4] == "stage 4 (rank 0, chunk 1): recv, dense x 3, send"
    assert sum("| step" in line for line in lines) == 4  # one per rank, for all its chunks
    # 32 = 12 x 2 + 8: eight stages around the middle get a third layer
    assert "32 layers over 12 stages are uneven (2 2 3 3 3 3 3 3 3 3 2 2)" in result.stderr
    assert run("graph", "llama-3-8b", "--pp", "4", "--vpp", "2", "--list").stderr == ""


def test_tp_3_with_32_heads_names_the_nearest_possible_values() -> None:
    stderr = refused("predict", "llama-3-8b", "--tp", "3")
    assert "32" in stderr and "2" in stderr and "4" in stderr


def test_a_target_with_a_missing_figure_is_refused(tmp_path: Path) -> None:
    source = Path(__file__).parents[1] / "hwtargets/data/h100.toml"
    lines = [line for line in source.read_text().splitlines() if not line.startswith("bandwidth_bytes_per_s")]
    stderr = refused("predict", "llama-3-8b", "--target", write(tmp_path, "mine.toml", "\n".join(lines)))
    for key in ("hbm.bandwidth_bytes_per_s", "scale_up.bandwidth_bytes_per_s", "nic.bandwidth_bytes_per_s"):
        assert key in stderr  # all problems of one file at once


def test_a_directory_for_a_file_is_refused(tmp_path: Path) -> None:
    assert "directory" in refused("predict", str(tmp_path))
    assert "directory" in refused("predict", "llama-3-8b", "--target", str(tmp_path))


def test_unknown_templates_stages_kinds_and_suffixes_are_refused(tmp_path: Path) -> None:
    assert "did you mean 'dense'".lower() in refused("graph", "llama-3-8b", "--template", "dens").lower()
    assert "0 to 0" in refused("graph", "llama-3-8b", "--stage", "1")
    assert "one of them" in refused("graph", "llama-3-8b", "--stage", "0", "--template", "dense")
    assert "rmsnorm" in refused("ops", "rmsnrm")
    assert "svg" in refused("graph", "llama-3-8b", "-o", str(tmp_path / "layer.xyz"))


class Elsewhere:
    """A path that is neither text nor a `Path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


@pytest.mark.parametrize("kind", [str, Path, Elsewhere])
def test_python_facade_takes_names_and_any_path(kind: Any) -> None:
    import stepgraph

    config, target = CONFIGS / "llama-3-8b.json", Path(__file__).parents[1] / "hwtargets/data/h100.toml"
    assert stepgraph.load_model(kind(config)).n_layers == 32
    found = stepgraph.predict(kind(config), stepgraph.Layout(), kind(target))
    named = stepgraph.predict("llama-3-8b", stepgraph.Layout(), "h100")
    assert found.step_time_s == named.step_time_s


def test_python_facade_predicts_and_refuses_what_is_not_there_yet() -> None:
    import stepgraph

    model, target = stepgraph.load_model("llama-3-8b"), stepgraph.load_target("h100")
    prediction = stepgraph.predict(model, stepgraph.Layout(tp=2), target)
    assert isinstance(prediction, stepgraph.Prediction)
    assert json.loads(json.dumps(prediction.to_json()))["gpus"] == 2
    with pytest.raises(stepgraph.InputError, match="fusion"):
        stepgraph.predict(model, stepgraph.Layout(), target, fusions="megatron")
    with pytest.raises(AttributeError):
        _ = stepgraph.nothing
    assert "predict" in dir(stepgraph)
    assert attrs.has(stepgraph.Prediction)
