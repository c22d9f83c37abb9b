"""Parameters and matmul FLOPs, worked out by hand for single cases; test_oracles.py has whole models."""

from __future__ import annotations

from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.lowering import count_parts
from stepgraph.passes.modelflops import count_flops, count_params


def test_causal_attention_is_half_of_full() -> None:
    parts = count_parts(load_model("llama-3-8b"), 1, 4096)
    causal, full = count_flops(parts), count_flops(parts, attention="full")
    assert 2 * causal["sdpa"].total == full["sdpa"].total
    assert {name: f for name, f in causal.items() if name != "sdpa"} == {
        name: f for name, f in full.items() if name != "sdpa"
    }


def test_qkv_of_grouped_attention_by_hand() -> None:
    families = count_flops(count_parts(load_model("llama-3-8b"), 2, 128))
    # 2 m d (heads + 2 kv_heads) head_dim per layer: m = 2 x 128 tokens
    assert families["qkv"].fwd == 32 * 2 * (2 * 128) * 4096 * (32 + 2 * 8) * 128


def test_a_tied_table_is_one_parameter_and_is_multiplied_with() -> None:
    params = count_params(count_parts(load_model("gpt2-xl"), 1, 1024))
    layer = 12 * 1600**2 + 13 * 1600  # qkv 3 d^2, out d^2, mlp 8 d^2; biases 3d + d + 4d + d; two norms 4d
    assert params.total == 48 * layer + 50257 * 1600 + 1024 * 1600 + 2 * 1600
    assert params.embedding == (50257 + 1024) * 1600
    assert params.multiplied == params.total - 1024 * 1600  # the head multiplies with the token table, not positions
