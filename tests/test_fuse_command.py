"""`stepgraph fuse`: numbers with their arithmetic, and what a script can hold on to."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

import stepgraph
from stepgraph.cli import main
from stepgraph.passes.base import setting
from stepgraph.passes.fusing.programs import fuse
from stepgraph.passes.fusing.sets import rules_of
from stepgraph.passes.moduletotals import HOST, module_totals
from stepgraph.rendering import find_engine

ONE = 4096 * 4096 * 2
"""Bytes of one hidden tensor of Llama-3-8B: sequence x hidden x bf16."""
LAYERS = 32
NORMS = 2 * LAYERS + 1

RULES = """
from stepgraph.passes import fusion

@fusion(phase="forward")
def norm_after_add(op, x, r, w):
    return op.rmsnorm(op.add(x, r), w)

@fusion(phase="forward")
def never(op, x):
    return op.softcap(op.softcap(x))
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["fuse", *arguments])


def run_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def refused(*arguments: str) -> str:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    return result.stderr


@pytest.fixture(scope="module")
def llama() -> Any:
    """Llama-3-8B with all of the basic rules."""
    return run_json("llama-3-8b")


@pytest.fixture
def rules(tmp_path: Path) -> str:
    path = tmp_path / "my_rules.py"
    path.write_text(RULES, encoding="utf-8")
    return str(path)


def rule_of(found: Any, name: str) -> Any:
    return next(rule for rule in found["rules"] if rule["name"] == name)


TOTALS = {"kernels", "hbm_bytes", "flops", "saved_bytes", "time_s", "launch_s"}


def test_json_has_the_documented_fields(llama: Any) -> None:
    assert set(llama) == {
        *("launch", "cuda_graphs", "overlap", "p2p_mode"),
        *("model", "target", "gpus", "layout", "profile", "eta", "n_microbatches", "fusions", "against", "rules"),
        *("before", "after", "fused_kernels", "warnings", "notes"),
    }
    assert (llama["model"], llama["target"], llama["gpus"]) == ("llama-3-8b", "h100", 1)
    assert llama["layout"]["seq"] == 4096
    assert llama["fusions"] == [rule["name"] for rule in llama["rules"]]
    assert llama["against"] == []
    for rule in llama["rules"]:
        assert set(rule) == {"name", "matched", "fused", "rejected", "notes"}
    for side in (llama["before"], llama["after"]):
        assert set(side) == TOTALS | {"step_time_s", "phases", "modules", "mfu"}
        assert set(side["phases"]) == {"forward", "backward", "step"}
        assert set(side["modules"]) == {"embedding", "attn", "mlp", "stream", "head", "step"}
        for totals in (*side["phases"].values(), *side["modules"].values()):
            assert set(totals) == TOTALS


@pytest.mark.parametrize("part", ["phases", "modules"])
@pytest.mark.parametrize("side", ["before", "after"])
def test_parts_add_up(llama: Any, side: str, part: str) -> None:
    found = llama[side]
    for name in ("kernels", "hbm_bytes", "flops", "saved_bytes"):
        assert sum(totals[name] for totals in found[part].values()) == found[name]
    for name in ("time_s", "launch_s"):
        assert sum(totals[name] for totals in found[part].values()) == pytest.approx(found[name], rel=1e-12)


def test_add_and_norm_saves_one_pass_at_every_site() -> None:
    found = run_json("llama-3-8b", "--fusions", "basic", "--against", "none", "--require", "add_rmsnorm=64")
    # every norm but the first follows a residual add: two per layer, less the first, plus the head's
    assert NORMS - 1 == 64
    rule = rule_of(found, "add_rmsnorm")
    assert (rule["matched"], rule["fused"], rule["rejected"]) == (64, 64, {})
    # what it adds is read again by the next residual (and by backward); behind the last layer only by backward
    assert rule["notes"] == {"escape": 63, "saved": 1}
    before, after = found["before"]["phases"]["forward"], found["after"]["phases"]["forward"]
    # the sum is still written, but not read again by the norm: 64 sites x 4096 tokens x 4096 x 2 bytes
    assert before["hbm_bytes"] - after["hbm_bytes"] == 64 * 4096 * 4096 * 2
    assert before["kernels"] - after["kernels"] == 64 + LAYERS  # and RoPE of q and k in one launch
    assert after["saved_bytes"] == before["saved_bytes"]
    assert found["before"]["flops"] == found["after"]["flops"]


def test_norm_backward_saves_four_passes_at_every_site(llama: Any) -> None:
    before, after = llama["before"]["phases"]["backward"], llama["after"]["phases"]["backward"]
    # 64 times dx of the norm stays inside (a write and a read), dy and x are read once for dx and dw;
    # once, at the head, no gradient is added: only the last two
    assert before["hbm_bytes"] - after["hbm_bytes"] == (64 * 4 + 2) * ONE
    assert before["kernels"] - after["kernels"] == 64 * (3 - 2)


def test_a_rule_of_a_file_against_another_set(rules: str) -> None:
    found = run_json("llama-3-8b", "--fusions", f"{rules}:norm_after_add", "--against", "basic")
    assert found["fusions"] == ["norm_after_add"]
    assert len(found["against"]) == len(rules_of("basic"))
    # the same 64 reads forward on both sides; basic saves what it saves in backward besides
    assert found["before"]["phases"]["forward"]["hbm_bytes"] == found["after"]["phases"]["forward"]["hbm_bytes"]
    assert found["after"]["hbm_bytes"] - found["before"]["hbm_bytes"] == (64 * 4 + 2) * ONE
    assert found["after"]["step_time_s"] > found["before"]["step_time_s"]


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_modules_add_up_where_collectives_run_beside_gemms(schedule: str) -> None:
    """Weight gradients run apart under zbv, and hide no collective; modules say so as phases do."""
    layout = ("--tp", "4", "--pp", "2", "--vpp", "2", "--schedule", schedule, "--seq", "1024", "--global-batch", "8")
    plain, found = (run_json("llama-3-8b", *layout, "--overlap", name) for name in ("none", "tp-comm-overlap"))
    for side in ("before", "after"):
        modules = sum(totals["time_s"] for totals in found[side]["modules"].values())
        assert modules == pytest.approx(found[side]["time_s"], rel=1e-12)
        assert modules < plain[side]["time_s"]


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--overlap", "tp-comm-overlap"), "overlap-tp-comm", "tp-comm-overlap with tp = 1"),
        (("--overlap", "overlap-moe-expert-parallel-comm"), "overlap-expert-comm", "with ep = 1"),
        (
            ("--pp", "2", "--vpp", "2", "--schedule", "dualpipev", "--global-batch", "3"),
            "pipeline-microbatches",
            "global_batch: DualPipeV with pp = 2 cannot take n = 3",
        ),
    ],
)
def test_what_predict_refuses_is_refused_in_its_words(options: tuple[str, ...], code: str, said: str) -> None:
    fused, predicted = (CliRunner().invoke(main, [name, "llama-3-8b", *options]) for name in ("fuse", "predict"))
    assert (fused.exit_code, fused.stderr) == (predicted.exit_code, predicted.stderr)
    assert fused.exit_code == 2
    assert f"[{code}]" in fused.stderr
    assert said in fused.stderr


def test_step_time_and_mfu_are_those_of_predict(llama: Any) -> None:
    for side, fusions in (("before", "none"), ("after", "basic")):
        prediction = stepgraph.predict("llama-3-8b", stepgraph.Layout(), "h100", fusions=fusions)
        assert llama[side]["step_time_s"] == prediction.step_time_s
        assert llama[side]["mfu"]["model_flops"] == pytest.approx(prediction.mfu.model_flops, rel=1e-12)


def test_savings_of_kernels_add_up_to_what_was_saved(llama: Any) -> None:
    saved = sum(
        kernel["times"] * sum(saving["bytes"] for saving in kernel["savings"]) for kernel in llama["fused_kernels"]
    )
    assert saved == llama["before"]["hbm_bytes"] - llama["after"]["hbm_bytes"]
    launches = sum(
        kernel["times"] * (kernel["launches_before"] - kernel["launches"]) for kernel in llama["fused_kernels"]
    )
    assert launches == llama["before"]["kernels"] - llama["after"]["kernels"]


def test_a_pipeline_cuts_a_site_at_every_boundary() -> None:
    found = run_json("llama-3-8b", "--tp", "2", "--pp", "4")
    rule = rule_of(found, "add_rmsnorm")
    assert (rule["matched"], rule["fused"], rule["rejected"]) == (64, 64 - 3, {"stage": 3})
    before, after = found["before"]["phases"]["forward"], found["after"]["phases"]["forward"]
    assert before["hbm_bytes"] - after["hbm_bytes"] == 61 * ONE // 2  # each rank holds half of the tokens


@pytest.mark.parametrize("layout", [{"tp": 2, "pp": 2}, {"recompute": "full"}])
@pytest.mark.parametrize("name", ["gemma-2-9b", "mixtral-8x7b"])
def test_modules_of_the_program_are_those_of_the_stages_written_out(name: str, layout: dict[str, Any]) -> None:
    chosen = setting(stepgraph.load_target("h100"))
    program, _ = fuse(
        stepgraph.lower(stepgraph.load_model(name), stepgraph.Layout(seq=512, **layout)), rules_of("basic")
    )
    rolled = module_totals(program, chosen)
    written: Counter[str] = Counter()
    time_s: Counter[str] = Counter()
    for stage in range(len(program.stages)):
        for module, totals in module_totals(program.unroll(stage), chosen).items():
            written[f"{module} bytes"] += totals.hbm_bytes
            written[f"{module} kernels"] += totals.kernels
            time_s[module] += totals.time_s  # type: ignore[assignment]
    assert written == {
        key: value
        for module, totals in rolled.items()
        if module != HOST  # waits for the host are those of a whole pass over a stage
        for key, value in ((f"{module} bytes", totals.hbm_bytes), (f"{module} kernels", totals.kernels))
    }
    modules = {module: totals.time_s for module, totals in rolled.items() if module != HOST}
    assert time_s == pytest.approx(modules, rel=1e-9)


# What people read


def test_the_tables_say_what_fused_and_what_it_brought() -> None:
    shown = run("llama-3-8b").stdout
    assert f"fusions basic ({len(rules_of('basic'))} rules) against none" in shown
    assert re.search(r"add_rmsnorm +64 +64 +escape 63, saved 1", shown)
    assert re.search(r"no site: .*layernorm_backward", shown)
    assert re.search(r"forward +405 -> 309 +-23\.7% +83\.217 -> 81\.070", shown)  # 405 - 64 - 32; 64 x 33.55 MB
    assert re.search(r"step +366\.\d+ ms -> 36\d\.\d+ ms +\(-1\.\d\d%\)", shown)
    assert "What each kernel" not in shown


def test_savings_are_listed_tensor_by_tensor() -> None:
    shown = run("llama-3-8b", "--savings").stdout
    # 33.554 MB = 4096 x 4096 x 2 bytes, 32 times = 1.074 GB
    assert re.search(
        r"add_rmsnorm in dense +attn\.residual \+ mlp\.norm +launches 2 -> 1 +33\.554 +x 32 +1\.074", shown
    )
    assert re.search(r"%attn\.residual +read inside by mlp\.norm +33\.554", shown)
    assert re.search(r"add_rmsnorm in dense -> dense +left\.mlp\.residual \+ right\.attn\.norm .* x 31 ", shown)


def test_rules_that_change_nothing_say_so() -> None:
    shown = run("llama-3-8b", "--fusions", "none").stdout
    assert "(unchanged)" in shown
    assert "->" not in shown.split("launch ms")[1].split("step  ")[0]
    assert "Modules that changed" not in shown


# --require and --forbid


def test_demands_that_hold_are_silent() -> None:
    result = run("llama-3-8b", "--require", "add_rmsnorm=64", "--forbid", "add_layernorm", "--forbid", "rope")
    assert (result.exit_code, result.stderr) == (0, "")


def test_a_rule_that_fused_less_often_fails_with_the_reasons() -> None:
    result = run("llama-3-8b", "--tp", "2", "--pp", "2", "--require", "add_rmsnorm=64", "--require", "add_layernorm=1")
    assert result.exit_code == 1
    assert "add_rmsnorm" in result.stdout  # the tables are there all the same
    first, second = result.stderr.splitlines()
    assert first.startswith(
        "error: --require add_rmsnorm=64: fused 63 times of 64 matches, rejected: stage 1 ([stage] "
    )
    assert "expected at least 64" in first
    assert first.endswith("[require]")
    assert "--require add_layernorm=1: fused nowhere" in second


def test_a_forbidden_kind_fails_while_one_is_outside_every_kernel() -> None:
    result = run("llama-3-8b", "--forbid", "rmsnorm", "--forbid", "swiglu", "--forbid", "rope")
    assert result.exit_code == 1
    first, second = result.stderr.splitlines()
    # of 65 norms only the very first has no residual add before it
    assert "--forbid rmsnorm: 1 outside every fused kernel: dense/attn.norm 1 of 32; expected none [forbid]" in first
    assert "--forbid swiglu: 32 outside every fused kernel: dense/mlp.act 32 of 32" in second


def test_a_forbidden_rule_fails_once_it_fused() -> None:
    result = run("llama-3-8b", "--forbid", "rope_pair")
    assert result.exit_code == 1
    assert "--forbid rope_pair: the rule fused 32 times (dense: attn.rope_q + attn.rope_k)" in result.stderr


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--require", "add_rmsnrm=64", "Did you mean 'add_rmsnorm'? [rule]"),
        ("--require", "add_rmsnorm", "expected RULE=COUNT"),
        ("--require", "add_rmsnorm=-1", "expected RULE=COUNT"),
        ("--require", "rmsnorm=1", "no rule 'rmsnorm'"),
        ("--forbid", "rmsnrm", "Did you mean 'rmsnorm'? [forbid]"),
        ("--forbid", "0", "`stepgraph ops` lists the kinds"),
        ("--explain", "add_rmsnorm", "expected RULE@OP"),
        ("--explain", "add_rmsnrm@mlp.norm", "Did you mean 'add_rmsnorm'?"),
        ("--explain", "add_rmsnorm@mlp.nrm", "Did you mean 'mlp.norm'? [explain]"),
        ("--explain", "add_rmsnorm@head/mlp.norm", "no op 'mlp.norm'"),
        ("--explain", "add_rmsnorm@dens/mlp.norm", "Did you mean 'dense'?"),
        ("--svg", "layer.png", "expected .svg"),
        ("--svg", "no-such-folder/layer.svg", "there is no folder"),
        ("--template", "dense", "--svg FILE"),
        ("--against", "basc", "Did you mean 'basic'?"),
        ("--vpp", "2", "vpp"),
    ],
)
def test_bad_options_are_refused(option: str, value: str, said: str) -> None:
    assert said in refused("llama-3-8b", option, value)


def test_all_bad_options_are_told_at_once() -> None:
    said = refused("llama-3-8b", "--require", "a=1", "--require", "b", "--forbid", "c").splitlines()
    assert len(said) == 3


# --explain


def test_explain_inside_a_layer() -> None:
    assert run("llama-3-8b", "--explain", "add_rmsnorm@dense/mlp.norm").stdout.startswith(
        "dense (32 times): add_rmsnorm fuses at mlp.norm: attn.residual, mlp.norm; [escape] mlp.residual"
    )


def test_explain_across_seams() -> None:
    first, second = run("llama-3-8b", "--explain", "add_rmsnorm@attn.norm").stdout.splitlines()
    matched, missed = sorted((first, second))
    assert matched.startswith("dense -> dense (31 times): add_rmsnorm fuses at right.attn.norm: left.mlp.residual")
    assert missed.startswith("embedding -> dense (1 time): add_rmsnorm does not match")
    assert missed.endswith("made by left.embedding.tokens (embedding), expected add")


def test_explain_tells_the_nearest_miss_and_refusals() -> None:
    shown = run("llama-3-8b", "--explain", "add_layernorm@mlp.norm").stdout
    assert "mlp.norm is rmsnorm, " in shown
    shown = run("llama-3-8b", "--explain", "rmsnorm_backward@mlp.norm.dx").stdout
    assert "is refused: [overlap] mlp.norm.dx: is in kernel" in shown


def test_explain_in_json() -> None:
    (answer,) = run_json("llama-3-8b", "--explain", "rope_pair@attn.rope_q")["explain"]
    assert (answer["where"], answer["times"]) == ("dense", 32)
    assert answer["text"] == "rope_pair fuses at attn.rope_q: attn.rope_q, attn.rope_k"


def test_a_rewrite_is_reported_as_one(tmp_path: Path) -> None:
    path = tmp_path / "rewrites.py"
    path.write_text(
        "from stepgraph.ir.rewriting import Rewrite\nsplit = Rewrite('split', 'logical', lambda graph: graph)\n",
        encoding="utf-8",
    )
    found = run_json("llama-3-8b", "--fusions", str(path))
    assert set(rule_of(found, "split")["rejected"]) == {"relower"}
    assert rule_of(found, "split")["fused"] == 0
    assert (
        "[relower] split: replaces ops"
        in run("llama-3-8b", "--fusions", str(path), "--explain", "split@mlp.norm").stdout
    )
    assert "relower 1" in run("llama-3-8b", "--fusions", str(path), "--require", "split=1").stderr


# --svg

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.skipif(find_engine("svg") is None, reason="needs a Graphviz engine: the extra `render`")
@pytest.mark.parametrize(("part", "kernels", "changed"), [("dense", 4, 10), ("dense+dense", 9, 22)])
def test_svg_shows_both_sides(part: str, kernels: int, changed: int, tmp_path: Path) -> None:
    path = tmp_path / "layer.svg"
    result = run("llama-3-8b", "--svg", str(path), "--template", part)
    assert (result.exit_code, result.stderr.startswith(f"{path}: {part} before and after")) == (0, True)
    root = ElementTree.parse(path).getroot()
    before, after = root.findall(f"{SVG}svg")
    assert float(after.attrib["x"]) > float(before.attrib["width"])
    names = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    assert len(names) == len(set(names))
    boxes = [title.text for title in after.iter(f"{SVG}title") if (title.text or "").startswith("cluster_kernel")]
    assert len(boxes) == kernels
    assert not [title for title in before.iter(f"{SVG}title") if (title.text or "").startswith("cluster_kernel")]
    for side in (before, after):  # thick rims: add + norm, two norm backwards of three ops, RoPE of q and k
        assert sum(element.attrib.get("stroke-width") == "3" for element in side.iter()) == changed
