"""What is known about a model family: where it keeps its numbers, and what it does without being told.

The rows stand in `densefamilies` and `sparsefamilies`; a new family that is built from known parts is a new row there.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

import attrs

Window = Literal["none", "everywhere", "upper", "even", "interval", "chunked"]
"""Which layers see a window when no `layer_types` list says it: see `patterns`."""
Sparse = Literal["all", "after_first", "sparse_step", "interleaved"]
"""Which layers have experts: see `patterns`."""


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
class QkNorm:
    """Norms on queries and keys.

    kind: "head", "full", or "l2", which has no weights and is therefore not modelled; switch: whether they are there;
    kind_key: the key that says the kind ("per_head" or "per_layer"), "" = the family decides.
    """

    kind: Literal["head", "full", "l2"]
    switch: Switch
    kind_key: str = ""


@attrs.frozen
class ExpertKeys:
    """Where a family keeps its experts.

    layers: which layers have them; experts, top_k, width: synonyms; scoring: what the family's router does, and
    scoring_key the key that says otherwise; shared_count: number of shared experts, each as wide as a routed one;
    shared_width: width of all shared experts together; shared_always: one shared expert as wide as a routed one;
    shared_gate, router_bias, bias: see the `Experts` record.
    """

    layers: Sparse
    experts: tuple[str, ...]
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    width: tuple[str, ...] = ("moe_intermediate_size",)
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    scoring_key: str = ""
    shared_count: tuple[str, ...] = ()
    shared_width: tuple[str, ...] = ()
    shared_always: bool = False
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False

    @property
    def keys_read(self) -> frozenset[str]:
        """Every key that can change the experts."""
        groups = (self.experts, self.top_k, self.width, self.shared_count, self.shared_width)
        return frozenset().union(*groups, SPARSE_KEYS[self.layers], (self.scoring_key,) if self.scoring_key else ())


NO = Switch(default=False)
YES = Switch(default=True)
LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
ROTARY_KEYS = ("rotary_dim", "partial_rotary_factor", "rotary_pct")
WINDOW_KEYS = MappingProxyType[str, tuple[str, ...]](
    {
        "none": ("layer_types",),
        "everywhere": ("layer_types", "sliding_window"),
        "upper": ("layer_types", "sliding_window", "max_window_layers"),
        "even": ("layer_types", "sliding_window"),
        "interval": ("layer_types", "sliding_window", "sliding_window_pattern", "_sliding_window_pattern"),
        "chunked": ("layer_types", "attention_chunk_size", "no_rope_layers", "no_rope_layer_interval"),
    }
)
"""The keys behind each window pattern."""
SPARSE_KEYS = MappingProxyType[str, tuple[str, ...]](
    {
        "all": (),
        "after_first": ("first_k_dense_replace", "moe_layer_freq"),
        "sparse_step": ("decoder_sparse_step", "mlp_only_layers"),
        "interleaved": ("moe_layers", "interleave_moe_layer_step"),
    }
)
"""The keys behind each pattern of expert layers."""


@attrs.frozen
class Family:
    """How one family is read.

    model_type, aliases: its names in a config; architectures: its classes. hidden ... tie: synonyms of one key, the
    family's own name first. An empty `kv_heads` means as many as heads, an empty `head_dim` hidden / heads.
    default_activation, tied, default_head_dim, rotary, window_default, interval, the switches: what the library's
    class assumes for an absent key. ffn_ratio: ffn = ffn_ratio * hidden when no key says it, 0 = a key must.
    learned_positions: a position table of max positions + extra_position_rows rows instead of rotary positions;
    rotary: fraction of a head that is rotated; nope: which layers go without positions ("global": those that see
    everything while others see a window; "listed": no_rope_layers). norms, sinks: see the records. latent: queries,
    keys and values go through latents. window: which layers see a window, window_switch: whether at all,
    window_default: how long (0 = none), interval: each so many-th layer sees everything. mtp: keys whose product is
    the number of prediction modules. same_as_hidden: keys that may only repeat the hidden size. inert: keys of this
    family that change nothing that is modelled.

    Source: the configuration and modelling files of huggingface/transformers, src/transformers/models/<model_type>.
    """

    model_type: str
    architectures: tuple[str, ...]
    norm: Literal["rmsnorm", "layernorm"]
    gated: bool
    default_activation: str
    qkv_bias: Switch
    out_bias: Switch
    mlp_bias: Switch
    tied: bool
    aliases: tuple[str, ...] = ()
    norms: Literal["pre", "post", "sandwich"] = "pre"
    qk_norm: QkNorm | None = None
    latent: bool = False
    experts: ExpertKeys | None = None
    sinks: bool = False
    attention_softcap: Switch = NO
    final_softcap: Switch = NO
    head_bias: Switch = NO
    mtp: tuple[str, ...] = ()
    mtp_switch: Switch = YES
    learned_positions: bool = False
    extra_position_rows: int = 0
    rotary: float = 1.0
    nope: Literal["", "global", "listed"] = ""
    window: Window = "none"
    window_switch: Switch = YES
    window_default: int = 0
    interval: int = 0
    default_head_dim: int = 0
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
    inert: tuple[str, ...] = ()

    @property
    def inert_keys(self) -> frozenset[str]:
        """The keys of this family that change nothing that is modelled."""
        return frozenset(self.inert)

    @property
    def synonyms(self) -> tuple[tuple[str, ...], ...]:
        """Every group of keys that mean one thing."""
        widths = (self.hidden, self.layers, self.heads, self.kv_heads, self.head_dim, self.ffn, self.positions)
        others = (self.activation, self.vocab, self.dtype, self.tie)
        expert = (self.experts.experts, self.experts.top_k, self.experts.width) if self.experts else ()
        return tuple(group for group in dict.fromkeys((*widths, *others, *expert)) if group)

    @property
    def switches(self) -> tuple[Switch, ...]:
        """Every yes or no of the family."""
        biases = (self.qkv_bias, self.out_bias, self.mlp_bias, self.head_bias)
        others = (self.attention_softcap, self.final_softcap, self.window_switch, self.mtp_switch)
        return (*biases, *others, self.qk_norm.switch) if self.qk_norm else (*biases, *others)

    @property
    def keys_read(self) -> frozenset[str]:
        """Every key whose value can change the model."""
        keys = {switch.key for switch in self.switches} | {row.key for row in self.fixed}
        keys |= set(self.experts.keys_read) if self.experts else set()
        keys |= {self.qk_norm.kind_key} if self.qk_norm else set()
        rotary = () if self.learned_positions or self.latent else ROTARY_KEYS
        latent = LATENT_KEYS if self.latent else ()
        groups = (*self.synonyms, self.same_as_hidden, self.mtp, WINDOW_KEYS[self.window], rotary, latent)
        return frozenset(keys.union(*groups, ("model_type", "architectures"))) - {""}
