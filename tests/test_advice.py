"""Warnings of a prediction name what would help, and where the numbers in them come from."""

from __future__ import annotations

import pytest

import stepgraph


def warning(code: str, model: str, **layout: int) -> str:
    prediction = stepgraph.predict(model, stepgraph.Layout(**layout), "h100")  # type: ignore[arg-type]
    return next((text for text in prediction.warnings if text.startswith(code)), "")


@pytest.mark.parametrize(
    ("model", "layout", "gib", "relief"),
    [
        # 46.7e9 parameters, nearly all experts': (2 + 4 + 12/8) bytes each on 8 ranks, whatever tp is
        ("mixtral-8x7b", {"dp": 8}, 326, "use more ep (or etp), then pp"),
        ("mixtral-8x7b", {"tp": 8}, 318, "use more ep (or etp), then pp"),
        # an eighth of 45.1e9 expert parameters at 18 bytes (94 GiB), 1.6e9 others at 7.5 bytes (11 GiB)
        ("mixtral-8x7b", {"dp": 8, "ep": 8}, 106, "use more etp (ep already leaves one expert per rank)"),
        # 70.6e9 x 18 bytes
        ("llama-3-70b", {}, 1183, "use more tp, pp or (with ZeRO-1) dp"),
    ],
)
def test_memory_advice_splits_what_fills_the_memory(model: str, layout: dict[str, int], gib: int, relief: str) -> None:
    text = warning("memory", model, **layout)
    assert f"need {gib} of 80 GiB" in text
    assert relief in text
    assert ("tp does not split them" in text) == (model == "mixtral-8x7b")


def test_the_all_to_all_warning_names_its_units_and_the_domain() -> None:
    text = warning("all-to-all", "deepseek-v3", dp=16, ep=16)
    assert text.endswith("of the NIC alone 9.40 ms (without efficiency); keep ep inside a scale-up domain of 8")
    assert warning("all-to-all", "deepseek-v3", dp=8, ep=8) == ""
