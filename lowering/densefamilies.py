"""The rows of the families whose layers are dense."""

from __future__ import annotations

import attrs

from stepgraph.lowering.families import NO, YES, Family, Fixed, QkNorm, Switch

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


DENSE: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    MIMO,
    PHI3,
    GRANITE,
    GEMMA,
    GEMMA2,
    GEMMA3,
    OLMO2,
    OLMO3,
    EXAONE4,
    GPT2,
    OPT,
)
