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
    which need not be hidden / heads; qkv_bias, out_bias: whether the projections carry biases; rotary_dim: how many
    coordinates of a head are rotated by position, 0 = none; causal: each token sees only its past; qk_norm: "" none,
    "head" a norm over each query and key head, "full" one over all query (key) heads together; window: tokens that a
    token sees, itself included, 0 = all; chunk: attention only inside chunks of so many tokens, 0 = everywhere;
    sinks: one learned logit per query head in the softmax; softcap: scores are squashed by tanh.

    Source: Ainslie et al. 2023, arXiv:2305.13245 (grouped queries); Su et al. 2021, arXiv:2104.09864 (rotary).
    """

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool
    out_bias: bool
    rotary_dim: int
    causal: bool = True
    qk_norm: str = ""
    window: int = 0
    chunk: int = 0
    sinks: bool = False
    softcap: bool = False


@attrs.frozen
class LatentAttention:
    """Multi-head latent attention: keys and values (and queries) go through a narrow latent.

    heads; q_rank: width of the query latent, 0 = queries are projected directly; kv_rank: width of the key/value
    latent; nope_dim, rope_dim: coordinates of a query/key head without and with rotary position (the rotary key is
    one head, shared); v_dim: width of a value head; bias: whether the down and output projections carry biases.

    Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.
    """

    heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    bias: bool = False
    causal: bool = True


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
class Experts:
    """A mixture of experts in the place of the feed-forward part.

    experts: routed experts; top_k: how many each token visits; expert: one routed expert; router_bias: the router's
    projection carries a bias (a correction bias that is a buffer and not trained does not count); scoring: "softmax"
    or "sigmoid"; shared: the expert that every token visits, None = none (several shared experts are one of their
    summed width); shared_gate: a sigmoid gate of one column on the shared expert; latent: width in which the routed
    experts work, 0 = the hidden width; latent experts have a shared down and up projection around dispatch and
    combine.

    Source: Shazeer et al. 2017, arXiv:1701.06538; DeepSeek-AI 2024, arXiv:2401.06066 (shared experts).
    """

    experts: int
    top_k: int
    expert: Mlp
    router_bias: bool = False
    scoring: str = "softmax"
    shared: Mlp | None = None
    shared_gate: bool = False
    latent: int = 0


@attrs.frozen
class Layer:
    """One transformer layer.

    norm: "rmsnorm" or "layernorm". norms: where they stand: "pre" x + f(norm(x)); "post" x + norm(f(x)) (OLMo 2,
    EXAONE 4); "sandwich" x + norm(f(norm(x))) (Gemma 2 and 3), each for attention and for the feed-forward part.
    parallel: both parts read the same normed input and are added together (one norm).
    """

    attention: Attention | LatentAttention
    mlp: Mlp | Experts
    norm: str
    norms: str = "pre"
    parallel: bool = False

    @property
    def name(self) -> str:
        """What kind of layer this is, in a word or two: `dense`, `moe`, `sliding_dense`, `chunked_moe`."""
        reach = ""
        if isinstance(self.attention, Attention):
            reach = "sliding_" if self.attention.window else "chunked_" if self.attention.chunk else ""
        return reach + ("moe" if isinstance(self.mlp, Experts) else "dense")


@attrs.frozen
class Model:
    """A decoder-only language model.

    name: what the user calls it; family: the `model_type` of its configuration file; layers: one entry per layer,
    equal layers being the same object; final_norm: the norm before the head; tied_embeddings: the head reuses the
    embedding table; learned_positions: rows of the position table, 0 when there is none; dtype: "bf16", "fp16" or
    "fp32"; max_positions: longest sequence that the model is meant for; warnings: what the reader had to assume.
    final_softcap: the logits are squashed by tanh; mtp: multi-token
    prediction modules that the checkpoint carries, each one layer like the last with its own norms and projection;
    head_bias: the head's projection carries a bias.

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
    final_softcap: bool = False
    mtp: int = 0
    head_bias: bool = False

    @property
    def n_layers(self) -> int:
        """How many layers lie between the embedding and the head."""
        return len(self.layers)

    @property
    def distinct_layers(self) -> tuple[Layer, ...]:
        """Each different layer once, in order of first use."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def template_names(self) -> tuple[str, ...]:
        """The template of every layer, in order: its kind, numbered (`dense`, `dense.2`) where kinds have variants."""
        counts: dict[str, int] = {}
        names: dict[Layer, str] = {}
        for layer in self.distinct_layers:
            counts[layer.name] = number = counts.get(layer.name, 0) + 1
            names[layer] = layer.name if number == 1 else f"{layer.name}.{number}"
        return tuple(names[layer] for layer in self.layers)
