"""Which layer is of which kind: what each one sees, whether positions turn its heads, whether it has experts.

Every pattern is a small function from the keys to one entry per layer; the family table names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from stepgraph.lowering.configkeys import Keys, show
from stepgraph.lowering.families import Family
from stepgraph.lowering.unsupported import spans

Reaches = tuple[str, ...]
"""What the tokens of each layer see: "full" everything before them, "sliding" a window, "chunked" their own chunk."""

LAYER_TYPES: Mapping[str, str] = MappingProxyType(
    {"full_attention": "full", "sliding_attention": "sliding", "chunked_attention": "chunked"}
)


def reaches(family: Family, keys: Keys, n_layers: int) -> Reaches:
    """What every layer sees: as the `layer_types` list says, or else by the family's own pattern."""
    listed = _listed(family, keys, n_layers)
    return listed if listed is not None else WINDOW_PATTERNS[family.window](family, keys, n_layers)


def rotated(family: Family, keys: Keys, seen: Reaches) -> tuple[bool, ...]:
    """Whether rotary positions turn the heads of each layer."""
    if family.learned_positions:
        return (False,) * len(seen)
    if family.nope == "listed":
        return _rope_list(family, keys, len(seen))
    if family.nope == "global" and not keys.is_null("sliding_window"):
        return tuple(reach != "full" for reach in seen)
    return (True,) * len(seen)


def sparse(family: Family, keys: Keys, n_layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts in the place of its MLP."""
    if family.experts is None:
        return (False,) * n_layers
    return SPARSE_PATTERNS[family.experts.layers](keys, n_layers)


def _listed(family: Family, keys: Keys, n_layers: int) -> Reaches | None:
    kinds = keys.values.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        keys.note("config-type", "layer_types", f"is {show(kinds)}", "a list of words, one per layer")
        return None
    if keys.overridden & set(family.layers):
        kinds = kinds[:n_layers]  # whoever shortens the model by hand need not shorten its lists
    if len(kinds) != n_layers:
        keys.note("config-layer-count", "layer_types", f"has {len(kinds)} entries for {n_layers} layers", f"{n_layers}")
        return None
    known = _kinds_of(family)
    for name in sorted(set(kinds) - known):
        _refuse_kind(family, keys, name, [i for i, kind in enumerate(kinds) if kind == name])
    return tuple(LAYER_TYPES[kind] if kind in known else "full" for kind in kinds)


def _kinds_of(family: Family) -> frozenset[str]:
    windowed = {"none": (), "chunked": ("chunked_attention",)}.get(family.window, ("sliding_attention",))
    return frozenset({"full_attention", *windowed})


def _refuse_kind(family: Family, keys: Keys, name: str, layers: Sequence[int]) -> None:
    code = "config-window" if name in LAYER_TYPES else "config-layer-type"
    known = " or ".join(map(repr, sorted(_kinds_of(family))))
    what = f"layers {spans(layers)} are {name[:40]!r}: {family.model_type} is modelled with {known} only"
    keys.note(code, "layer_types", what)


def _everything(family: Family, keys: Keys, n_layers: int) -> Reaches:
    return ("full",) * n_layers


def _everywhere(family: Family, keys: Keys, n_layers: int) -> Reaches:
    return ("sliding",) * n_layers


def _upper(family: Family, keys: Keys, n_layers: int) -> Reaches:
    """The layers from max_window_layers on."""
    # 28 is the default of the library's class; below it, layers see everything.
    first = keys.optional_integer(("max_window_layers",), 28, minimum=0) or 0
    return tuple("sliding" if i >= first else "full" for i in range(n_layers))


def _even(family: Family, keys: Keys, n_layers: int) -> Reaches:
    return tuple("full" if i % 2 else "sliding" for i in range(n_layers))


def _interval(family: Family, keys: Keys, n_layers: int) -> Reaches:
    """Each so many-th layer sees everything; or a word of L (local) and G (global) that repeats."""
    key, value = keys.find(("sliding_window_pattern", "_sliding_window_pattern"))
    if isinstance(value, str):
        return _spelled(keys, key, value, n_layers)
    step = keys.optional_integer((key,), family.interval) or family.interval
    return tuple("sliding" if (i + 1) % step else "full" for i in range(n_layers))


def _spelled(keys: Keys, key: str, word: str, n_layers: int) -> Reaches:
    if not word or set(word) - {"L", "G"}:
        keys.note("config-value", key, f"is {show(word)}", "a number, or a word of L (local) and G (global)")
        return ("full",) * n_layers
    # The last layer sees everything whatever the word says.
    local = (word[i % len(word)] == "L" and i + 1 < n_layers for i in range(n_layers))
    return tuple("sliding" if yes else "full" for yes in local)


def _chunked(family: Family, keys: Keys, n_layers: int) -> Reaches:
    """The layers with rotary positions attend inside chunks."""
    return tuple("chunked" if rope else "full" for rope in _rope_list(family, keys, n_layers))


def _rope_list(family: Family, keys: Keys, n_layers: int) -> tuple[bool, ...]:
    """no_rope_layers has a 1 where positions are rotated (sic); without it, each so many-th layer goes without."""
    listed = keys.integers("no_rope_layers")
    if listed and len(listed) >= n_layers:
        return tuple(bool(entry) for entry in listed[:n_layers])
    if listed:
        what = f"has {len(listed)} entries for {n_layers} layers"
        keys.note("config-layer-count", "no_rope_layers", what, f"{n_layers}")
    step = keys.optional_integer(("no_rope_layer_interval",), family.interval) or family.interval
    return tuple((i + 1) % step != 0 for i in range(n_layers))


def _all(keys: Keys, n_layers: int) -> tuple[bool, ...]:
    return (True,) * n_layers


def _after_first(keys: Keys, n_layers: int) -> tuple[bool, ...]:
    """The first layers are dense; of the others each moe_layer_freq-th has experts, or those that a list marks."""
    if isinstance(keys.values.get("moe_layer_freq"), list):
        return _marked(keys, n_layers)
    first = keys.optional_integer(("first_k_dense_replace",), 0, minimum=0) or 0
    step = keys.optional_integer(("moe_layer_freq",), 1) or 1
    return tuple(i >= first and i % step == 0 for i in range(n_layers))


def _marked(keys: Keys, n_layers: int) -> tuple[bool, ...]:
    marks = keys.integers("moe_layer_freq") or []
    if len(marks) < n_layers:
        keys.note("config-layer-count", "moe_layer_freq", f"has {len(marks)} entries for {n_layers} layers")
    return tuple(i < len(marks) and marks[i] > 0 for i in range(n_layers))


def _sparse_step(keys: Keys, n_layers: int) -> tuple[bool, ...]:
    step = keys.optional_integer(("decoder_sparse_step",), 1) or 1
    dense = set(keys.integers("mlp_only_layers") or ())
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(n_layers))


def _interleaved(keys: Keys, n_layers: int) -> tuple[bool, ...]:
    listed = keys.integers("moe_layers")
    step = keys.optional_integer(("interleave_moe_layer_step",), 1) or 1
    chosen = set(range(step - 1, n_layers, step)) if listed is None else set(listed)
    return tuple(i in chosen for i in range(n_layers))


WINDOW_PATTERNS: Mapping[str, Callable[[Family, Keys, int], Reaches]] = MappingProxyType(
    {
        "none": _everything,
        "everywhere": _everywhere,
        "upper": _upper,
        "even": _even,
        "interval": _interval,
        "chunked": _chunked,
    }
)
SPARSE_PATTERNS: Mapping[str, Callable[[Keys, int], tuple[bool, ...]]] = MappingProxyType(
    {"all": _all, "after_first": _after_first, "sparse_step": _sparse_step, "interleaved": _interleaved}
)
