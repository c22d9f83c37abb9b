"""What a config may ask for that cannot be modelled yet: each with a code and a reason that names the key.

Refusing beats guessing: a mixture of experts read as a dense model gives a plausible number that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from stepgraph.errors import Problem


@attrs.frozen
class Feature:
    """One thing that is not modelled yet.

    code: of the problem; keys: any of them set (not null, false, 0 or empty) means that the config uses it; why: the
    reason; fix: what to do about it, `{key}` standing for the key found; types: each `model_type` that implies it,
    even without a key; neutral: a value that means "not used" besides null, false, 0 and empty.
    """

    code: str
    why: str
    keys: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    fix: str = ""
    neutral: object = None


FEATURES: tuple[Feature, ...] = (
    Feature(
        "config-nested",
        "vision, audio and other multi-part models, whose language model is nested in the file, are not modelled yet",
        keys=(
            "text_config",
            "thinker_config",
            "talker_config",
            "llm_config",
            "language_config",
            "vision_config",
            "audio_config",
        ),
        types=("llama4", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mllama", "llava", "qwen2_5_omni"),
    ),
    Feature(
        "config-experts",
        "mixture-of-experts layers are not modelled yet",
        keys=(
            "n_routed_experts",
            "num_experts",
            "num_local_experts",
            "moe_num_experts",
            "num_experts_per_tok",
            "num_experts_per_token",
            "experts_per_token",
            "moe_topk",
            "moe_intermediate_size",
            "n_shared_experts",
            "num_shared_experts",
            "ffn_config",
        ),
        types=("mixtral", "qwen2_moe", "phimoe", "granitemoe", "olmoe", "dbrx", "minimax_m2"),
    ),
    Feature(
        "config-mla",
        "multi-head latent attention is not modelled yet",
        keys=("kv_lora_rank", "q_lora_rank", "o_lora_rank", "qk_rope_head_dim"),
        types=("deepseek_v2", "deepseek_v3", "kimi_k2"),
    ),
    Feature(
        "config-window",
        "attention in windows or chunks is not modelled yet",
        keys=("attention_chunk_size", "sliding_window_pattern", "_sliding_window_pattern", "hybrid_layer_pattern"),
        types=("gpt_oss", "starcoder2", "olmo3", "exaone4"),
    ),
    Feature(
        "config-qk-norm",
        "norms on queries and keys are not modelled yet",
        keys=("use_qk_norm", "qk_layernorm", "qk_norm", "qk_norm_type"),
        types=("qwen3", "qwen3_moe", "olmo2", "olmo3", "exaone4", "gemma3_text"),
    ),
    Feature(
        "config-ssm",
        "state-space and linear-attention layers are not modelled yet",
        keys=(
            "hybrid_override_pattern",
            "layers_block_type",
            "ssm_state_size",
            "mamba_num_heads",
            "mamba_d_state",
            "linear_attn_config",
            "linear_num_key_heads",
            "full_attention_interval",
            "attn_type_list",
        ),
        types=("mamba", "mamba2", "nemotron_h", "jamba", "zamba2", "bamba", "rwkv", "qwen3_next"),
    ),
    Feature(
        "config-encoder",
        "encoders and encoder-decoders are not modelled: only decoder-only language models are",
        keys=("is_encoder_decoder", "type_vocab_size"),
        types=(
            "bert",
            "roberta",
            "deberta-v2",
            "albert",
            "electra",
            "distilbert",
            "modernbert",
            "t5",
            "bart",
            "whisper",
        ),
    ),
    Feature(
        "config-parallel-attention",
        "attention and MLP side by side in one layer are not modelled yet",
        keys=("parallel_attn", "use_parallel_residual", "new_decoder_architecture"),
        types=("falcon", "gpt_neox", "gptj", "cohere", "cohere2", "phi"),
    ),
    Feature(
        "config-softcap",
        "soft-capped logits are not modelled yet",
        keys=("attn_logit_softcapping", "final_logit_softcapping"),
        types=("gemma2",),
        fix="set {key} to null to leave it out",
    ),
    Feature(
        "config-quantized",
        "this is a quantised checkpoint, made for inference: its formats say nothing about training",
        keys=("quantization_config", "compression_config"),
        fix="set {key} to null to model training of the unquantised model",
    ),
    Feature(
        "config-draft",
        "this is a draft for speculative decoding, not a language model that is trained by itself",
        keys=("draft_vocab_size", "eagle_config", "speculators_model_type", "speculators_config"),
        fix="use the config of the model that it drafts for",
    ),
    Feature(
        "config-mtp",
        "multi-token prediction layers are not modelled yet",
        keys=("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "use_mtp"),
        types=("mimo",),
        fix="set {key} to null to leave them out",
    ),
    Feature(
        "config-partial-rope",
        "rotary positions on a part of each head are not modelled yet",
        keys=("partial_rotary_factor", "rotary_pct"),
        neutral=1,
    ),
    Feature("config-alibi", "ALiBi positions are not modelled yet", keys=("alibi",), types=("bloom", "mpt")),
    Feature("config-cross-attention", "cross-attention is not modelled yet", keys=("add_cross_attention",)),
    Feature("config-head-bias", "a bias in the vocabulary head is not modelled yet", keys=("lm_head_bias",)),
    Feature("config-per-layer", "layers of different widths are not modelled yet", keys=("block_configs",)),
)

FEATURE_KEYS = frozenset(key for feature in FEATURES for key in feature.keys) | {"layer_types"}


def unsupported_features(config: Mapping[str, object], where: str) -> list[Problem]:
    """A problem for each feature that the config uses, one per feature, naming the first key that asks for it."""
    found = [problem for feature in FEATURES if (problem := _feature_problem(feature, config, where))]
    return found + _draft_problem(config, where, found) + _layer_types_problems(config, where)


def unsupported_type(model_type: str, where: str, already: Iterable[Problem]) -> list[Problem]:
    """A problem for each feature that the `model_type` alone implies, unless a key has already said it."""
    said = {problem.code for problem in already}
    rows = [row for row in FEATURES if model_type in row.types and row.code not in said]
    return [Problem(row.code, f"{where}:model_type", f"{model_type!r}: {row.why}") for row in rows]


def is_known_type(model_type: str) -> bool:
    """Whether this `model_type` is known to need a feature that is not modelled yet."""
    return any(model_type in row.types for row in FEATURES)


def spans(layers: Sequence[int]) -> str:
    """`0-2, 4-6, 8`: layer numbers as runs, the first five runs of them."""
    starts = [layer for i, layer in enumerate(layers) if i == 0 or layers[i - 1] != layer - 1]
    ends = [layer for i, layer in enumerate(layers) if i == len(layers) - 1 or layers[i + 1] != layer + 1]
    runs = [f"{start}-{end}" if end > start else f"{start}" for start, end in zip(starts, ends, strict=True)]
    more = f", ... ({len(layers)} layers)" if len(runs) > 5 else ""
    return ", ".join(runs[:5]) + more


def _feature_problem(feature: Feature, config: Mapping[str, object], where: str) -> Problem | None:
    key = next((key for key in feature.keys if _is_set(config.get(key), feature.neutral)), "")
    if not key:
        return None
    layers = _expert_layers(config) if feature.code == "config-experts" else ""
    return Problem(
        feature.code, f"{where}:{key}", f"{key} is set{layers}: {feature.why}", fix=feature.fix.format(key=key)
    )


def _is_set(value: object, neutral: object) -> bool:
    # True == 1 in Python, so a boolean must not pass for the neutral number.
    return bool(value) and (neutral is None or isinstance(value, bool) or value != neutral)


def _expert_layers(config: Mapping[str, object]) -> str:
    first = config.get("first_k_dense_replace")
    if isinstance(first, int) and not isinstance(first, bool) and first > 0:
        return f" (experts in layers {first} and up)"
    return ""


def _draft_problem(config: Mapping[str, object], where: str, found: Iterable[Problem]) -> list[Problem]:
    names = config.get("architectures")
    if not isinstance(names, list) or any(problem.code == "config-draft" for problem in found):
        return []
    drafts = [name for name in names if isinstance(name, str) and ("eagle" in name.lower() or "medusa" in name.lower())]
    row = next(feature for feature in FEATURES if feature.code == "config-draft")
    return [Problem(row.code, f"{where}:architectures", f"{drafts[0]!r}: {row.why}", fix=row.fix)] if drafts else []


def _layer_types_problems(config: Mapping[str, object], where: str) -> list[Problem]:
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        return []
    names = sorted({kind for kind in kinds if isinstance(kind, str)} - {"full_attention"})
    return [_layer_type_problem(name, kinds, where) for name in names]


def _layer_type_problem(name: str, kinds: list[object], where: str) -> Problem:
    windowed = name in ("sliding_attention", "chunked_attention")
    layers = [i for i, kind in enumerate(kinds) if kind == name]
    what = f"layers {spans(layers)} are {name[:40]!r}: only 'full_attention' is modelled yet"
    return Problem("config-window" if windowed else "config-layer-type", f"{where}:layer_types", what)
