"""What --fusions may name: sets, files, rules of files; and what a broken file is told."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner

import stepgraph
from stepgraph.cli import main
from stepgraph.errors import InputError
from stepgraph.ir.graph import Group
from stepgraph.ir.program import SeamGroups
from stepgraph.ir.rewriting import Rewrite
from stepgraph.passes.fusing.grouping import FusionReport
from stepgraph.passes.fusing.pattern import FusionRule
from stepgraph.passes.fusing.sets import BASIC, RULE_SETS, as_rules, rules_of
from stepgraph.soundfusing import fuse_soundly

HEAD = "from stepgraph.passes import fusion\n"
NORM = """
@fusion(phase="forward")
def my_norm(op, x, r, w):
    return op.rmsnorm(op.add(x, r), w)
"""
ROPE = """
@fusion(phase="forward")
def my_rope(op, q, k):
    return op.rope(q), op.rope(k)
"""


def written(folder: Path, *parts: str, name: str = "my_rules.py") -> str:
    path = folder / name
    path.write_text("".join(parts), encoding="utf-8")
    return str(path)


def rule_names(rules: Iterable[FusionRule | Rewrite]) -> tuple[str, ...]:
    return tuple(rule.name for rule in rules)


def problem_of(text: str) -> tuple[str, str, str]:
    """Code, place and what was found of the only problem."""
    with pytest.raises(InputError) as refused:
        rules_of(text)
    (problem,) = refused.value.problems
    return problem.code, problem.where, problem.what


def test_sets_have_names() -> None:
    assert rules_of("none") == ()
    assert rules_of("basic") == BASIC == RULE_SETS["basic"]
    assert len(set(rule_names(BASIC))) == len(BASIC)
    assert rules_of("basic,none, basic") == BASIC  # a rule that is named twice is one rule


def test_every_basic_rule_says_where_its_kernel_exists() -> None:
    assert all("/" in rule.source for rule in BASIC)


def test_a_file_gives_all_its_rules_or_those_that_are_picked(tmp_path: Path) -> None:
    path = written(tmp_path, HEAD, NORM, ROPE)
    assert rule_names(rules_of(path)) == ("my_norm", "my_rope")
    assert rule_names(rules_of(f"{path}:my_rope")) == ("my_rope",)
    assert rule_names(rules_of(f"{path}:my_rope+my_norm")) == ("my_rope", "my_norm")
    assert rule_names(rules_of(f"{path}:my_norm,basic"))[:2] == ("my_norm", BASIC[0].name)
    assert not (tmp_path / "__pycache__").exists()  # nothing is left beside the user's file


def test_a_file_runs_only_when_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "raise RuntimeError('it ran')\n")
    assert rules_of("basic") == BASIC
    assert problem_of("my_rules.py") == ("rules-file", "my_rules.py:1", "RuntimeError: it ran")


def test_what_a_file_prints_is_not_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules_of(written(tmp_path, HEAD, "print('hello')\n", NORM))
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "hello\n")


def test_rewrites_of_a_file_come_along(tmp_path: Path) -> None:
    made = "from stepgraph.ir.rewriting import Rewrite\nsplit = Rewrite('split', 'logical', lambda graph: graph)\n"
    assert rule_names(rules_of(written(tmp_path, HEAD, made, NORM))) == ("split", "my_norm")


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("x = (\n", 1, "is no Python: '(' was never closed"),
        ("x = 1\n1 / 0\n", 2, "ZeroDivisionError: division by zero"),
        ("def f():\n    raise KeyError('k')\n\n\nf()\n", 2, "KeyError: 'k'"),
        ("import no_such_module\n", 1, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(3)\n", 1, "SystemExit: 3"),
        (HEAD + "@fusion\ndef r(op, x):\n    return op.rmsnrm(x)\n", 2, "no op kind 'rmsnrm'; did you mean 'rmsnorm'?"),
        (HEAD + "@fusion\ndef r(op, x, y):\n    return op.add(x, x)\n", 2, "parameter 'y' of rule 'r' is never used"),
        (HEAD + "@fusion(phase='onward')\ndef r(op, x):\n    return op.rope(x)\n", 2, "no phase 'onward' for rule 'r'"),
        (HEAD + "@fusion\ndef r(op, x):\n    return x\n", 2, "rule 'r' has to return what leaves the kernel"),
        (
            HEAD + "@fusion\ndef r(op, x):\n    return op.rope(x.t)\n",
            4,
            "AttributeError: 'Var' object has no attribute",
        ),
        ("x = '\0'\n", 1, "is no Python: source code string cannot contain null bytes"),
    ],
)
def test_a_broken_file_is_told_where_and_what(tmp_path: Path, text: str, line: int, what: str) -> None:
    path = written(tmp_path, text)
    code, where, found = problem_of(path)
    assert (code, where) == ("rules-file", f"{path}:{line}")
    assert what in found


def test_a_file_that_is_not_there_or_empty_is_refused(tmp_path: Path) -> None:
    assert problem_of("nowhere.py") == ("rules-file", "nowhere.py", "there is no such file")
    path = written(tmp_path, "x = 1\n")
    assert problem_of(path) == ("rules-file", path, "defines no fusion rule")


@pytest.mark.parametrize("text", ["", "megatron", "basic;none", "rules.txt"])
def test_an_unknown_set_is_refused(text: str) -> None:
    assert problem_of(text)[0] == "fusions"


def test_a_rule_that_is_not_in_the_file_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Did you mean 'my_norm'"):
        rules_of(f"{written(tmp_path, HEAD, NORM)}:my_nrm")


def test_two_rules_of_one_name_are_refused(tmp_path: Path) -> None:
    one, other = (written(tmp_path, HEAD, NORM, name=name) for name in ("one.py", "other.py"))
    assert problem_of(f"{one},{other}") == ("fusions", "--fusions", "two rules are called 'my_norm'")


def test_a_rule_of_a_file_takes_the_place_of_one_of_a_set(tmp_path: Path) -> None:
    path = written(tmp_path, HEAD, NORM.replace("my_norm", "add_rmsnorm"))
    rules = rules_of(f"basic,{path}")
    assert len(rules) == len(BASIC)
    assert rules[-1].name == "add_rmsnorm" and rules[-1] not in BASIC


def test_python_callers_may_give_rules_or_their_names() -> None:
    assert as_rules("basic") == as_rules(list(BASIC)) == BASIC
    assert as_rules([]) == ()
    with pytest.raises(InputError, match="'basic' is no fusion rule"):
        as_rules(["basic"])  # type: ignore[list-item]


# predict and graph


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_predict_without_fusions_is_what_it_was() -> None:
    plain = run("predict", "llama-3-8b", "--json")
    assert run("predict", "llama-3-8b", "--json", "--fusions", "none") == plain
    assert '"fusions"' not in plain
    assert run("predict", "llama-3-8b", "--fusions", "none") == run("predict", "llama-3-8b")
    assert "fusions" not in run("predict", "llama-3-8b")
    assert "kernel " not in run("graph", "llama-3-8b")


def test_predict_records_the_rules_and_is_faster() -> None:
    layout, rules = stepgraph.Layout(), BASIC[:7]
    plain = stepgraph.predict("llama-3-8b", layout, "h100")
    fused = stepgraph.predict("llama-3-8b", layout, "h100", fusions=rules)
    assert fused.fusions == tuple(rule.name for rule in rules)
    assert fused.to_json()["fusions"] == fused.fusions
    # 64 norms with their adds, forward: one launch less each; 64 backward kernels of 3 ops: 3 launches -> 2
    assert plain.kernels_per_rank - fused.kernels_per_rank == 64 + 64
    assert fused.step_time_s < plain.step_time_s
    assert stepgraph.predict("llama-3-8b", layout, "h100", fusions="basic").step_time_s <= fused.step_time_s


def test_predict_notes_that_a_rewrite_fuses_nothing(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "from stepgraph.ir.rewriting import Rewrite\nsplit = Rewrite('split', 'logical', lambda graph: graph)\n",
    )
    assert "note: [relower] split: replaces ops by others" in run("predict", "llama-3-8b", "--fusions", path)


def test_graph_shows_kernels() -> None:
    shown = run("graph", "llama-3-8b", "--fusions", "basic", "--no-costs")
    assert [line.split(" rule=")[1] for line in shown.splitlines() if line.startswith("kernel ")] == [
        "rmsnorm_backward_add launches=2",
        "rmsnorm_backward_add launches=2",
        "add_rmsnorm",
        "rope_pair",
    ]


CHECK = """
@my_norm.check
def my_norm(m):
    m.nosuch
"""


@pytest.mark.parametrize("command", ["predict", "graph", "fuse"])
def test_a_check_that_fails_is_its_files_fault(command: str, tmp_path: Path) -> None:
    path = written(tmp_path, HEAD, NORM, CHECK)
    result = CliRunner().invoke(main, [command, "llama-3-8b", "--fusions", path])
    assert (result.exit_code, result.stdout) == (2, "")
    line = (HEAD + NORM + CHECK).splitlines().index("    m.nosuch") + 1
    assert f"error: {path}:{line}: AttributeError: the match has no tensor 'nosuch'; it has x, r, w" in result.stderr


def test_the_reference_page_lists_every_basic_rule_with_its_source() -> None:
    page = (Path(__file__).parents[1] / "docs/fusing.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    listed = [(row[0].strip("|` "), row[-1].removesuffix(" |")) for row in rows if len(row) == 4]
    assert listed == [(rule.name, rule.source) for rule in BASIC]


def test_kernels_that_wait_for_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    program = stepgraph.lower(stepgraph.load_model("llama-3-8b"), stepgraph.Layout(seq=64))
    waits = Group("k", "r", ("left.mlp.residual", "right.attn.qkv"))  # the norm between them is outside
    cyclic = attrs.evolve(program, seam_groups=(SeamGroups("dense", "dense", (waits,)),))
    monkeypatch.setattr("stepgraph.soundfusing.fuse", lambda *_: (cyclic, FusionReport((), ())))
    with pytest.raises(InputError, match="kernels wait for each other"):
        fuse_soundly(program, [])


@pytest.mark.parametrize(
    ("check", "said"),
    [
        ("def my_norm():\n    pass\n", "takes one argument, the match"),
        ("def my_norm(m):\n    raise SystemExit(0)\n", "SystemExit"),
        ("def my_norm(m):\n    return False\n", "returned False; call m.reject"),
        ("def my_norm(m):\n    return 1 / 0\n", "ZeroDivisionError"),
    ],
)
def test_a_check_that_fails_is_told_with_file_and_line(tmp_path: Path, check: str, said: str) -> None:
    path = written(tmp_path, HEAD, NORM, "\n@my_norm.check\n", check)
    result = CliRunner().invoke(main, ["fuse", "llama-3-8b", "--fusions", path, "--json"])
    assert result.exit_code == 2
    assert said in result.stderr and f"{path}:" in result.stderr


def test_what_a_check_prints_is_no_output(tmp_path: Path) -> None:
    path = written(tmp_path, HEAD, NORM, "\n@my_norm.check\ndef my_norm(m):\n    print('here')\n")
    result = CliRunner().invoke(main, ["fuse", "llama-3-8b", "--fusions", path, "--json"])
    assert "here" in result.stderr
    assert json.loads(result.stdout)["rules"][0]["fused"] == 64


def test_a_second_rule_of_a_name_is_refused_and_a_check_is_none(tmp_path: Path) -> None:
    code, where, what = problem_of(written(tmp_path, HEAD, NORM, NORM))
    assert (code, what) == ("rules-file", "a second rule is called 'my_norm'; the first is in line 4")
    assert where.endswith(":8")
