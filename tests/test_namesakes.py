"""Keys that are almost right: a slip, or the name that another family uses, is said with the family's own name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelfiles import GONE, LLAMA, changed, written
from stepgraph.errors import InputError
from stepgraph.lowering.huggingface import load_model, model_names

MIXTRAL = changed(LLAMA, model_type="mixtral", architectures=GONE, num_local_experts=8, num_experts_per_tok=2)
QWEN = changed(LLAMA, model_type="qwen2_moe", architectures=GONE, num_experts=8, num_experts_per_tok=2) | {
    "moe_intermediate_size": 64
}
WIDTHS = ("moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
DEEPSEEK = changed(LLAMA, model_type="deepseek_v3", architectures=GONE, n_routed_experts=8, num_experts_per_tok=2)
DEEPSEEK |= dict.fromkeys(WIDTHS, 64)


@pytest.mark.parametrize(
    ("base", "key", "value", "warning"),
    [
        (MIXTRAL, "num_local_expert", 16, "models do not read it; did you mean 'num_local_experts'?"),
        (MIXTRAL, "top_k", 8, "models do not read it; did you mean 'num_experts_per_tok'?"),
        (MIXTRAL, "n_group", 4, "n_group changes nothing: mixtral models do not read it"),
        (LLAMA, "num_hidden_layer", 4, "did you mean 'num_hidden_layers'?"),
        (LLAMA, "num_key_values_heads", 4, "did you mean 'num_key_value_heads'?"),
    ],
)
def test_an_unread_key_that_resembles_a_read_one_is_warned_about(
    base: dict[str, Any], key: str, value: object, warning: str, tmp_path: Path
) -> None:
    (said,) = load_model(written(tmp_path, base | {key: value})).warnings
    assert warning in said
    assert said.startswith(f"{key} changes nothing")


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        (LLAMA, "top_k", 8),  # a setting of text generation
        (MIXTRAL, "top_k", 50),
        (MIXTRAL, "top_k", 0.5),
        (LLAMA, "rope_scaling", 4),
        (DEEPSEEK, "n_group", 4),
        (LLAMA, "num_hidden_layer", None),
    ],
)
def test_other_unread_keys_are_none_of_our_business(
    base: dict[str, Any], key: str, value: object, tmp_path: Path
) -> None:
    assert load_model(written(tmp_path, base | {key: value})).warnings == ()


@pytest.mark.parametrize("name", model_names())
def test_carried_models_have_no_slips(name: str) -> None:
    assert not [text for text in load_model(name).warnings if "changes nothing" in text]


@pytest.mark.parametrize(
    ("base", "change", "said"),
    [
        (
            MIXTRAL,
            {"num_local_experts": GONE, "num_experts": 8},
            "num_experts is set: mixtral calls it num_local_experts",
        ),
        (MIXTRAL, {"num_experts": 16}, "num_experts is set: mixtral calls it num_local_experts, which is set too"),
        (MIXTRAL, {"num_experts_per_tok": GONE, "top_k": 2}, "top_k is set: mixtral calls it num_experts_per_tok"),
        (MIXTRAL, {"moe_intermediate_size": 64}, "moe_intermediate_size is set: mixtral calls it intermediate_size"),
        (MIXTRAL, {"n_shared_experts": 1}, "n_shared_experts is set, which mixtral models do not read"),
        (QWEN, {"n_shared_experts": 1}, "qwen2_moe calls it shared_expert_intermediate_size"),
        (DEEPSEEK, {"num_shared_experts": 1}, "deepseek_v3 calls it n_shared_experts"),
        (DEEPSEEK, {"n_routed_experts": GONE, "num_experts": 8}, "deepseek_v3 calls it n_routed_experts"),
        (LLAMA, {"hidden_size": GONE, "hiden_size": 64}, "hiden_size is set: llama calls it hidden_size"),
    ],
)
def test_the_name_of_another_family_is_answered_with_the_familys_own(
    base: dict[str, Any], change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        load_model(written(tmp_path, changed(base, **change)))
    (problem,) = caught.value.problems
    assert said.lower() in str(problem).lower()
    assert "not modelled" not in str(problem)


def test_an_override_by_the_name_of_another_family_is_refused_with_the_familys_own() -> None:
    with pytest.raises(InputError, match=r"--set num_experts.*mixtral calls it num_local_experts"):
        load_model("mixtral-8x7b", {"num_experts": 4})
    with pytest.raises(InputError, match="Did you mean 'num_experts_per_tok'"):
        load_model("mixtral-8x7b", {"top_k": 4})


@pytest.mark.parametrize(("value", "fix"), [("none", "write null"), ("null", "write null"), ("4096", "write digits")])
def test_a_word_for_nothing_is_answered_with_null(value: str, fix: str) -> None:
    with pytest.raises(InputError) as caught:
        load_model("mistral-7b", {"sliding_window": value})
    assert fix in caught.value.problems[0].fix
