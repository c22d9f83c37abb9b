"""What a config may ask for that cannot be modelled, or not for its family: each with a code and a reason that names the key.

Refusing beats guessing: a mixture of experts read as a dense model gives a plausible number that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from stepgraph.errors import Problem
from stepgraph.lowering.hybrids import hybrid_layers


@attrs.frozen
class Feature:
    """One thing that is not modelled, or not for every family.

    code: of the problem; keys: any of them set (not null, false, 0 or empty) means that the config uses it; why: the
    reason; fix: what to do about it, `{key}` standing for the key found; types: each `model_type` that implies it,
    even without a key; neutral: a value that means "not used" besides null, false, 0 and empty; some: some families
    have it (those read its keys), so that it is no reason to refuse an unknown family.
    """

    code: str
    why: str
    keys: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    fix: str = ""
    neutral: object = None
    some: bool = False


FEATURES: tuple[Feature, ...] = (
    Feature(
        "config-experts",
        "mixture-of-experts layers are not modelled for this family",
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
        some=True,
    ),
    Feature(
        "config-latent-experts",
        "experts that work in a narrower width are not read from a config yet (Experts.latent in Python has them)",
        keys=("moe_latent_size", "routed_expert_hidden_size"),
    ),
    Feature(
        "config-mla",
        "multi-head latent attention is not modelled for this family",
        keys=("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim"),
        some=True,
    ),
    Feature(
        "config-output-latent",
        "an output projection through a latent is not modelled yet",
        keys=("o_lora_rank",),
        types=("deepseek_v4",),
    ),
    Feature(
        "config-indexed-attention",
        "attention to selected tokens only is not modelled yet",
        keys=("index_topk", "index_n_heads", "compress_ratios", "sparse_attention_config"),
        types=("deepseek_v32",),
    ),
    Feature(
        "config-window",
        "attention in windows or chunks is not modelled for this family",
        keys=("attention_chunk_size", "sliding_window_pattern", "_sliding_window_pattern", "hybrid_layer_pattern"),
        some=True,
    ),
    Feature(
        "config-qk-norm",
        "norms on queries and keys are not modelled for this family",
        keys=("use_qk_norm", "qk_layernorm", "qk_norm", "qk_norm_type"),
        some=True,
    ),
    Feature(
        "config-ssm",
        "state-space and linear-attention layers are not modelled yet",
        keys=(
            "hybrid_override_pattern",
            "full_attention_interval",
            "layers_block_type",
            "ssm_state_size",
            "mamba_num_heads",
            "mamba_d_state",
            "linear_attn_config",
            "linear_num_key_heads",
            "attn_type_list",
        ),
        types=("mamba", "mamba2", "nemotron_h", "jamba", "zamba2", "bamba", "rwkv", "qwen3_next", "kimi_linear"),
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
        "attention and MLP side by side in one layer are not read from a config yet (Layer.parallel in Python has them)",
        keys=("parallel_attn", "use_parallel_residual", "new_decoder_architecture"),
        types=("falcon", "gpt_neox", "gptj", "cohere", "cohere2", "phi"),
    ),
    Feature(
        "config-softcap",
        "soft-capped logits are not modelled for this family",
        keys=("attn_logit_softcapping", "final_logit_softcapping"),
        fix="set {key} to null to leave it out",
        some=True,
    ),
    Feature(
        "config-mtp",
        "multi-token prediction layers are not modelled for this family",
        keys=("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "use_mtp"),
        fix="set {key} to null to leave them out",
        some=True,
    ),
    Feature(
        "config-partial-rope",
        "rotary positions on a part of each head are not modelled for this family",
        keys=("partial_rotary_factor", "rotary_pct", "rotary_dim"),
        neutral=1,
        some=True,
    ),
    Feature("config-alibi", "ALiBi positions are not modelled yet", keys=("alibi",), types=("bloom", "mpt")),
    Feature(
        "config-cross-attention",
        "cross-attention is not modelled yet",
        keys=("add_cross_attention", "cross_attention_layers"),
        types=("mllama_text_model", "mllama"),
    ),
    Feature(
        "config-head-bias",
        "a bias in the vocabulary head is not modelled for this family",
        keys=("lm_head_bias",),
        some=True,
    ),
    Feature("config-per-layer", "layers of different widths are not modelled yet", keys=("block_configs",)),
)

FEATURE_KEYS = frozenset(key for feature in FEATURES for key in feature.keys)


def unsupported_features(config: Mapping[str, object], where: str, read: frozenset[str] | None = None) -> list[Problem]:
    """A problem for each feature that the config uses, one per feature, naming the first key that asks for it.

    where: what messages put before a key; read: the keys that the family reads, which are no reason to refuse; None =
    the family is unknown, and then a feature that some families have is no reason either.
    """
    rows = [row for row in FEATURES if read is not None or not row.some]
    return [problem for row in rows if (problem := _feature_problem(row, config, where, read or frozenset()))]


def unsupported_type(model_type: str, where: str, already: Iterable[Problem]) -> list[Problem]:
    """A problem for each feature that the `model_type` alone implies, unless a key has already said it."""
    said = {problem.code for problem in already}
    rows = [row for row in FEATURES if model_type in row.types and row.code not in said]
    return [Problem(row.code, f"{where}model_type", f"{model_type!r}: {row.why}") for row in rows]


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


def _feature_problem(
    feature: Feature, config: Mapping[str, object], where: str, read: frozenset[str]
) -> Problem | None:
    asking = (key for key in feature.keys if key not in read and _is_set(config.get(key), feature.neutral))
    key = next(asking, "")
    if not key:
        return None
    layers = hybrid_layers(config, spans) if feature.code == "config-ssm" else ""
    what = f"{layers or f'{key} is set'}: {feature.why}"
    return Problem(feature.code, f"{where}{key}", what, fix=feature.fix.format(key=key))


def _is_set(value: object, neutral: object) -> bool:
    # True == 1 in Python, so a boolean must not pass for the neutral number.
    return bool(value) and (neutral is None or isinstance(value, bool) or value != neutral)
