"""What a model is: frozen records with no parallelism in sight.

A `Model` is an embedding, a tuple of layers and a head. Equal layers are one object, so "how many different layers
are there" is a question of identity. A new kind of layer (experts, latent attention, windows) is a further record
type or a further field here; nothing in these records counts parameters, because they follow from lowered tensors.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class Attention:
    """Softmax attention with grouped key/value heads.

    heads: query heads; kv_heads: key/value heads (heads = multi-head, 1 = multi-query); head_dim: width of one head,
    which need not be hidden / heads; qkv_bias, out_bias: whether the projections carry biases; rope: rotary positions;
    causal: each token sees only its past.

    Source: Ainslie et al. 2023, arXiv:2305.13245 (grouped queries); Su et al. 2021, arXiv:2104.09864 (rotary).
    """

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool
    out_bias: bool
    rope: bool
    causal: bool = True

    @property
    def q_width(self) -> int:
        """Columns of the query projection: heads * head_dim."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the key projection, and of the value projection: kv_heads * head_dim."""
        return self.kv_heads * self.head_dim


@attrs.frozen
class Mlp:
    """The feed-forward part of a layer.

    ffn: inner width; gated: two input projections, act(x W_gate) * (x W_up), else one, act(x W_up); activation:
    "silu", "gelu" or "relu"; bias: whether the projections carry biases.

    Source: Shazeer 2020, arXiv:2002.05202 (gated variants).
    """

    ffn: int
    gated: bool
    activation: str
    bias: bool


@attrs.frozen
class Layer:
    """One pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x)).

    norm: "rmsnorm" or "layernorm".
    """

    attention: Attention
    mlp: Mlp
    norm: str

    @property
    def name(self) -> str:
        """The template that this layer is lowered to."""
        return "dense"


@attrs.frozen
class Model:
    """A decoder-only language model.

    name: what the user calls it; family: the `model_type` of its configuration file; layers: one entry per layer,
    equal layers being the same object; final_norm: the norm before the head; tied_embeddings: the head reuses the
    embedding table; learned_positions: rows of the position table, 0 when there is none; dtype: "bf16", "fp16" or
    "fp32"; max_positions: longest sequence that the model is meant for; warnings: what the reader had to assume.

    Shapes: hidden and vocab are global widths, before any split.
    """

    name: str
    family: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    final_norm: str
    tied_embeddings: bool
    learned_positions: int
    dtype: str
    max_positions: int
    warnings: tuple[str, ...] = ()

    @property
    def n_layers(self) -> int:
        """How many layers lie between the embedding and the head."""
        return len(self.layers)

    @property
    def distinct_layers(self) -> tuple[Layer, ...]:
        """Each different layer once, in order of first use."""
        return tuple(dict.fromkeys(self.layers))
