"""The table of model families: where each one keeps its numbers, and what it does without being told.

One row per `model_type` of a Hugging Face config.json. A new family that is built from known parts is a new row.
"""

from __future__ import annotations

from typing import Literal

import attrs


@attrs.frozen
class Switch:
    """A yes or no: read from `key`, `default` when the key is absent; without a key the family decides alone."""

    default: bool
    key: str = ""


@attrs.frozen
class Fixed:
    """A key that has to hold this value (or be absent), and what it would mean otherwise."""

    key: str
    value: bool
    otherwise: str


@attrs.frozen
class Family:
    """How one family is read.

    hidden ... activation: synonyms of one key, the family's own name first. An empty `kv_heads` means as many as
    heads, an empty `head_dim` hidden / heads. ffn_ratio: ffn = ffn_ratio * hidden when no key says it, 0 = a key must.
    default_activation, tied: what the library's class assumes for an absent key. learned_positions: a position table
    of max positions + extra_position_rows rows instead of rotary positions. window: whether `sliding_window` is
    "ignored", used "always" when set, or only when the "flag" use_sliding_window is true. same_as_hidden: keys that
    may only repeat the hidden size.

    Source: the configuration and modelling files of huggingface/transformers, src/transformers/models/<model_type>.
    """

    model_type: str
    architecture: str
    norm: Literal["rmsnorm", "layernorm"]
    gated: bool
    default_activation: str
    qkv_bias: Switch
    out_bias: Switch
    mlp_bias: Switch
    tied: bool
    learned_positions: bool = False
    extra_position_rows: int = 0
    window: Literal["ignored", "always", "flag"] = "ignored"
    ffn_ratio: int = 0
    hidden: tuple[str, ...] = ("hidden_size",)
    layers: tuple[str, ...] = ("num_hidden_layers",)
    heads: tuple[str, ...] = ("num_attention_heads",)
    kv_heads: tuple[str, ...] = ("num_key_value_heads",)
    head_dim: tuple[str, ...] = ("head_dim",)
    ffn: tuple[str, ...] = ("intermediate_size",)
    positions: tuple[str, ...] = ("max_position_embeddings",)
    activation: tuple[str, ...] = ("hidden_act",)
    vocab: tuple[str, ...] = ("vocab_size",)
    dtype: tuple[str, ...] = ("torch_dtype", "dtype")
    tie: tuple[str, ...] = ("tie_word_embeddings",)
    fixed: tuple[Fixed, ...] = ()
    same_as_hidden: tuple[str, ...] = ()

    @property
    def synonyms(self) -> tuple[tuple[str, ...], ...]:
        """Every group of keys that mean one thing."""
        widths = (self.hidden, self.layers, self.heads, self.kv_heads, self.head_dim, self.ffn)
        return (*widths, self.positions, self.activation, self.vocab, self.dtype, self.tie)

    @property
    def keys_read(self) -> frozenset[str]:
        """Every key whose value can change the model."""
        switches = {switch.key for switch in (self.qkv_bias, self.out_bias, self.mlp_bias) if switch.key}
        fixed = {row.key for row in self.fixed} | set(self.same_as_hidden)
        windows = {"ignored": (), "always": ("sliding_window",), "flag": WINDOW_KEYS}[self.window]
        return frozenset().union(*self.synonyms, switches, fixed, windows, ("model_type", "architectures"))


NO = Switch(default=False)
YES = Switch(default=True)
WINDOW_KEYS = ("sliding_window", "use_sliding_window", "max_window_layers")

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    norm="rmsnorm",
    gated=True,
    default_activation="silu",
    qkv_bias=Switch(default=False, key="attention_bias"),
    out_bias=Switch(default=False, key="attention_bias"),
    mlp_bias=Switch(default=False, key="mlp_bias"),
    tied=False,
)
MISTRAL = attrs.evolve(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    qkv_bias=NO,
    out_bias=NO,
    mlp_bias=NO,
    window="always",
)
QWEN2 = attrs.evolve(  # its query, key and value biases have no key
    MISTRAL, model_type="qwen2", architecture="Qwen2ForCausalLM", qkv_bias=YES, window="flag"
)
PHI3 = attrs.evolve(MISTRAL, model_type="phi3", architecture="Phi3ForCausalLM")
GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
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
OPT = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    norm="layernorm",
    gated=False,
    default_activation="relu",
    qkv_bias=Switch(default=True, key="enable_bias"),
    out_bias=Switch(default=True, key="enable_bias"),
    mlp_bias=Switch(default=True, key="enable_bias"),
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

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, PHI3, GPT2, OPT)


def family_of(model_type: object) -> Family | None:
    """The row of a `model_type`, or None when there is none."""
    return next((row for row in FAMILIES if row.model_type == model_type), None)


def family_of_architecture(architectures: object) -> Family | None:
    """The row that a config's `architectures` list names, or None: a hint for files without a `model_type`."""
    if not isinstance(architectures, list):
        return None
    return next((row for row in FAMILIES if row.architecture in architectures), None)
