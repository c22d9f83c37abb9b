"""Parameters and matmul FLOPs of eight models equal what PyTorch counted, family by family and to the integer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.lowering import count_parts
from stepgraph.lowering.model import Model
from stepgraph.passes.modelflops import Family, count_flops, count_params

DATA = Path(__file__).parent / "data"
ORACLE: dict[str, Any] = json.loads((DATA / "flops.json").read_text())["models"]
FILES: dict[str, str | Path] = {
    "llama3-8b": "llama-3-8b",
    "llama3-405b": "llama-3.1-405b",
    "qwen3-30b-a3b": DATA / "hf/Qwen3-30B-A3B.json",
    "qwen3-235b-a22b": DATA / "hf/Qwen3-235B-A22B.json",
    "mixtral-8x7b": DATA / "hf/Mixtral-8x7B-v0.1.json",
    "deepseek-v3": DATA / "hf/DeepSeek-V3.json",
    "gpt-oss-20b": DATA / "hf/gpt-oss-20b.json",
    "gemma2-9b": DATA / "hf/gemma-2-9b.json",
}
every_model = pytest.mark.parametrize("oracle", sorted(ORACLE))


def read(oracle: str) -> Model:
    return load_model(FILES[oracle])


def test_all_eight_are_here() -> None:
    assert set(FILES) == set(ORACLE)


@every_model
def test_parameters(oracle: str) -> None:
    params = count_params(count_parts(read(oracle), 1, 4100))
    expected = ORACLE[oracle]["params"]
    assert params.total == expected["total"]
    assert params.active == expected["active"]
    assert params.embedding == expected["embed"]
    assert params.multiplied == expected["active_minus_input_embedding"]


@every_model
def test_flops_family_by_family(oracle: str) -> None:
    expected = ORACLE[oracle]
    families = count_flops(count_parts(read(oracle), 1, expected["seq"]), attention="full")
    assert families == {name: whole_model(expected, name) for name in expected["flops"]}


def whole_model(expected: dict[str, Any], name: str) -> Family:
    """The counts of a few layers scaled to all layers of the kinds that have this family; the head stands there once."""
    counts, kinds = (
        expected["flops"][name],
        [kind for kind in expected["layers"] if name in expected["per_layer"][kind]],
    )
    all_layers = sum(expected["layers"][kind] for kind in kinds) or 1
    counted = sum(expected["layers_counted"][kind] for kind in kinds) or 1
    parts = (counts["fwd"], counts["bwd"], 0) if name == "sdpa" else map(counts.get, ("fwd", "bwd_dgrad", "bwd_wgrad"))
    return Family(*(part * all_layers // counted for part in parts))


@every_model
def test_flops_of_one_layer_of_each_kind(oracle: str) -> None:
    expected = ORACLE[oracle]
    kinds: dict[str, int] = {}
    for graph, count in count_parts(read(oracle), 1, expected["seq"]):
        kind = graph.name.removeprefix("sliding_")  # counted in full, so a window makes no difference
        if kind in ("dense", "moe"):
            kinds[kind] = kinds.get(kind, 0) + count
            found = count_flops([(graph, 1)], attention="full")
            assert {name: (f.fwd, f.dgrad + f.wgrad) for name, f in found.items()} == {
                name: (counts["fwd"], counts["bwd"]) for name, counts in expected["per_layer"][kind].items()
            }
    assert kinds == expected["layers"]
