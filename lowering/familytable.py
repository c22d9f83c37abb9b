"""The table of model families: one row per `model_type` of a Hugging Face config.json."""

from __future__ import annotations

import attrs

from stepgraph.lowering.families import NO, YES, ExpertKeys, Family, Fixed, QkNorm, Switch

ATTENTION_BIAS = Switch(default=False, key="attention_bias")
ATTENTION_BIASED = Switch(default=True, key="attention_bias")
USE_WINDOW = Switch(default=False, key="use_sliding_window")
HEAD_NORM = QkNorm("head", YES)
FULL_NORM = QkNorm("full", YES)

LLAMA = Family(
    model_type="llama",
    architectures=("LlamaForCausalLM",),
    norm="rmsnorm",
    gated=True,
    default_activation="silu",
    qkv_bias=ATTENTION_BIAS,
    out_bias=ATTENTION_BIAS,
    mlp_bias=Switch(default=False, key="mlp_bias"),
    tied=False,
)
MISTRAL = attrs.evolve(
    LLAMA,
    model_type="mistral",
    architectures=("MistralForCausalLM",),
    qkv_bias=NO,
    out_bias=NO,
    mlp_bias=NO,
    window="everywhere",
    window_default=4096,
)
QWEN2 = attrs.evolve(  # its query, key and value biases have no key
    MISTRAL,
    model_type="qwen2",
    aliases=("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text"),
    architectures=("Qwen2ForCausalLM",),
    qkv_bias=YES,
    window="upper",
    window_switch=USE_WINDOW,
)
MIMO = attrs.evolve(
    QWEN2,
    model_type="mimo",
    aliases=(),
    architectures=("MiMoForCausalLM",),
    qkv_bias=ATTENTION_BIASED,
    mtp=("num_nextn_predict_layers",),
)
QWEN3 = attrs.evolve(
    QWEN2,
    model_type="qwen3",
    aliases=("qwen3_vl", "qwen3_vl_text"),
    architectures=("Qwen3ForCausalLM",),
    qkv_bias=ATTENTION_BIAS,
    out_bias=ATTENTION_BIAS,
    qk_norm=HEAD_NORM,
    default_head_dim=128,
)
PHI3 = attrs.evolve(
    MISTRAL,
    model_type="phi3",
    architectures=("Phi3ForCausalLM",),
    window_default=0,
    inert=("attention_bias",),
)
GRANITE = attrs.evolve(LLAMA, model_type="granite", architectures=("GraniteForCausalLM",))
GEMMA = attrs.evolve(
    LLAMA,
    model_type="gemma",
    architectures=("GemmaForCausalLM",),
    default_activation="gelu_pytorch_tanh",
    mlp_bias=NO,
    tied=True,
    default_head_dim=256,
    activation=("hidden_activation",),
    inert=("hidden_act",),
)
GEMMA2 = attrs.evolve(
    GEMMA,
    model_type="gemma2",
    architectures=("Gemma2ForCausalLM",),
    norms="sandwich",
    attention_softcap=Switch(default=True, key="attn_logit_softcapping"),
    final_softcap=Switch(default=True, key="final_logit_softcapping"),
    window="even",
    window_default=4096,
)
GEMMA3 = attrs.evolve(
    GEMMA2,
    model_type="gemma3_text",
    aliases=("gemma3",),
    architectures=("Gemma3ForCausalLM",),
    attention_softcap=Switch(default=False, key="attn_logit_softcapping"),
    final_softcap=Switch(default=False, key="final_logit_softcapping"),
    qk_norm=HEAD_NORM,
    window="interval",
    interval=6,
)
OLMO2 = attrs.evolve(
    LLAMA,
    model_type="olmo2",
    architectures=("Olmo2ForCausalLM",),
    mlp_bias=NO,
    norms="post",
    qk_norm=FULL_NORM,
)
OLMO3 = attrs.evolve(
    OLMO2,
    model_type="olmo3",
    architectures=("Olmo3ForCausalLM",),
    window="interval",
    window_default=4096,
    interval=4,
)
EXAONE4 = attrs.evolve(
    MISTRAL,
    model_type="exaone4",
    architectures=("Exaone4ForCausalLM",),
    norms="post",
    qk_norm=HEAD_NORM,
    window="interval",
    window_default=4096,
    interval=4,
    nope="global",
)
MIXTRAL = attrs.evolve(
    MISTRAL,
    model_type="mixtral",
    architectures=("MixtralForCausalLM",),
    window_default=0,
    experts=ExpertKeys("all", ("num_local_experts",), width=("intermediate_size",)),
)
PHIMOE = attrs.evolve(
    MIXTRAL,
    model_type="phimoe",
    architectures=("PhimoeForCausalLM", "PhiMoEForCausalLM"),
    norm="layernorm",
    qkv_bias=ATTENTION_BIAS,
    out_bias=ATTENTION_BIAS,
    head_bias=Switch(default=False, key="lm_head_bias"),
)
GRANITE_MOE = attrs.evolve(
    LLAMA,
    model_type="granitemoe",
    architectures=("GraniteMoeForCausalLM",),
    mlp_bias=NO,
    experts=ExpertKeys("all", ("num_local_experts",), width=("intermediate_size",)),
)
GRANITE_MOE_SHARED = attrs.evolve(
    GRANITE_MOE,
    model_type="granitemoeshared",
    architectures=("GraniteMoeSharedForCausalLM",),
    experts=ExpertKeys(
        "all", ("num_local_experts",), width=("intermediate_size",), shared_width=("shared_intermediate_size",)
    ),
)
QWEN2_MOE = attrs.evolve(
    QWEN2,
    model_type="qwen2_moe",
    aliases=(),
    architectures=("Qwen2MoeForCausalLM",),
    experts=ExpertKeys(
        "sparse_step",
        ("num_experts",),
        shared_width=("shared_expert_intermediate_size",),
        shared_gate=True,
    ),
)
QWEN3_MOE = attrs.evolve(
    QWEN3,
    model_type="qwen3_moe",
    aliases=("qwen3_vl_moe", "qwen3_vl_moe_text"),
    architectures=("Qwen3MoeForCausalLM",),
    experts=ExpertKeys("sparse_step", ("num_experts",)),
    default_head_dim=0,
    window="everywhere",
    inert=("max_window_layers",),
)
GPT_OSS = attrs.evolve(
    MIXTRAL,
    model_type="gpt_oss",
    architectures=("GptOssForCausalLM",),
    qkv_bias=ATTENTION_BIASED,
    out_bias=ATTENTION_BIASED,
    sinks=True,
    window="even",
    window_default=128,
    default_head_dim=64,
    experts=ExpertKeys(
        "all",
        ("num_local_experts",),
        top_k=("num_experts_per_tok", "experts_per_token"),
        width=("intermediate_size",),
        router_bias=True,
        bias=True,
    ),
)
GLM4_MOE = attrs.evolve(
    LLAMA,
    model_type="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    out_bias=NO,
    mlp_bias=NO,
    qk_norm=QkNorm("head", Switch(default=False, key="use_qk_norm")),
    rotary=0.5,
    default_head_dim=128,
    experts=ExpertKeys("after_first", ("n_routed_experts",), scoring="sigmoid", shared_count=("n_shared_experts",)),
    mtp=("num_nextn_predict_layers",),
)
MINIMAX_M2 = attrs.evolve(  # the bias that corrects its routing is a buffer
    MISTRAL,
    model_type="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    qk_norm=QkNorm("full", Switch(default=True, key="use_qk_norm"), kind_key="qk_norm_type"),
    window="none",
    default_head_dim=128,
    experts=ExpertKeys(
        "all",
        ("num_local_experts",),
        width=("intermediate_size",),
        scoring="sigmoid",
        scoring_key="scoring_func",
        shared_width=("shared_intermediate_size",),
    ),
    mtp=("num_mtp_modules", "mtp_transformer_layers"),
    mtp_switch=Switch(default=True, key="use_mtp"),
)
LLAMA4 = attrs.evolve(
    LLAMA,
    model_type="llama4_text",
    aliases=("llama4",),
    architectures=("Llama4ForCausalLM",),
    mlp_bias=NO,
    qk_norm=QkNorm("l2", Switch(default=True, key="use_qk_norm")),
    window="chunked",
    window_default=8192,
    interval=4,
    nope="listed",
    default_head_dim=128,
    ffn=("intermediate_size_mlp",),
    experts=ExpertKeys(
        "interleaved",
        ("num_local_experts",),
        width=("intermediate_size",),
        scoring="sigmoid",
        shared_always=True,
    ),
)
DEEPSEEK_V2 = attrs.evolve(
    LLAMA,
    model_type="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    mlp_bias=NO,
    latent=True,
    kv_heads=(),
    head_dim=(),
    experts=ExpertKeys(
        "after_first", ("n_routed_experts",), scoring_key="scoring_func", shared_count=("n_shared_experts",)
    ),
    inert=("num_key_value_heads", "head_dim"),  # the first repeats the heads, the second is one of several widths
)
DEEPSEEK_V3 = attrs.evolve(
    DEEPSEEK_V2,
    model_type="deepseek_v3",
    aliases=("kimi_k2",),
    architectures=("DeepseekV3ForCausalLM",),
    experts=ExpertKeys(
        "after_first",
        ("n_routed_experts",),
        scoring="sigmoid",
        scoring_key="scoring_func",
        shared_count=("n_shared_experts",),
    ),
    mtp=("num_nextn_predict_layers",),
)
GPT2 = Family(
    model_type="gpt2",
    architectures=("GPT2LMHeadModel",),
    norm="layernorm",
    gated=False,
    default_activation="gelu_new",
    qkv_bias=YES,
    out_bias=YES,
    mlp_bias=YES,
    tied=True,
    learned_positions=True,
    ffn_ratio=4,
    hidden=("n_embd", "hidden_size"),
    layers=("n_layer", "num_hidden_layers"),
    heads=("n_head", "num_attention_heads"),
    kv_heads=(),
    head_dim=(),
    ffn=("n_inner",),
    positions=("n_positions", "max_position_embeddings", "n_ctx"),
    activation=("activation_function",),
)
OPT_BIAS = Switch(default=True, key="enable_bias")
OPT = Family(
    model_type="opt",
    architectures=("OPTForCausalLM",),
    norm="layernorm",
    gated=False,
    default_activation="relu",
    qkv_bias=OPT_BIAS,
    out_bias=OPT_BIAS,
    mlp_bias=OPT_BIAS,
    tied=True,
    learned_positions=True,
    extra_position_rows=2,  # the table starts two rows before position 0
    kv_heads=(),
    head_dim=(),
    ffn=("ffn_dim",),
    activation=("activation_function",),
    fixed=(
        Fixed("do_layer_norm_before", True, "norms would come after the residual additions (post-norm)"),
        Fixed("_remove_final_layer_norm", False, "the norm before the head would be missing"),
        Fixed("layer_norm_elementwise_affine", True, "the norms would have no parameters"),
    ),
    same_as_hidden=("word_embed_proj_dim",),
)

DENSE = (LLAMA, MISTRAL, QWEN2, QWEN3, MIMO, PHI3, GRANITE, GEMMA, GEMMA2, GEMMA3, OLMO2, OLMO3, EXAONE4, GPT2, OPT)
SPARSE = (MIXTRAL, PHIMOE, GRANITE_MOE, GRANITE_MOE_SHARED, QWEN2_MOE, QWEN3_MOE, GPT_OSS, GLM4_MOE, MINIMAX_M2, LLAMA4)
FAMILIES: tuple[Family, ...] = (*DENSE, *SPARSE, DEEPSEEK_V2, DEEPSEEK_V3)


def family_of(model_type: object) -> Family | None:
    """The row of a `model_type`, or None when there is none."""
    if not isinstance(model_type, str):
        return None
    return next((row for row in FAMILIES if model_type in (row.model_type, *row.aliases)), None)


def family_of_architecture(architectures: object) -> Family | None:
    """The row that a config's `architectures` list names, or None: a hint for files without a `model_type`."""
    if not isinstance(architectures, list):
        return None
    return next((row for row in FAMILIES if set(row.architectures) & _words(architectures)), None)


def _words(values: list[object]) -> set[str]:
    return {value for value in values if isinstance(value, str)}
