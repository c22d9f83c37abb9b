"""From keys to layers: the attention and the feed-forward part of every layer, equal layers being one object."""

from __future__ import annotations

from types import MappingProxyType

import attrs

from stepgraph.lowering.configkeys import Keys
from stepgraph.lowering.families import ExpertKeys, Family, Switch
from stepgraph.lowering.model import Attention, Experts, LatentAttention, Layer, Mlp
from stepgraph.lowering.patterns import Reaches, reaches, rotated, sparse
from stepgraph.lowering.unsupported import spans

ACTIVATIONS = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_new": "gelu",
        "gelu_fast": "gelu",
        "gelu_pytorch_tanh": "gelu",
        "quick_gelu": "gelu",
        "relu": "relu",
    }
)
SCORINGS = MappingProxyType({"softmax": "softmax", "sigmoid": "sigmoid"})
QK_NORMS = MappingProxyType({"per_head": "head", "per_layer": "full"})


@attrs.frozen
class Parts:
    """The parts that the layers of one model are put together from; None = not needed, or not readable."""

    attention: Attention | LatentAttention | None
    mlp: Mlp | None
    experts: Experts | None
    window: int
    chunk: int


def read_layers(family: Family, keys: Keys, hidden: int | None, n_layers: int, positions: int) -> tuple[Layer, ...]:
    """Every layer, or nothing when a part cannot be read (its problem is then in `keys`)."""
    seen = reaches(family, keys, n_layers)
    rope, moe = rotated(family, keys, seen), sparse(family, keys, n_layers)
    attention = read_attention(family, keys, hidden)
    mlp = None if all(moe) else read_mlp(family, keys, hidden)
    experts = read_experts(family, family.experts, keys) if family.experts and any(moe) else None
    window = _window(family, keys, seen, positions)
    parts = Parts(attention, mlp, experts, window, _chunk(family, keys, positions))
    if attention is None or (mlp is None and not all(moe)) or (experts is None and any(moe)):
        return ()
    rows = tuple(zip(seen, rope, moe, strict=True))
    kinds = {row: _layer(family, parts, *row) for row in dict.fromkeys(rows)}
    return _shared(tuple(kinds[row] for row in rows))


def read_attention(family: Family, keys: Keys, hidden: int | None) -> Attention | LatentAttention | None:
    """The attention of a layer that sees everything and rotates its heads; patterns take away from it."""
    heads = keys.integer(family.heads)
    if family.latent:
        return _latent(family, keys, heads)
    kv_heads = keys.optional_integer(family.kv_heads, heads)
    head_dim = _head_dim(family, keys, hidden, heads)
    qkv_bias, out_bias = switched(family.qkv_bias, keys), switched(family.out_bias, keys)
    rotary = _rotary_dim(family, keys, head_dim)
    norm, softcap = _qk_norm(family, keys), capped(family.attention_softcap, keys)
    if heads is None or kv_heads is None:
        return None
    if heads % kv_heads:
        key = keys.find(family.kv_heads)[0]
        keys.note("config-heads", key, f"{heads} heads do not divide into {kv_heads} groups", f"a divisor of {heads}")
    if head_dim is None or rotary is None:
        return None
    plain = Attention(heads, kv_heads, head_dim, qkv_bias, out_bias, rotary)
    return attrs.evolve(plain, qk_norm=norm, sinks=family.sinks, softcap=softcap)


def read_mlp(family: Family, keys: Keys, hidden: int | None) -> Mlp | None:
    """The feed-forward part of a dense layer."""
    if family.ffn_ratio:
        ffn = keys.optional_integer(family.ffn, family.ffn_ratio * hidden if hidden else None)
    else:
        ffn = keys.integer(family.ffn)
    activation, bias = _activation(family, keys), switched(family.mlp_bias, keys)
    return Mlp(ffn, family.gated, activation, bias) if ffn else None


def read_experts(family: Family, where: ExpertKeys, keys: Keys) -> Experts | None:
    """The experts of a sparse layer."""
    experts, top_k, width = keys.integer(where.experts), keys.integer(where.top_k), keys.integer(where.width)
    scoring = keys.word((where.scoring_key,), SCORINGS, where.scoring) if where.scoring_key else where.scoring
    activation = _activation(family, keys)
    shared = _shared_width(where, keys, width)
    if experts is None or top_k is None or width is None or shared is None:
        return None
    if top_k > experts:
        key = keys.find(where.top_k)[0]
        keys.note("config-experts", key, f"each token visits {top_k} of {experts} experts", f"1 to {experts}")
    one = Mlp(width, family.gated, activation, where.bias)
    common = attrs.evolve(one, ffn=shared) if shared else None
    return Experts(experts, top_k, one, where.router_bias, scoring, common, where.shared_gate and shared > 0)


def switched(switch: Switch, keys: Keys) -> bool:
    """A yes or no of the family."""
    return keys.flag((switch.key,), switch.default) if switch.key else switch.default


def capped(switch: Switch, keys: Keys) -> bool:
    """Whether there is a soft-cap: its key holds the cap itself, or null for none."""
    if not switch.key or keys.is_null(switch.key):
        return False
    return keys.positive(switch.key) is not None or (switch.key not in keys.values and switch.default)


def _layer(family: Family, parts: Parts, reach: str, rope: bool, moe: bool) -> Layer:
    attention, mlp = parts.attention, parts.experts if moe else parts.mlp
    assert attention is not None  # read_layers has asked
    assert mlp is not None
    if isinstance(attention, Attention):
        attention = attrs.evolve(
            attention,
            rotary_dim=attention.rotary_dim if rope else 0,
            window=parts.window if reach == "sliding" else 0,
            chunk=parts.chunk if reach == "chunked" else 0,
        )
    return Layer(attention, mlp, family.norm, family.norms)


def _shared(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Equal layers as one object: a window that changes nothing makes two kinds equal."""
    first: dict[Layer, Layer] = {}
    return tuple(first.setdefault(layer, layer) for layer in layers)


def _latent(family: Family, keys: Keys, heads: int | None) -> LatentAttention | None:
    # null means direct queries, absence means nothing: the library's class then assumes a width that fits one model.
    direct = keys.is_null("q_lora_rank")
    q_rank = 0 if direct else keys.integer(("q_lora_rank",))
    kv_rank, nope = keys.integer(("kv_lora_rank",)), keys.integer(("qk_nope_head_dim",))
    rope, value = keys.integer(("qk_rope_head_dim",)), keys.integer(("v_head_dim",))
    bias = switched(family.qkv_bias, keys)
    if rope and rope % 2:
        _refuse_odd(keys, "qk_rope_head_dim", rope)
    if heads is None or q_rank is None or kv_rank is None or nope is None or rope is None or value is None:
        return None
    return LatentAttention(heads, q_rank, kv_rank, nope, rope, value, bias)


def _head_dim(family: Family, keys: Keys, hidden: int | None, heads: int | None) -> int | None:
    """The width of one head: its own key, the family's, or hidden / heads."""
    if keys.find(family.head_dim)[0] or family.default_head_dim:
        return keys.optional_integer(family.head_dim, family.default_head_dim)
    if not hidden or not heads:
        return None
    if hidden % heads:
        why = f"hidden size {hidden} is not a multiple of {heads} heads"
        key = keys.find(family.heads)[0]
        keys.note("config-head-dim", key, why, fix=f"add {family.head_dim[0]}" if family.head_dim else "")
        return None
    return hidden // heads


def _rotary_dim(family: Family, keys: Keys, head_dim: int | None) -> int | None:
    """How many coordinates of a head are rotated. They turn in pairs, so the number has to be even."""
    if family.learned_positions:
        return 0
    given = keys.optional_integer(("rotary_dim",), None)
    fractions = [keys.positive(key, maximum=1) for key in ("partial_rotary_factor", "rotary_pct")]
    if head_dim is None:
        return None
    fraction = next((value for value in fractions if value), family.rotary)
    rotary = given or int(head_dim * fraction)
    if rotary > head_dim:
        keys.note("config-range", "rotary_dim", f"{rotary} coordinates of a head of {head_dim}", f"up to {head_dim}")
    if rotary % 2:
        key = keys.find(("rotary_dim", *family.head_dim))[0] or keys.find(family.heads)[0]
        _refuse_odd(keys, key, rotary)
    return rotary


def _refuse_odd(keys: Keys, key: str, width: int) -> None:
    keys.note("config-head-dim", key, f"heads of width {width}", "an even width, as rotary positions turn pairs")


def _qk_norm(family: Family, keys: Keys) -> str:
    row = family.qk_norm
    if row is None or not switched(row.switch, keys):
        return ""
    if row.kind == "l2":
        keys.warnings.append("queries and keys are scaled to length 1 without weights: that scaling is not counted")
        return ""
    return keys.word((row.kind_key,), QK_NORMS, row.kind) if row.kind_key else row.kind


def _activation(family: Family, keys: Keys) -> str:
    return keys.word(family.activation, ACTIVATIONS, ACTIVATIONS[family.default_activation])


def _shared_width(where: ExpertKeys, keys: Keys, width: int | None) -> int | None:
    """Width of all shared experts together; 0 = there are none."""
    if where.shared_width:
        return keys.optional_integer(where.shared_width, 0, minimum=0)
    count = 1 if where.shared_always else keys.optional_integer(where.shared_count, 0, minimum=0)
    return None if count is None or width is None else count * width


def _window(family: Family, keys: Keys, seen: Reaches, positions: int) -> int:
    """Length of the windows, 0 = none; one as long as the longest sequence changes nothing."""
    if "sliding" not in seen or not switched(family.window_switch, keys):
        return 0
    layers = f"layers {spans([i for i, reach in enumerate(seen) if reach == 'sliding'])}"
    if keys.is_null("sliding_window"):
        if keys.values.get("layer_types") is not None:
            keys.warnings.append(f"sliding_window is null: {layers}, said to have windows, are read without")
        return 0
    length = keys.optional_integer(("sliding_window",), family.window_default)
    if length == 0 and keys.values.get("layer_types") is not None:
        keys.note("config-missing-key", "sliding_window", f"is missing, and {layers} have windows", "a whole number")
    if length and length < positions and "sliding_window" not in keys.values:
        keys.warnings.append(f"sliding_window is absent: windows of {length} tokens are assumed in {layers}")
    return length if length and length < positions else 0


def _chunk(family: Family, keys: Keys, positions: int) -> int:
    if family.window != "chunked" or keys.is_null("attention_chunk_size"):
        return 0
    length = keys.optional_integer(("attention_chunk_size",), family.window_default) or 0
    return length if length < positions else 0
