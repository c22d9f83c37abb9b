"""Forty configuration files as they are published: each is read into the layers that it describes, or refused.

tests/data/hf holds their keys without the ones that no reader of shapes needs (epsilons, token numbers, dropout).
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.errors import InputError
from stepgraph.lowering.configfile import CONFIGS
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.model import Attention, Experts, LatentAttention, Layer, Mlp, Model

FOLDER = Path(__file__).parent / "data/hf"
Runs = list[tuple[str, int]]


def real(name: str) -> Model:
    return load_model(FOLDER / f"{name}.json")


def runs(model: Model) -> Runs:
    """Layer kinds in order, run-length encoded."""
    return [(name, len(list(group))) for name, group in groupby(model.template_names)]


def gqa(heads: int, kv_heads: int, head_dim: int, **flags: Any) -> Attention:
    """Without biases and with fully rotated heads unless flags say otherwise."""
    plain = Attention(heads, kv_heads, head_dim, qkv_bias=False, out_bias=False, rotary_dim=head_dim)
    return attrs.evolve(plain, **flags)


def swiglu(ffn: int, **flags: Any) -> Mlp:
    return attrs.evolve(Mlp(ffn, gated=True, activation="silu", bias=False), **flags)


def rms(attention: Attention | LatentAttention, mlp: Mlp | Experts, norms: str = "pre") -> Layer:
    return Layer(attention, mlp, "rmsnorm", norms)


def llama(heads: int, kv_heads: int, ffn: int, **flags: Any) -> Layer:
    return rms(gqa(heads, kv_heads, 128, **flags), swiglu(ffn))


# dense models of one kind of layer -----------------------------------------------------------------------------------

NORMED = {"qk_norm": "head"}
BIASED = {"qkv_bias": True}
GPT2_XL = Layer(
    Attention(25, 25, 64, qkv_bias=True, out_bias=True, rotary_dim=0), Mlp(6400, False, "gelu", True), "layernorm"
)
OPT = Layer(
    Attention(32, 32, 64, qkv_bias=True, out_bias=True, rotary_dim=0), Mlp(8192, False, "relu", True), "layernorm"
)


@pytest.mark.parametrize(
    ("name", "n_layers", "hidden", "vocab", "positions", "tied", "layer"),
    [
        ("Llama-2-70b", 80, 8192, 32000, 8192, False, llama(64, 8, 28672)),
        ("Llama-3-70B", 80, 8192, 128256, 8192, False, llama(64, 8, 28672)),
        ("Llama-3-8B", 32, 4096, 128256, 131072, False, llama(32, 8, 14336)),
        ("Llama-3.2-1B-Instruct", 16, 2048, 128256, 131072, True, rms(gqa(32, 8, 64), swiglu(8192))),
        ("Meta-Llama-3.1-405B", 126, 16384, 128256, 131072, False, llama(128, 8, 53248)),
        ("Meta-Llama-3.1-70B", 80, 8192, 128256, 131072, False, llama(64, 8, 28672)),
        ("Meta-Llama-3.1-8B", 32, 4096, 128256, 131072, False, llama(32, 8, 14336)),
        ("MiMo-7B-Base", 36, 4096, 151680, 32768, False, llama(32, 8, 11008, **BIASED)),
        ("Mistral-7B-Instruct-v0.3", 32, 4096, 32768, 32768, False, llama(32, 8, 14336)),
        ("Qwen2-0.5B", 24, 896, 151936, 131072, True, rms(gqa(14, 2, 64, **BIASED), swiglu(4864))),
        # its window of 131072 tokens is switched off, and longer than the 32768 positions anyway
        ("Qwen2.5-7B-Instruct", 28, 3584, 152064, 32768, False, llama(28, 4, 18944, **BIASED)),
        # heads of 128, not 5120 / 64 = 80
        ("Qwen3-32B", 64, 5120, 151936, 40960, False, llama(64, 8, 25600, **NORMED)),
        ("Qwen3-8B", 36, 4096, 151936, 40960, False, llama(32, 8, 12288, **NORMED)),
        ("Qwen3-VL-8B-Instruct", 36, 4096, 151936, 262144, False, llama(32, 8, 12288, **NORMED)),
        ("toy-qwen2.5-omni-nested", 2, 3584, 152064, 32768, False, llama(28, 4, 18944, **BIASED)),
        ("draft-longcat-flash-eagle3", 1, 6144, 131072, 131072, False, llama(64, 16, 12288)),
        ("phi-4", 40, 5120, 100352, 16384, False, llama(40, 10, 17920)),
        ("gpt2-xl", 48, 1600, 50257, 1024, True, GPT2_XL),
        ("opt-1.3b", 24, 2048, 50272, 2048, True, OPT),
    ],
)
def test_dense_models(
    name: str, n_layers: int, hidden: int, vocab: int, positions: int, tied: bool, layer: Layer
) -> None:
    model = real(name)
    assert runs(model) == [("dense", n_layers)]
    assert model.distinct_layers == (layer,)
    assert (model.hidden, model.vocab, model.max_positions, model.tied_embeddings) == (hidden, vocab, positions, tied)
    assert model.final_norm == layer.norm


def test_position_tables() -> None:
    assert real("gpt2-xl").learned_positions == 1024
    assert real("opt-1.3b").learned_positions == 2048 + 2
    assert real("Llama-3-8B").learned_positions == 0


# windows, chunks, positions on some layers only ----------------------------------------------------------------------

THREE_TO_ONE: Runs = [("sliding_dense", 3), ("dense", 1)] * 16


def test_gemma_2_alternates_and_caps_its_logits() -> None:
    model = real("gemma-2-9b")
    assert runs(model) == [("sliding_dense", 1), ("dense", 1)] * 21  # 42 layers, the even ones slide
    glu = Mlp(14336, gated=True, activation="gelu", bias=False)
    near = rms(gqa(16, 8, 256, softcap=True, window=4096), glu, "sandwich")
    assert model.distinct_layers == (near, rms(gqa(16, 8, 256, softcap=True), glu, "sandwich"))
    assert (model.hidden, model.vocab, model.tied_embeddings, model.final_softcap) == (3584, 256000, True, True)


def test_gemma_3_sees_everything_in_each_sixth_layer() -> None:
    model = real("gemma-3-27b-it")
    assert runs(model) == [("sliding_dense", 5), ("dense", 1)] * 10 + [("sliding_dense", 2)]  # 6 * 10 + 2 = 62
    glu = Mlp(21504, gated=True, activation="gelu", bias=False)
    near = rms(gqa(32, 16, 128, qk_norm="head", window=1024), glu, "sandwich")
    assert model.distinct_layers == (near, rms(gqa(32, 16, 128, qk_norm="head"), glu, "sandwich"))
    assert (model.hidden, model.vocab, model.tied_embeddings, model.final_softcap) == (5376, 262208, True, False)
    assert model.dtype == "bf16"  # said outside of text_config


def test_exaone_4_has_no_positions_where_it_sees_everything() -> None:
    model = real("EXAONE-4.0-32B")
    assert runs(model) == THREE_TO_ONE
    near = rms(gqa(40, 8, 128, qk_norm="head", window=4096), swiglu(27392), "post")
    assert model.distinct_layers == (near, rms(gqa(40, 8, 128, qk_norm="head", rotary_dim=0), swiglu(27392), "post"))


def test_olmo_3_norms_all_query_heads_together() -> None:
    model = real("Olmo-3.1-32B-Instruct")
    assert runs(model) == THREE_TO_ONE
    near = rms(gqa(40, 8, 128, qk_norm="full", window=4096), swiglu(27648), "post")
    assert model.distinct_layers == (near, rms(gqa(40, 8, 128, qk_norm="full"), swiglu(27648), "post"))


def test_gpt_oss_alternates_and_has_sinks_and_biases() -> None:
    for name, n_layers, experts in (("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128)):
        model = real(name)
        assert runs(model) == [("sliding_moe", 1), ("moe", 1)] * (n_layers // 2)
        attention = gqa(64, 8, 64, qkv_bias=True, out_bias=True, sinks=True)  # 64 * 64 = 4096 of a hidden size of 2880
        moe = Experts(experts, 4, swiglu(2880, bias=True), router_bias=True)
        assert model.distinct_layers == (rms(attrs.evolve(attention, window=128), moe), rms(attention, moe))
        assert (model.hidden, model.vocab, model.tied_embeddings) == (2880, 201088, False)


def test_llama_4_attends_in_chunks_and_has_no_positions_on_each_fourth_layer() -> None:
    model = real("Llama-4-Scout-17B-16E-Instruct")
    assert runs(model) == [("chunked_moe", 3), ("moe", 1)] * 12
    moe = Experts(16, 1, swiglu(8192), scoring="sigmoid", shared=swiglu(8192))
    near = rms(gqa(40, 8, 128, chunk=8192), moe)
    assert model.distinct_layers == (near, rms(gqa(40, 8, 128, rotary_dim=0), moe))
    assert "length 1 without weights" in model.warnings[0]


# experts -------------------------------------------------------------------------------------------------------------


def test_mixtral() -> None:
    small, large = real("Mixtral-8x7B-v0.1"), real("Mixtral-8x22B-v0.1")
    assert (runs(small), runs(large)) == ([("moe", 32)], [("moe", 56)])
    assert small.layers[0] == rms(gqa(32, 8, 128), Experts(8, 2, swiglu(14336)))
    assert large.layers[0] == rms(gqa(48, 8, 128), Experts(8, 2, swiglu(16384)))


def test_qwen3_moe() -> None:
    small, large = real("Qwen3-30B-A3B"), real("Qwen3-235B-A22B")
    assert (runs(small), runs(large)) == ([("moe", 48)], [("moe", 94)])
    assert small.layers[0] == rms(gqa(32, 4, 128, qk_norm="head"), Experts(128, 8, swiglu(768)))
    assert large.layers[0] == rms(gqa(64, 4, 128, qk_norm="head"), Experts(128, 8, swiglu(1536)))


def test_phi_moe_has_layer_norms_biases_and_a_window() -> None:
    model = real("Phi-mini-MoE-instruct")
    assert runs(model) == [("sliding_moe", 32)]
    attention = gqa(32, 8, 128, qkv_bias=True, out_bias=True, window=2047)
    assert model.distinct_layers == (Layer(attention, Experts(16, 2, swiglu(960)), "layernorm"),)
    assert (model.final_norm, model.head_bias, model.tied_embeddings) == ("layernorm", True, False)


def test_granite_moe() -> None:
    model = real("granite-3.1-1b-a400m")
    assert runs(model) == [("moe", 24)]
    assert model.distinct_layers == (rms(gqa(16, 8, 64), Experts(32, 8, swiglu(512))),)
    assert model.tied_embeddings


def test_minimax_rotates_half_of_each_head() -> None:
    model = real("MiniMax-M2.5")
    assert runs(model) == [("moe", 62)]
    attention = gqa(48, 8, 128, rotary_dim=64, qk_norm="full")
    assert model.distinct_layers == (rms(attention, Experts(256, 8, swiglu(1536), scoring="sigmoid")),)
    assert (model.mtp, model.dtype) == (3 * 1, "bf16")


def test_glm_4_5_has_biases_on_queries_keys_and_values_only() -> None:
    model = real("GLM-4.5-Air")
    assert runs(model) == [("dense", 1), ("moe", 45)]
    attention = gqa(96, 8, 128, qkv_bias=True, rotary_dim=64)
    moe = Experts(128, 8, swiglu(1408), scoring="sigmoid", shared=swiglu(1408))
    assert model.distinct_layers == (rms(attention, swiglu(10944)), rms(attention, moe))
    assert model.mtp == 1


@pytest.mark.parametrize(
    ("name", "n_dense", "n_moe", "latent", "ffn", "moe", "mtp"),
    [
        (
            *("DeepSeek-V2-Lite", 1, 26, LatentAttention(16, 0, 512, 128, 64, 128), 10944),  # queries are direct
            *(Experts(64, 6, swiglu(1408), shared=swiglu(2 * 1408)), 0),
        ),
        (
            *("DeepSeek-V3", 3, 58, LatentAttention(128, 1536, 512, 128, 64, 128), 18432),
            *(Experts(256, 8, swiglu(2048), scoring="sigmoid", shared=swiglu(2048)), 1),
        ),
        (
            *("Kimi-K2-Instruct", 1, 60, LatentAttention(64, 1536, 512, 128, 64, 128), 18432),
            *(Experts(384, 8, swiglu(2048), scoring="sigmoid", shared=swiglu(2048)), 0),
        ),
    ],
)
def test_latent_attention(
    name: str, n_dense: int, n_moe: int, latent: LatentAttention, ffn: int, moe: Experts, mtp: int
) -> None:
    model = real(name)
    assert runs(model) == [("dense", n_dense), ("moe", n_moe)]
    assert model.distinct_layers == (rms(latent, swiglu(ffn)), rms(latent, moe))
    assert (model.mtp, model.tied_embeddings) == (mtp, False)


# what is said and what is refused ------------------------------------------------------------------------------------

SILENT = [
    "DeepSeek-V2-Lite",
    "EXAONE-4.0-32B",
    "GLM-4.5-Air",
    "Llama-2-70b",
    "Llama-3-70B",
    "Llama-3-8B",
    "Llama-3.2-1B-Instruct",
    "Meta-Llama-3.1-405B",
    "Meta-Llama-3.1-70B",
    "Meta-Llama-3.1-8B",
    "MiMo-7B-Base",
    "Mistral-7B-Instruct-v0.3",
    "Mixtral-8x22B-v0.1",
    "Mixtral-8x7B-v0.1",
    "Olmo-3.1-32B-Instruct",
    "Phi-mini-MoE-instruct",
    "Qwen2-0.5B",
    "Qwen2.5-7B-Instruct",
    "Qwen3-235B-A22B",
    "Qwen3-30B-A3B",
    "Qwen3-32B",
    "Qwen3-8B",
    "gemma-2-9b",
    "granite-3.1-1b-a400m",
    "phi-4",
]
NESTED = "only the language model in text_config is read: vision and audio parts"
OMNI = (
    "only the language model in thinker_config.text_config is read: vision and audio parts "
    "(talker_config, token2wav_config, vision_config, audio_config) are not counted"
)
WARNED = {
    "DeepSeek-V3": ["inference checkpoint (fp8): training dtype taken as bf16"],
    "Kimi-K2-Instruct": ["inference checkpoint (fp8): training dtype taken as bf16"],
    "Llama-4-Scout-17B-16E-Instruct": [
        "queries and keys are scaled to length 1 without weights: that scaling is not counted",
        f"{NESTED} are not counted",
    ],
    "MiniMax-M2.5": ["inference checkpoint (fp8): training dtype taken as bf16"],
    "Qwen3-VL-8B-Instruct": [f"{NESTED} (vision_config) are not counted"],
    "draft-longcat-flash-eagle3": [
        "this is a draft for speculative decoding: read as the plain decoder that it describes"
    ],
    "gemma-3-27b-it": [f"{NESTED} (vision_config) are not counted"],
    "gpt-oss-120b": ["inference checkpoint (mxfp4): training dtype taken as bf16"],
    "gpt-oss-20b": ["inference checkpoint (mxfp4): training dtype taken as bf16"],
    "gpt2-xl": ["the config names no dtype: bf16 is assumed"],
    "opt-1.3b": ["the config names no dtype: bf16 is assumed"],
    "toy-qwen2.5-omni-nested": [OMNI],
}
SSM = "state-space and linear-attention layers are not modelled yet"
REFUSED = {
    "Nemotron-H-56B-Base-8K": (
        *("config-ssm", "hybrid_override_pattern"),
        f"layers 0, 2, 4, 6, 9, ... (54 layers) are Mamba-2: {SSM}",
    ),
    "Qwen3-Next-80B-A3B": (
        *("config-ssm", "full_attention_interval"),  # 48 layers, each fourth one is full
        f"layers 0-2, 4-6, 8-10, 12-14, 16-18, ... (36 layers) are linear attention: {SSM}",
    ),
    "bert-large-uncased": (
        *("config-encoder", "type_vocab_size"),
        "type_vocab_size is set: encoders and encoder-decoders are not modelled: only decoder-only language models are",
    ),
}


def test_every_file_is_spoken_for() -> None:
    names = {path.stem for path in FOLDER.glob("*.json")}
    assert len(names) == 40
    assert names == {*SILENT, *WARNED, *REFUSED}


@pytest.mark.parametrize("name", [*SILENT, *WARNED])
def test_what_was_assumed(name: str) -> None:
    assert list(real(name).warnings) == WARNED.get(name, [])


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    code, key, what = REFUSED[name]
    with pytest.raises(InputError) as caught:
        real(name)
    (problem,) = caught.value.problems
    assert (problem.code, problem.what) == (code, what)
    assert problem.where.endswith(f"{name}.json:{key}")


# anything else: a model or a list of problems, never a traceback -----------------------------------------------------

CONFIG_FILES = [*CONFIGS.glob("*.json"), *FOLDER.glob("*.json")]
CONFIGURATIONS = {
    str(path): json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(CONFIG_FILES, key=lambda path: (path.parent.name, path.name))
}
GONE = "take the key away"
BAD = st.one_of(
    st.sampled_from([None, -1, 0, 1, 2, True, "12", "", "LLLG", 0.5, 8.7, 1e400, float("nan"), float("-inf")]),
    st.sampled_from([10**9, 10**12, 10**400, [1] * 80, [0, 1] * 40, ["full_attention"] * 48, {"hidden_size": 64}]),
    st.recursive(
        st.none() | st.integers(-5, 5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    ),
)
EXTRA = [
    "head_dim",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "num_experts",
    "partial_rotary_factor",
    "rotary_dim",
    "hidden_size",
    "n_inner",
    "text_config",
    "architectures",
    "dtype",
    "model_type",
    "moe_layer_freq",
    "mlp_only_layers",
    "moe_layers",
    "no_rope_layers",
    "rope_parameters",
    "sliding_window_pattern",
    "shared_intermediate_size",
    "qk_norm_type",
    "quantization_config",
    "full_attention_interval",
    "layers_block_type",
    "linear_attn_config",
    "draft_vocab_size",
    "vision_config",
]


def mutated(data: st.DataObject, config: dict[str, Any]) -> dict[str, Any]:
    keys = st.sampled_from(sorted({*config, *EXTRA}))
    changes = data.draw(st.dictionaries(keys, BAD | st.just(GONE), max_size=4))
    changed = {key: value for key, value in {**config, **changes}.items() if value != GONE}
    inner = next((key for key in ("text_config", "thinker_config") if isinstance(changed.get(key), dict)), "")
    return {**changed, inner: mutated(data, changed[inner])} if inner and changed[inner] else changed


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_a_mutated_config_is_read_or_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = mutated(data, CONFIGURATIONS[data.draw(st.sampled_from(sorted(CONFIGURATIONS)))])
    path = tmp_path_factory.getbasetemp() / "mutated.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    try:
        model = load_model(path)
    except InputError as error:
        assert error.problems
        assert all(problem.code and problem.what and str(path) in problem.where for problem in error.problems)
        return
    assert model.hidden > 0
    assert len(model.template_names) == model.n_layers
    for layer in model.distinct_layers:
        check(layer, model)


def check(layer: Layer, model: Model) -> None:
    """What holds for every layer that is read."""
    if isinstance(layer.attention, Attention):
        attention = layer.attention
        assert attention.heads % attention.kv_heads == 0
        assert 0 <= attention.rotary_dim <= attention.head_dim
        assert max(attention.window, attention.chunk) < model.max_positions
    if isinstance(layer.mlp, Experts):
        assert 1 <= layer.mlp.top_k <= layer.mlp.experts
