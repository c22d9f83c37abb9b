"""The tensors of a Hugging Face checkpoint, name by name, from the raw keys of its config.json.

A second route to parameter counts: nothing of the package is used. Names and shapes ([out, in] for a linear layer) are
those that the modelling files of huggingface/transformers (src/transformers/models/<family>/modeling_<family>.py) or
of the model's own repository register. Left out: buffers (rotary frequencies, e_score_correction_bias), multi-token
prediction modules, vision and audio towers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import attrs

Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]
Part = Callable[[Config], Shapes]

STACKED = (".experts.gate_up_proj", ".experts.down_proj", ".input_linear", ".output_linear")
"""Names that hold all experts of a layer in one tensor, expert first."""

TIED_BY_DEFAULT = ("gpt2", "opt", "gemma2", "gemma3_text")
"""Classes whose `tie_word_embeddings` is true when the file does not say."""


def text_part(config: Config) -> Config:
    """The keys of the language model; what only the outer object says about tied embeddings is kept."""
    if "thinker_config" in config:
        return text_part(config["thinker_config"])
    outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**outer, **config["text_config"]} if "text_config" in config else config


def checkpoint(config: Config) -> Shapes:
    """Name and shape of every parameter of a language model's checkpoint."""
    c = text_part(config)
    family = str(c["model_type"])
    shapes = WHOLE[family](c) if family in WHOLE else _llama_like(c, FAMILIES[family])
    if not c.get("tie_word_embeddings", family in TIED_BY_DEFAULT):
        shapes["lm_head.weight"] = (c["vocab_size"], c.get("hidden_size", c.get("n_embd")))
    return shapes


def count(shapes: Shapes, config: Config) -> tuple[int, int]:
    """Elements of all tensors, and those that one token meets: of routed experts as many as it visits."""
    k = text_part(config).get("num_experts_per_tok", 0)
    return sum(map(prod, shapes.values())), sum(_met(name, shape, k) for name, shape in shapes.items())


def _met(name: str, shape: tuple[int, ...], k: int) -> int:
    if any(stacked in name for stacked in STACKED):
        return k * prod(shape[1:])
    number = name.partition(".experts.")[2].partition(".")[0]  # say that the token visits experts 0 to k - 1
    return 0 if number.isdigit() and int(number) >= k else prod(shape)


def named(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def linear(name: str, out: int, into: int, *, bias: bool = False) -> Shapes:
    return {f"{name}.weight": (out, into)} | ({f"{name}.bias": (out,)} if bias else {})


def norm(name: str, width: int, *, bias: bool = False) -> Shapes:
    return {f"{name}.{kind}": (width,) for kind in ("weight", "bias")[: 1 + bias]}


def grouped(c: Config, *, qkv_bias: bool = False, out_bias: bool = False) -> Shapes:
    """q_proj, k_proj, v_proj and o_proj; a head need not be hidden / heads wide."""
    d, heads = c["hidden_size"], c["num_attention_heads"]
    kv, width = c.get("num_key_value_heads", heads), c.get("head_dim", d // heads)
    shapes = linear("o_proj", d, heads * width, bias=out_bias)
    for name, out in (("q_proj", heads * width), ("k_proj", kv * width), ("v_proj", kv * width)):
        shapes |= linear(name, out, d, bias=qkv_bias)
    return named("self_attn.", shapes)


def input_biased(c: Config) -> Shapes:
    """Biases on q, k and v but not on the output: always in Qwen2, with attention_bias in GLM-4.5 and MiMo."""
    return grouped(c, qkv_bias=c.get("attention_bias", True))


def all_biased_if_said(c: Config) -> Shapes:
    """attention_bias speaks of all four projections (Llama, Phi-3.5-MoE, gpt-oss)."""
    bias = c.get("attention_bias", False)
    return grouped(c, qkv_bias=bias, out_bias=bias)


def head_normed(c: Config) -> Shapes:
    """With a norm over each query and each key head."""
    return grouped(c) | {f"self_attn.{name}.weight": (c["head_dim"],) for name in ("q_norm", "k_norm")}


def fully_normed(c: Config) -> Shapes:
    """With a norm over all query heads together and one over all key heads (OLMo 3, MiniMax-M2)."""
    shapes = grouped(c)
    for name in ("q", "k"):
        shapes[f"self_attn.{name}_norm.weight"] = shapes[f"self_attn.{name}_proj.weight"][:1]
    return shapes


def with_sinks(c: Config) -> Shapes:
    """With a learned logit per head (gpt-oss)."""
    return all_biased_if_said(c) | {"self_attn.sinks": (c["num_attention_heads"],)}


def latent(c: Config) -> Shapes:
    """Multi-head latent attention (DeepSeek-V2, -V3, Kimi K2)."""
    d, heads, rank, rotary = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    query = heads * (c["qk_nope_head_dim"] + rotary)
    shapes = linear("q_proj", query, d)
    if narrow := c["q_lora_rank"]:
        shapes = linear("q_a_proj", narrow, d) | linear("q_b_proj", query, narrow) | norm("q_a_layernorm", narrow)
    shapes |= linear("kv_a_proj_with_mqa", rank + rotary, d) | norm("kv_a_layernorm", rank)
    shapes |= linear("kv_b_proj", heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), rank)
    return named("self_attn.", shapes | linear("o_proj", d, heads * c["v_head_dim"]))


def gated(c: Config, width: int, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")) -> Shapes:
    """Two projections up, one down."""
    d = c["hidden_size"]
    return linear(names[0], width, d) | linear(names[1], width, d) | linear(names[2], d, width)


def dense(c: Config) -> Shapes:
    """The feed-forward part of a dense layer."""
    return named("mlp.", gated(c, c["intermediate_size"]))


def mixtral_experts(c: Config) -> Shapes:
    """w1 and w3 go up, w2 down (Mixtral, Phi-3.5-MoE, MiniMax-M2)."""
    one = gated(c, c["intermediate_size"], ("w1", "w3", "w2"))
    return named("block_sparse_moe.", _experts(c, one, c["num_local_experts"]))


def qwen_experts(c: Config) -> Shapes:
    """Routed experts only."""
    return named("mlp.", _experts(c, gated(c, c["moe_intermediate_size"]), c["num_experts"]))


def deepseek_experts(c: Config) -> Shapes:
    """Routed experts, and shared ones that lie side by side in one wider expert."""
    width = c["moe_intermediate_size"]
    shared = named("shared_experts.", gated(c, c["n_shared_experts"] * width))
    return named("mlp.", _experts(c, gated(c, width), c["n_routed_experts"]) | shared)


def granite_experts(c: Config) -> Shapes:
    d, f, n = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    stacked = {"input_linear.weight": (n, 2 * f, d), "output_linear.weight": (n, d, f)}
    return named("block_sparse_moe.", stacked | linear("router.layer", n, d))


def llama4_experts(c: Config) -> Shapes:
    """Routed experts and one shared expert of the same width."""
    d, f, n = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    stacked = {"experts.gate_up_proj": (n, d, 2 * f), "experts.down_proj": (n, f, d)}
    return named("feed_forward.", stacked | linear("router", n, d) | named("shared_expert.", gated(c, f)))


def gpt_oss_experts(c: Config) -> Shapes:
    """Everything has a bias, the router too."""
    d, f, n = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    up = {"experts.gate_up_proj": (n, d, 2 * f), "experts.gate_up_proj_bias": (n, 2 * f)}
    down = {"experts.down_proj": (n, f, d), "experts.down_proj_bias": (n, d)}
    return named("mlp.", up | down | linear("router", n, d, bias=True))


def _experts(c: Config, one: Shapes, n: int) -> Shapes:
    """n experts and their gate."""
    each = {f"experts.{i}.{name}": shape for i in range(n) for name, shape in one.items()}
    return each | linear("gate", n, c["hidden_size"])


@attrs.frozen
class Family:
    """Parts of a model with Llama's outline; norms: those of a layer; norm_bias: they are layer norms."""

    attention: Part
    feed: Part = dense
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_bias: bool = False


def _llama_like(c: Config, family: Family) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (c["vocab_size"], c["hidden_size"])}
    for i in range(c["num_hidden_layers"]):
        feed = dense if i < c.get("first_k_dense_replace", 0) else family.feed
        layer = family.attention(c) | feed(c)
        for name in family.norms:
            layer |= norm(name, c["hidden_size"], bias=family.norm_bias)
        shapes |= named(f"model.layers.{i}.", layer)
    if c.get("lm_head_bias"):
        shapes["lm_head.bias"] = (c["vocab_size"],)
    return shapes | norm("model.norm", c["hidden_size"], bias=family.norm_bias)


def _layer_norms(width: int, *names: str) -> Shapes:
    return {key: shape for name in names for key, shape in norm(name, width, bias=True).items()}


def _gpt2(c: Config) -> Shapes:
    """Everything has a bias; weights really lie [in, out], which changes no count."""
    d = c["n_embd"]
    ffn = c.get("n_inner") or 4 * d
    layer = linear("attn.c_attn", 3 * d, d, bias=True) | linear("attn.c_proj", d, d, bias=True)
    layer |= linear("mlp.c_fc", ffn, d, bias=True)
    layer |= linear("mlp.c_proj", d, ffn, bias=True) | _layer_norms(d, "ln_1", "ln_2")
    shapes: Shapes = {"wte.weight": (c["vocab_size"], d), "wpe.weight": (c["n_positions"], d)} | _layer_norms(d, "ln_f")
    for i in range(c["n_layer"]):
        shapes |= named(f"h.{i}.", layer)
    return shapes


def _opt(c: Config) -> Shapes:
    """Everything has a bias; the position table begins with two rows for padding."""
    d, ffn = c["hidden_size"], c["ffn_dim"]
    layer = linear("fc1", ffn, d, bias=True) | linear("fc2", d, ffn, bias=True)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        layer |= linear(f"self_attn.{name}", d, d, bias=True)
    layer |= _layer_norms(d, "self_attn_layer_norm", "final_layer_norm")
    shapes = {"decoder.embed_tokens.weight": (c["vocab_size"], d)} | _layer_norms(d, "decoder.final_layer_norm")
    shapes["decoder.embed_positions.weight"] = (c["max_position_embeddings"] + 2, d)
    for i in range(c["num_hidden_layers"]):
        shapes |= named(f"decoder.layers.{i}.", layer)
    return shapes


AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
AROUND = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
WHOLE: Mapping[str, Part] = MappingProxyType({"gpt2": _gpt2, "opt": _opt})
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral", "phi3"), Family(all_biased_if_said)),
        **dict.fromkeys(("qwen2", "qwen2_5_omni_text", "mimo"), Family(input_biased)),
        **dict.fromkeys(("qwen3", "qwen3_vl_text"), Family(head_normed)),
        **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), Family(latent, deepseek_experts)),
        "gemma2": Family(grouped, norms=AROUND),
        "gemma3_text": Family(head_normed, norms=AROUND),
        "exaone4": Family(head_normed, norms=AFTER),
        "olmo3": Family(fully_normed, norms=AFTER),
        "mixtral": Family(grouped, mixtral_experts),
        "phimoe": Family(all_biased_if_said, mixtral_experts, norm_bias=True),
        "minimax_m2": Family(fully_normed, mixtral_experts),
        "qwen3_moe": Family(head_normed, qwen_experts),
        "glm4_moe": Family(input_biased, deepseek_experts),
        "granitemoe": Family(grouped, granite_experts),
        "llama4_text": Family(grouped, llama4_experts),  # its norms of queries and keys have no weights
        "gpt_oss": Family(with_sinks, gpt_oss_experts),
    }
)
