"""Parameters, total and active, equal the sum over the checkpoint's tensors, to the integer, and what model cards say."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import stepgraph.lowering
from checkpoint_shapes import checkpoint, count
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.lowering import count_parts
from stepgraph.passes.modelflops import Params, count_params

FOLDER = Path(__file__).parent / "data/hf"
CARRIED = Path(stepgraph.lowering.__file__).parent / "configs"
REFUSED = {"Nemotron-H-56B-Base-8K", "Qwen3-Next-80B-A3B", "bert-large-uncased"}


def files(folder: Path) -> Iterable[Any]:
    return [pytest.param(path, id=path.stem) for path in sorted(folder.glob("*.json")) if path.stem not in REFUSED]


@cache
def counted(path: Path) -> Params:
    return count_params(count_parts(load_model(path), 1, 1))


@pytest.mark.parametrize("path", [*files(FOLDER), *files(CARRIED)])
def test_parameters_are_the_sum_over_the_checkpoint(path: Path) -> None:
    raw = json.loads(path.read_text(encoding="utf-8"))
    assert (counted(path).total, counted(path).active) == count(checkpoint(raw), raw)


def test_every_file_is_compared() -> None:
    assert len([*files(FOLDER)]) == 40 - len(REFUSED)
    assert len([*files(CARRIED)]) >= 14


# what model cards and reports say, in billions, with as many digits as they give -------------------------------------


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("DeepSeek-V2-Lite", "15.7"),
        ("DeepSeek-V3", "671"),
        ("Kimi-K2-Instruct", "1026"),  # "1T", 1.03e12
        ("Llama-2-70b", "69"),
        ("Llama-3-70B", "70.6"),
        ("Llama-3-8B", "8.03"),
        ("Llama-3.2-1B-Instruct", "1.24"),
        ("Meta-Llama-3.1-405B", "406"),
        ("MiniMax-M2.5", "229"),
        ("Mistral-7B-Instruct-v0.3", "7.25"),
        ("Mixtral-8x22B-v0.1", "140.6"),
        ("Mixtral-8x7B-v0.1", "46.7"),
        ("Phi-mini-MoE-instruct", "7.6"),
        ("Qwen2-0.5B", "0.49"),
        ("Qwen2.5-7B-Instruct", "7.62"),
        ("Qwen3-235B-A22B", "235"),
        ("Qwen3-30B-A3B", "30.5"),
        ("Qwen3-32B", "32.8"),
        ("Qwen3-8B", "8.2"),
        ("gemma-2-9b", "9.24"),
        ("gemma-3-27b-it", "27.0"),  # the report's 25,600 + 1,416 million; its vision tower has 417 more
        ("gpt-oss-120b", "116.83"),
        ("gpt-oss-20b", "20.91"),
        ("gpt2-xl", "1.56"),
        ("granite-3.1-1b-a400m", "1.3"),
        ("opt-1.3b", "1.3"),
        ("phi-4", "14.7"),
    ],
)
def test_totals_are_the_published_ones(name: str, published: str) -> None:
    assert rounded(counted(FOLDER / f"{name}.json").total, published) == published


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Mixtral-8x7B-v0.1", "12.9"),
        ("Mixtral-8x22B-v0.1", "39"),
        ("Qwen3-235B-A22B", "22"),
        ("Phi-mini-MoE-instruct", "2.4"),
        ("granite-3.1-1b-a400m", "0.4"),
        ("Llama-4-Scout-17B-16E-Instruct", "17"),
    ],
)
def test_active_parameters_with_the_embedding_are_the_published_ones(name: str, published: str) -> None:
    assert rounded(counted(FOLDER / f"{name}.json").active, published) == published


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("DeepSeek-V3", "37"),
        ("Kimi-K2-Instruct", "32"),
        ("MiniMax-M2.5", "10"),
        ("gpt-oss-120b", "5.13"),
        ("gpt-oss-20b", "3.61"),
    ],
)
def test_active_parameters_without_the_embedding_are_the_published_ones(name: str, published: str) -> None:
    assert rounded(counted(FOLDER / f"{name}.json").multiplied, published) == published


def rounded(elements: int, published: str) -> str:
    """Billions with as many digits after the point as were published."""
    return f"{elements / 1e9:.{len(published.partition('.')[2])}f}"
