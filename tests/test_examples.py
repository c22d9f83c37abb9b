"""Every example runs, and prints what its header promises."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from stepgraph.passes.fusing.pattern import FusionRule
from stepgraph.passes.fusing.sets import BASIC, rules_of

FOLDER = Path(__file__).parents[1] / "examples"
RULE_FILES = {
    "gemm_epilogue": ("linear_bias_gelu", "linear_bias"),
    "masked_softmax": ("masked_softmax",),
}


def printed(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(path.stem, capsys)


def test_gemms_take_their_bias_in_except_where_a_collective_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    """48 layers of four GEMMs with a bias, one of them with GELU; under TP two of the four are row-parallel."""
    one_gpu, tensor_parallel = printed("gemm_epilogue", capsys).strip().split("\n\n")
    assert "linear_bias_gelu: fused 48 of 48; still written saved 48" in one_gpu  # backward reads what enters GELU
    assert f"linear_bias: fused {3 * 48} of {4 * 48}; rejected overlap 48" in one_gpu
    assert "linear_bias_gelu: fused 96 of 96" in tensor_parallel
    assert f"linear_bias: fused 96 of {4 * 96}; rejected collective {2 * 96}, overlap 96" in tensor_parallel


def test_softmax_is_fused_up_to_4096_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """Scaled and masked scores (2 bytes) and their fp32 cast are neither written nor read, the fp32 probabilities are
    written for backward and no longer read: 2 (2 + 2 + 4) + 4 bytes for each of 4096 x 4096 scores of 32 heads."""
    short, long = printed("masked_softmax", capsys).strip().split("\n\n")
    assert "fused 1 of 1" in short and "fused 0 of 1; rejected check 1" in long
    scores = 32 * 4096**2
    saved = scores * (2 * (2 + 2 + 4) + 4)
    assert f"{19.285 - saved / 1e9:.3f}" in short


@pytest.mark.parametrize("name", RULE_FILES)
def test_rules_of_an_example_can_be_named_on_the_command_line_and_are_not_basic(name: str) -> None:
    rules = [rule for rule in rules_of(str(FOLDER / f"{name}.py")) if isinstance(rule, FusionRule)]
    assert tuple(rule.name for rule in rules) == RULE_FILES[name]
    assert all(rule.source for rule in rules)
    assert not {rule.name for rule in BASIC} & set(RULE_FILES[name])
    assert [len(rule.checks) for rule in rules] == [1, 0][: len(rules)]


def test_the_document_shows_what_the_claims_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    document = (FOLDER.parent / "docs" / "experts.md").read_text(encoding="utf-8")
    lines = [line.rstrip() for line in printed("source_claims", capsys).splitlines()]
    rows = [line for line in lines if re.match(r"\S+ +[\d.]", line)]
    assert len(rows) == 6 + 12 + 3
    assert [row for row in rows if row not in document] == []
