"""The rows of the families that have experts in some or all layers."""

from __future__ import annotations

import attrs

from stepgraph.lowering.densefamilies import ATTENTION_BIAS, ATTENTION_BIASED, LLAMA, MISTRAL, QWEN2, QWEN3
from stepgraph.lowering.families import NO, ExpertKeys, Family, QkNorm, Switch

GROUPS = ("n_group", "topk_group")
"""Routing limited to groups of experts: which experts a token may visit, not how many; not modelled."""

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
    inert=GROUPS,
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
    # The first repeats the heads, the second is one of several widths.
    inert=("num_key_value_heads", "head_dim", *GROUPS),
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

COMMON = (MIXTRAL, PHIMOE, GRANITE_MOE, GRANITE_MOE_SHARED, QWEN2_MOE, QWEN3_MOE, GPT_OSS)
SPARSE: tuple[Family, ...] = (*COMMON, GLM4_MOE, MINIMAX_M2, LLAMA4, DEEPSEEK_V2, DEEPSEEK_V3)
