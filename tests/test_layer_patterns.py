"""Which layer is of which kind: windows, chunks, positions and experts by every pattern that a file can spell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelfiles import LLAMA, changed, first_attention, last_experts, windows, written
from stepgraph.errors import InputError
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.model import Attention, Experts, Mlp, Model


def test_unused_windows_are_no_windows(tmp_path: Path) -> None:
    qwen = changed(LLAMA, model_type="qwen2", sliding_window=1024, use_sliding_window=False)
    assert windows(load_model(written(tmp_path, qwen))) == [0] * 32
    listed = changed(qwen, layer_types=["sliding_attention"] * 32)
    assert windows(load_model(written(tmp_path, listed))) == [0] * 32
    mistral = changed(LLAMA, model_type="mistral", sliding_window=8192)  # as long as the longest sequence
    assert load_model(written(tmp_path, mistral)).layers[0].name == "dense"
    none = changed(LLAMA, model_type="mistral", sliding_window=None)
    assert windows(load_model(written(tmp_path, none))) == [0] * 32


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, [4096] * 32),
        ({"model_type": "phi3", "sliding_window": 2047}, [2047] * 32),
        ({"model_type": "phi3"}, [0] * 32),
        (
            {"model_type": "qwen2", "sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 20},
            [0] * 20 + [1024] * 12,
        ),
        ({"model_type": "qwen2", "sliding_window": 1024, "use_sliding_window": True}, [0] * 28 + [1024] * 4),
        ({"model_type": "qwen3_moe", "sliding_window": 64, "use_sliding_window": True}, [64] * 32),
        ({"model_type": "exaone4", "sliding_window_pattern": "LG", "sliding_window": 64}, [64, 0] * 16),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 2, "sliding_window": 64}, [64, 0] * 16),
        ({"model_type": "olmo3", "layer_types": ["full_attention", "sliding_attention"] * 16}, [0, 4096] * 16),
        ({"model_type": "gemma2", "sliding_window": None}, [0] * 32),
    ],
)
def test_window_patterns(tmp_path: Path, changes: dict[str, Any], expected: list[int]) -> None:
    sparse = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    base = changed(LLAMA, **sparse) if changes["model_type"] == "qwen3_moe" else LLAMA
    assert windows(load_model(written(tmp_path, changed(base, **changes)))) == expected


def test_an_assumed_window_is_said(tmp_path: Path) -> None:
    mistral = changed(LLAMA, model_type="mistral", architectures=["MistralForCausalLM"])
    warning = "sliding_window is absent: windows of 4096 tokens are assumed in layers 0-31"
    assert load_model(written(tmp_path, mistral)).warnings == (warning,)
    listed = changed(LLAMA, model_type="phi3", layer_types=["sliding_attention"] * 32)
    with pytest.raises(InputError, match="sliding_window: is missing, and layers 0-31 have windows"):
        load_model(written(tmp_path, listed))


def test_a_shortened_model_needs_no_shortened_lists(tmp_path: Path) -> None:
    olmo = changed(
        LLAMA, model_type="olmo3", sliding_window=64, layer_types=["sliding_attention", "full_attention"] * 16
    )
    assert windows(load_model(written(tmp_path, olmo), {"num_hidden_layers": 3})) == [64, 0, 64]


LLAMA4: dict[str, Any] = {
    "model_type": "llama4_text",
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 28672,
}


def kinds(model: Model) -> str:
    """One letter per layer: d(ense) or m(oe)."""
    return "".join("m" if isinstance(layer.mlp, Experts) else "d" for layer in model.layers)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"decoder_sparse_step": 2}, "dmdmdm"),  # counted from one
        ({"mlp_only_layers": [0, 5]}, "dmmmmd"),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [5]}, "ddmddd"),
        ({"model_type": "deepseek_v3", "first_k_dense_replace": 2}, "ddmmmm"),
        ({"model_type": "deepseek_v3", "first_k_dense_replace": 1, "moe_layer_freq": 2}, "ddmdmd"),  # from zero
        ({"model_type": "deepseek_v3", "moe_layer_freq": [0, 1, 1, 0, 1, 1]}, "dmmdmm"),
        ({**LLAMA4, "interleave_moe_layer_step": 2}, "dmdmdm"),
        ({**LLAMA4, "moe_layers": [0, 1]}, "mmdddd"),
    ],
)
def test_patterns_of_expert_layers(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    latent = {"q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    own: dict[str, dict[str, Any]] = {
        "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 64},
        "deepseek_v3": {"n_routed_experts": 8, "moe_intermediate_size": 64, **latent},
        "llama4_text": {},
    }
    config = {**LLAMA, "model_type": "qwen3_moe", "num_hidden_layers": 6, "num_experts_per_tok": 2, **changes}
    assert kinds(load_model(written(tmp_path, {**own[config["model_type"]], **config}))) == expected


def test_shared_experts(tmp_path: Path) -> None:
    base = {**LLAMA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    qwen = {**base, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 512}
    moe = last_experts(load_model(written(tmp_path, qwen)))
    assert (moe.shared, moe.shared_gate) == (Mlp(512, gated=True, activation="silu", bias=False), True)
    alone = last_experts(load_model(written(tmp_path, {**qwen, "shared_expert_intermediate_size": 0})))
    assert (alone.shared, alone.shared_gate) == (None, False)


def test_some_heads_are_rotated_in_part(tmp_path: Path) -> None:
    half = changed(LLAMA, partial_rotary_factor=0.5)
    assert first_attention(load_model(written(tmp_path, half))).rotary_dim == 64
    inside = changed(LLAMA, rope_parameters={"rope_theta": 1e6, "partial_rotary_factor": 0.25})
    assert first_attention(load_model(written(tmp_path, inside))).rotary_dim == 32
    assert first_attention(load_model(written(tmp_path, changed(LLAMA, rotary_dim=16)))).rotary_dim == 16


def test_positions_stand_where_a_list_says(tmp_path: Path) -> None:
    config = changed(LLAMA, **LLAMA4, num_hidden_layers=4, no_rope_layers=[0, 1, 1, 0], attention_chunk_size=64)
    spec = [layer.attention for layer in load_model(written(tmp_path, config)).layers]
    found = [(attention.rotary_dim, attention.chunk) for attention in spec if isinstance(attention, Attention)]
    assert found == [(0, 0), (128, 64), (128, 64), (0, 0)]


def test_exaone_without_windows_has_positions_everywhere(tmp_path: Path) -> None:
    config = changed(LLAMA, model_type="exaone4", sliding_window=None)
    assert first_attention(load_model(written(tmp_path, config))).rotary_dim == 128
    assert len(load_model(written(tmp_path, config)).distinct_layers) == 1
