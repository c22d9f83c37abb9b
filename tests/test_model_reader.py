"""Reading models: the carried ones, every family, and every way in which a file can be wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from modelfiles import GONE, LLAMA, OPT, changed, codes, first_attention, first_mlp, last_experts, windows, written
from stepgraph.errors import InputError
from stepgraph.lowering.configfile import locate, read_config
from stepgraph.lowering.familytable import FAMILIES
from stepgraph.lowering.huggingface import load_model, model_names, parse_override
from stepgraph.lowering.model import Attention, LatentAttention, Layer, Mlp

# the models that come with the package


@pytest.mark.parametrize(
    ("name", "n_layers", "hidden", "vocab", "heads", "ffn", "positions", "dtype"),
    [
        ("llama-3-8b", 32, 4096, 128256, (32, 8, 128), 14336, 8192, "bf16"),
        ("llama-3-70b", 80, 8192, 128256, (64, 8, 128), 28672, 8192, "bf16"),
        ("llama-3.1-405b", 126, 16384, 128256, (128, 8, 128), 53248, 131072, "bf16"),
        ("qwen2.5-7b", 28, 3584, 152064, (28, 4, 128), 18944, 32768, "bf16"),
        ("mistral-7b", 32, 4096, 32768, (32, 8, 128), 14336, 32768, "bf16"),
        ("gpt2-xl", 48, 1600, 50257, (25, 25, 64), 4 * 1600, 1024, "bf16"),
        ("gpt2-large", 36, 1280, 50257, (20, 20, 64), 4 * 1280, 1024, "bf16"),
        ("gpt-3-175b", 96, 12288, 51200, (96, 96, 128), 4 * 12288, 2048, "fp16"),
    ],
)
def test_carried_models(
    name: str, n_layers: int, hidden: int, vocab: int, heads: tuple[int, ...], ffn: int, positions: int, dtype: str
) -> None:
    model = load_model(name)
    attention, mlp = first_attention(model), first_mlp(model)
    assert (model.name, model.n_layers, model.hidden, model.vocab) == (name, n_layers, hidden, vocab)
    assert (attention.heads, attention.kv_heads, attention.head_dim) == heads
    assert (mlp.ffn, model.max_positions, model.dtype) == (ffn, positions, dtype)


def test_carried_models_with_experts() -> None:
    sizes = {"deepseek-v3": (256, 8, 2048), "qwen3-30b-a3b": (128, 8, 768), "qwen3-235b-a22b": (128, 8, 1536)}
    sizes |= {"mixtral-8x7b": (8, 2, 14336), "gpt-oss-20b": (32, 4, 2880), "llama-4-scout": (16, 1, 8192)}
    for name, numbers in sizes.items():
        moe = last_experts(load_model(name))
        assert (moe.experts, moe.top_k, moe.expert.ffn) == numbers
    assert windows(load_model("gemma-2-9b")) == [4096, 0] * 21
    assert windows(load_model("gpt-oss-20b")) == [128, 0] * 12
    assert isinstance(load_model("deepseek-v3").layers[0].attention, LatentAttention)


def test_every_carried_config_names_its_source_and_is_listed() -> None:
    assert len(model_names()) == 15
    for name in model_names():
        assert read_config(locate(name))["_source"]
        assert load_model(name.upper()) == load_model(name)


def test_few_carried_configs_leave_something_to_say() -> None:
    said = [name for name in model_names() if load_model(name).warnings]
    assert said == ["gpt-oss-20b", "gpt2-large", "gpt2-xl", "llama-4-scout"]
    assert "bf16" in load_model("gpt2-xl").warnings[0]


def test_families_differ_where_no_key_says_so() -> None:
    llama, qwen = first_attention(load_model("llama-3-8b")), first_attention(load_model("qwen2.5-7b"))
    assert (llama.qkv_bias, qwen.qkv_bias, qwen.out_bias) == (False, True, False)
    gpt = load_model("gpt-3-175b")
    attention = Attention(96, 96, 128, qkv_bias=True, out_bias=True, rotary_dim=0)
    assert gpt.layers[0] == Layer(attention, Mlp(49152, gated=False, activation="gelu", bias=True), "layernorm")
    assert (gpt.tied_embeddings, gpt.learned_positions, gpt.final_norm) == (True, 2048, "layernorm")


def test_equal_layers_are_one_object() -> None:
    model = load_model("llama-3-8b")
    assert all(layer is model.layers[0] for layer in model.layers)
    assert model.distinct_layers == (model.layers[0],)
    assert model.layers[0].name == "dense"
    mixed = load_model("gemma-2-9b")
    assert all(layer is mixed.layers[i % 2] for i, layer in enumerate(mixed.layers))


# other files


def test_a_file_is_named_after_itself_or_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    path = written(folder, LLAMA)
    assert load_model(path).name == "my-model"
    assert load_model(str(path.rename(folder / "tiny.json"))).name == "tiny"


def test_opt_has_two_more_position_rows(tmp_path: Path) -> None:
    model = load_model(written(tmp_path, OPT))
    assert (model.learned_positions, model.max_positions) == (2048 + 2, 2048)
    assert (model.tied_embeddings, first_mlp(model).activation) == (True, "relu")


def test_optional_keys_have_the_meaning_of_their_absence(tmp_path: Path) -> None:
    sparse = changed(LLAMA, num_key_value_heads=None, torch_dtype=GONE)
    model = load_model(written(tmp_path, sparse))
    assert first_attention(model).kv_heads == 32
    assert first_attention(model).head_dim == 4096 // 32
    assert model.warnings == ("the config names no dtype: bf16 is assumed",)


def test_keys_that_say_otherwise_are_followed(tmp_path: Path) -> None:
    config = changed(
        LLAMA, head_dim=256, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, dtype="bfloat16"
    )
    model = load_model(written(tmp_path, config))
    attention = first_attention(model)
    assert (attention.head_dim, attention.qkv_bias, attention.out_bias) == (256, True, True)
    assert (first_mlp(model).bias, model.tied_embeddings) == (True, True)


def test_a_key_of_another_family_is_warned_about(tmp_path: Path) -> None:
    mistral = changed(LLAMA, model_type="mistral", sliding_window=None, attention_bias=True)
    assert "attention_bias" in load_model(written(tmp_path, mistral)).warnings[0]


def test_phi3_is_read_without_biases(tmp_path: Path) -> None:
    phi = changed(LLAMA, model_type="phi3", architectures=["Phi3ForCausalLM"], attention_bias=False)
    model = load_model(written(tmp_path, phi))
    assert (model.family, first_attention(model).qkv_bias, model.warnings) == ("phi3", False, ())


# models with more than one part


def test_the_outer_file_speaks_for_the_language_model(tmp_path: Path) -> None:
    inner = changed(LLAMA, torch_dtype=GONE, architectures=GONE, model_type=GONE)
    outer = {"model_type": "llama", "language_config": inner, "torch_dtype": "float16", "tie_word_embeddings": True}
    model = load_model(written(tmp_path, outer))
    assert (model.dtype, model.tied_embeddings, model.n_layers) == ("fp16", True, 32)
    assert "in language_config is read" in model.warnings[0]
    with pytest.raises(InputError, match=r"config\.json:language_config\.hidden_size: is \"big\""):
        load_model(written(tmp_path, {**outer, "language_config": {**inner, "hidden_size": "big"}}))


def test_the_inner_file_decides_where_both_speak(tmp_path: Path) -> None:
    inner = changed(LLAMA, tie_word_embeddings=True, torch_dtype="float16")
    outer = {"model_type": "any", "text_config": inner, "dtype": "float32", "tie_word_embeddings": False}
    model = load_model(written(tmp_path, outer))
    assert (model.dtype, model.tied_embeddings) == ("fp16", True)
    assert "tie_word_embeddings is true for the language model and false outside" in model.warnings[1]


def test_towers_beside_the_language_model_are_not_counted(tmp_path: Path) -> None:
    model = load_model(written(tmp_path, changed(LLAMA, vision_config={"depth": 27})))
    assert model.warnings == (
        "only the language model is read: vision and audio parts (vision_config) are not counted",
    )


def test_overrides_reach_the_nested_model() -> None:
    assert load_model("llama-4-scout", {"num_hidden_layers": 8}).n_layers == 8
    with pytest.raises(InputError, match="--set num_hidden_layers"):
        load_model("llama-4-scout", {"num_hidden_layers": 0})


# checkpoints that are not for training


def test_inference_checkpoints_are_read_with_a_warning(tmp_path: Path) -> None:
    quantized = changed(LLAMA, quantization_config={"quant_method": "fp8"})
    warning = "inference checkpoint (fp8): training dtype taken as bf16"
    assert load_model(written(tmp_path, quantized)).warnings == (warning,)
    assert load_model(written(tmp_path, changed(quantized, quantization_config=None))).warnings == ()


def test_drafts_are_read_with_a_warning(tmp_path: Path) -> None:
    draft = changed(LLAMA, num_hidden_layers=1, draft_vocab_size=32000)
    (warning,) = load_model(written(tmp_path, draft)).warnings
    assert "draft for speculative decoding" in warning
    assert "its head of 32000 entries is taken as wide as the vocabulary" in warning
    eagle = changed(LLAMA, architectures=["LlamaForCausalLMEagle3"])
    assert "draft" in load_model(written(tmp_path, eagle)).warnings[0]


def test_infinity_where_nothing_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, changed(LLAMA, rope_theta=float("inf"), note=float("nan")))
    assert "Infinity" in path.read_text(encoding="utf-8")
    assert load_model(path).n_layers == 32


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert load_model(path).hidden == 4096


# overrides


def test_overrides_replace_synonyms_too() -> None:
    assert load_model("llama-3-8b", {"num_hidden_layers": 4}).n_layers == 4
    assert load_model("gpt2-xl", {"num_hidden_layers": 4}).n_layers == 4
    assert load_model("gpt2-xl", {"dtype": "float32"}).dtype == "fp32"


def test_overrides_are_checked_as_the_file_is() -> None:
    with pytest.raises(InputError) as caught:
        load_model("llama-3-8b", {"num_hidden_layers": 0, "num_hiden_layers": 3, "vocab_size": "big"})
    assert codes(caught) == {"config-range", "set-unknown-key", "config-type"}
    assert "num_hidden_layers" in next(p.fix for p in caught.value.problems if p.code == "set-unknown-key")


def test_an_override_that_changes_nothing_is_warned_about(tmp_path: Path) -> None:
    path = written(tmp_path, changed(LLAMA, rope_theta=10000.0))
    assert load_model(path).warnings == ()
    assert "rope_theta changes nothing" in load_model(path, {"rope_theta": 5e5}).warnings[0]


def test_an_override_of_another_family_is_refused() -> None:
    with pytest.raises(InputError, match="gpt2 has no such key"):
        load_model("gpt2-xl", {"num_key_value_heads": 5})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num_hidden_layers=4", ("num_hidden_layers", 4)),
        ("tie_word_embeddings=true", ("tie_word_embeddings", True)),
        ("sliding_window=null", ("sliding_window", None)),
        ("dtype=float16", ("dtype", "float16")),
        ('dtype="float16"', ("dtype", "float16")),
        ("rope_theta = 5e5", ("rope_theta", 500000.0)),
        ("a=b=c", ("a", "b=c")),
    ],
)
def test_override_syntax(text: str, expected: tuple[str, object]) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["", "=4", "num_hidden_layers", "num_hidden_layers=", " = ", "x=" + "[" * 200_000])
def test_override_syntax_errors(text: str) -> None:
    with pytest.raises(InputError, match="set-syntax"):
        parse_override(text)


# files that are no configs


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "config-empty"),
        (b" \n", "config-empty"),
        (b"[1, 2]", "config-not-object"),
        (b"3", "config-not-object"),
        (b"\xff\xfe{\x00}\x00", "config-not-utf8"),
        (b'{"hidden_size": 4096,', "config-json"),
        (b'{"hidden_size": 4096 "x": 1}', "config-json"),
        (b'{"hidden_size": ' + b"9" * 10_000 + b"}", "config-json"),
        (b'{"a": ' + b"[" * 200_000, "config-too-deep"),
        (b'{"a": ' + b'{"a":' * 200_000, "config-too-deep"),
        (b'{"a": 1, "a": 2}', "config-duplicate-key"),
        (b" " * (16 * 2**20 + 1), "config-too-large"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken_files(tmp_path: Path, raw: bytes, code: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    with pytest.raises(InputError) as caught:
        load_model(path)
    assert codes(caught) == {code}


def test_truncated_json_says_where_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{\n  "hidden_size": 4096,\n  "num_hid', encoding="utf-8")
    with pytest.raises(InputError, match=r"ends too early, at line 3, column 3.*Download it again"):
        load_model(path)


def test_missing_files_suggest_near_names(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Did you mean llama-3-8b") as caught:
        load_model("llama-3-8B-x")
    assert codes(caught) == {"config-missing"}
    written(tmp_path, LLAMA)
    with pytest.raises(InputError, match=re.escape(str(tmp_path / "config.json"))):
        load_model(tmp_path / "confg.json")
    with pytest.raises(InputError, match="Did you mean llama-3-8b"):
        load_model("meta-llama/Meta-Llama-3-8B")


def test_a_directory_says_which_file_to_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json inside"):
        load_model(tmp_path)
    written(tmp_path, LLAMA)
    with pytest.raises(InputError, match=re.escape(str(tmp_path / "config.json"))) as caught:
        load_model(tmp_path)
    assert codes(caught) == {"config-directory"}


@pytest.mark.parametrize(
    ("name", "code"), [("", "config-missing"), ("a\0b", "config-unreadable"), ("x" * 5000, "config-unreadable")]
)
def test_impossible_names(name: str, code: str) -> None:
    with pytest.raises(InputError) as caught:
        load_model(name)
    assert codes(caught) == {code}


# configs that are wrong


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"hidden_size": GONE}, "config-missing-key"),
        ({"hidden_size": None}, "config-missing-key"),
        ({"num_hidden_layers": GONE}, "config-missing-key"),
        ({"model_type": GONE}, "config-missing-key"),
        ({"model_type": 3}, "config-type"),
        ({"num_attention_heads": True}, "config-type"),
        ({"num_attention_heads": "32"}, "config-type"),
        ({"num_hidden_layers": 8.7}, "config-type"),
        ({"num_hidden_layers": 32.0}, "config-type"),
        ({"vocab_size": float("nan")}, "config-type"),
        ({"vocab_size": float("inf")}, "config-type"),
        ({"vocab_size": [128256]}, "config-type"),
        ({"intermediate_size": [1] * 32}, "config-type"),
        ({"tie_word_embeddings": "false"}, "config-type"),
        ({"hidden_act": 1}, "config-type"),
        ({"layer_types": "full_attention"}, "config-type"),
        ({"num_hidden_layers": 0}, "config-range"),
        ({"hidden_size": -4096}, "config-range"),
        ({"hidden_size": 10**12}, "config-range"),
        ({"num_hidden_layers": 10**6}, "config-range"),
        ({"num_key_value_heads": 0}, "config-range"),
        ({"num_key_value_heads": 7}, "config-heads"),
        ({"num_key_value_heads": 64}, "config-heads"),
        ({"num_attention_heads": 24}, "config-head-dim"),
        ({"head_dim": 127}, "config-head-dim"),
        ({"hidden_act": "gelly"}, "config-value"),
        ({"torch_dtype": "float8_e4m3fn"}, "config-value"),
        ({"torch_dtype": "float16", "dtype": "float32"}, "config-conflict"),
        ({"layer_types": ["full_attention"] * 31}, "config-layer-count"),
        ({"num_experts": 64}, "config-experts"),
        ({"num_local_experts": 8}, "config-experts"),
        ({"kv_lora_rank": 512}, "config-mla"),
        ({"attention_chunk_size": 8192}, "config-window"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 16}, "config-window"),
        ({"layer_types": ["full_attention", "linear_attention"] * 16}, "config-layer-type"),
        ({"model_type": "mistral", "sliding_window": "4096"}, "config-type"),
        ({"model_type": "qwen2", "use_sliding_window": "yes"}, "config-type"),
        ({"use_qk_norm": True}, "config-qk-norm"),
        ({"text_config": {"hidden_size": 1}}, "config-missing-key"),
        ({"text_config": "llama"}, "config-type"),
        ({"text_config": {}}, "config-missing-key"),
        ({"hybrid_override_pattern": "M-*E"}, "config-ssm"),
        ({"model_type": "mamba2"}, "config-ssm"),
        ({"model_type": "bert", "type_vocab_size": 2}, "config-encoder"),
        ({"model_type": "bert"}, "config-encoder"),
        ({"is_encoder_decoder": True}, "config-encoder"),
        ({"model_type": "gpt_neox"}, "config-parallel-attention"),
        ({"attn_logit_softcapping": 50.0}, "config-softcap"),
        ({"num_nextn_predict_layers": 1}, "config-mtp"),
        ({"model_type": "gpt2", "partial_rotary_factor": 0.5}, "config-partial-rope"),
        ({"partial_rotary_factor": 1.5}, "config-range"),
        ({"partial_rotary_factor": float("nan")}, "config-range"),
        ({"partial_rotary_factor": "half"}, "config-type"),
        ({"rotary_dim": 256}, "config-range"),
        ({"rotary_dim": 63}, "config-head-dim"),
        ({"o_lora_rank": 512}, "config-output-latent"),
        ({"index_topk": 2048}, "config-indexed-attention"),
        ({"model_type": "deepseek_v3"}, "config-missing-key"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 8}, "config-experts"),
        ({"model_type": "mixtral", "num_local_experts": 4}, "config-missing-key"),
        ({"model_type": "mixtral", "routed_expert_hidden_size": 64}, "config-latent-experts"),
        ({"model_type": "gemma2", "attn_logit_softcapping": -1}, "config-range"),
        ({"model_type": "gemma2", "attn_logit_softcapping": "50"}, "config-type"),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLX"}, "config-value"),
        ({"model_type": "exaone4", "sliding_window_pattern": 0}, "config-range"),
        ({"model_type": "llama4_text", "no_rope_layers": [1, 0]}, "config-layer-count"),
        ({"model_type": "deepseek_v3", "moe_layer_freq": [0, 1]}, "config-layer-count"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": "0"}, "config-type"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [True]}, "config-type"),
        ({"model_type": "minimax_m2", "qk_norm_type": "per_token"}, "config-value"),
        ({"model_type": "deepseek_v3", "scoring_func": "relu"}, "config-value"),
        ({"model_type": "olmo3", "layer_types": ["chunked_attention"] * 32}, "config-window"),
        ({"lm_head_bias": True}, "config-head-bias"),
        ({"block_configs": [{"ffn": {}}]}, "config-per-layer"),
        ({"alibi": True}, "config-alibi"),
        ({"add_cross_attention": True}, "config-cross-attention"),
        ({"model_type": "frobnicator"}, "config-family"),
    ],
)
def test_each_slip_has_its_code(tmp_path: Path, changes: dict[str, Any], code: str) -> None:
    with pytest.raises(InputError) as caught:
        load_model(written(tmp_path, changed(LLAMA, **changes)))
    assert code in codes(caught)


@pytest.mark.parametrize(
    "changes",
    [
        {"do_layer_norm_before": False},
        {"_remove_final_layer_norm": True},
        {"word_embed_proj_dim": 512},
        {"layer_norm_elementwise_affine": False},
    ],
)
def test_variants_of_opt_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="config-variant"):
        load_model(written(tmp_path, changed(OPT, **changes)))


def test_features_that_are_switched_off_are_no_reason_to_refuse(tmp_path: Path) -> None:
    off = changed(
        LLAMA,
        num_experts=0,
        use_qk_norm=False,
        quantization_config=None,
        partial_rotary_factor=1.0,
        alibi=False,
        num_nextn_predict_layers=0,
        layer_types=["full_attention"] * 32,
    )
    assert load_model(written(tmp_path, off)).n_layers == 32


def test_all_problems_of_a_file_come_at_once(tmp_path: Path) -> None:
    bad = changed(LLAMA, hidden_size="4096", vocab_size=GONE, num_key_value_heads=7, num_experts=8, torch_dtype="int4")
    with pytest.raises(InputError) as caught:
        load_model(written(tmp_path, bad))
    assert codes(caught) == {"config-type", "config-missing-key", "config-heads", "config-experts", "config-value"}
    assert len(caught.value.problems) == 5


def test_missing_keys_name_every_synonym(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"n_embd \(or hidden_size\) is missing"):
        load_model(written(tmp_path, {"model_type": "gpt2", "n_layer": 2}))
    with pytest.raises(InputError, match=r"n_embd \(or hidden_size\) is null"):
        load_model("gpt2-xl", {"n_embd": None})


def test_refusals_name_layers_where_they_are_known(tmp_path: Path) -> None:
    mixed = changed(LLAMA, layer_types=["sliding_attention"] * 3 + ["full_attention"] * 29)
    with pytest.raises(InputError, match="layers 0-2 are 'sliding_attention'"):
        load_model(written(tmp_path, mixed))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hybrid_override_pattern": "M-M*"}, "layers 0, 2 are Mamba-2"),
        ({"layers_block_type": ["attention", "mamba", "mamba"]}, "layers 1-2 are Mamba:"),
        ({"linear_attn_config": {"kda_layers": [1, 2, 3, 5]}}, "layers 0-2, 4 are linear attention"),
        ({"attn_type_list": [0, 0, 1, 0]}, "layers 0-1, 3 are linear attention"),
        ({"full_attention_interval": 16}, "layers 0-14, 16-30 are linear attention"),
        ({"ssm_state_size": 128}, "ssm_state_size is set"),
    ],
)
def test_hybrids_are_refused_with_their_layers(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        load_model(written(tmp_path, changed(LLAMA, **changes)))


def test_unknown_architectures_list_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"mistral, qwen2.*Did you mean 'llama'"):
        load_model(written(tmp_path, changed(LLAMA, model_type="lama")))
    with pytest.raises(InputError, match='Add "model_type": "llama"'):
        load_model(written(tmp_path, changed(LLAMA, model_type=GONE)))


def test_the_table_of_families_is_consistent() -> None:
    assert len({row.model_type for row in FAMILIES}) == len(FAMILIES)
    for row in FAMILIES:
        named = [key for group in row.synonyms for key in group]
        assert len(named) == len(set(named))
