"""Small configuration files, and questions to the models that are read from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepgraph.errors import InputError
from stepgraph.lowering.model import Attention, Experts, Mlp, Model

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
OPT: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "ffn_dim": 8192,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 2048,
    "do_layer_norm_before": True,
    "activation_function": "relu",
}
GONE = object()


def written(tmp_path: Path, config: object) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**base, **changes}.items() if value is not GONE}


def codes(error: pytest.ExceptionInfo[InputError]) -> set[str]:
    return {problem.code for problem in error.value.problems}


def first_attention(model: Model) -> Attention:
    attention = model.layers[0].attention
    assert isinstance(attention, Attention)
    return attention


def first_mlp(model: Model) -> Mlp:
    mlp = model.layers[0].mlp
    assert isinstance(mlp, Mlp)
    return mlp


def last_experts(model: Model) -> Experts:
    experts = model.layers[-1].mlp
    assert isinstance(experts, Experts)
    return experts


def windows(model: Model) -> list[int]:
    """Window of every layer, 0 = none."""
    spec = [layer.attention for layer in model.layers]
    return [attention.window for attention in spec if isinstance(attention, Attention)]
