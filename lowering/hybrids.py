"""Which layers of a hybrid model are no attention: the reason that a refusal gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

LETTERS = MappingProxyType({"M": "Mamba-2"})
KINDS = MappingProxyType({"mamba": "Mamba", "mamba2": "Mamba-2", "linear_attention": "linear attention"})


def hybrid_layers(config: Mapping[str, object], spans: Callable[[list[int]], str]) -> str:
    """`layers 0-2, 4-6 are linear attention`, or "" when the keys do not say which ones are; spans: how to list them.

    Keys: hybrid_override_pattern, layers_block_type, linear_attn_config.kda_layers (from 1), attn_type_list (0 =
    linear), full_attention_interval.
    """
    for find in (_letters, _block_types, _listed_from_one, _attention_types, _interval):
        found = find(config)
        if found:
            kinds = dict.fromkeys(kind for _, kind in found)
            return " and ".join(f"layers {spans([i for i, k in found if k == kind])} are {kind}" for kind in kinds)
    return ""


def _letters(config: Mapping[str, object]) -> list[tuple[int, str]]:
    pattern = config.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        return []
    return [(i, LETTERS[letter]) for i, letter in enumerate(pattern) if letter in LETTERS]


def _block_types(config: Mapping[str, object]) -> list[tuple[int, str]]:
    kinds = config.get("layers_block_type")
    if not isinstance(kinds, list):
        return []
    return [(i, KINDS[kind]) for i, kind in enumerate(kinds) if isinstance(kind, str) and kind in KINDS]


def _listed_from_one(config: Mapping[str, object]) -> list[tuple[int, str]]:
    inner = config.get("linear_attn_config")
    layers = inner.get("kda_layers") if isinstance(inner, Mapping) else None
    return _linear(i - 1 for i in layers if isinstance(i, int)) if isinstance(layers, list) else []


def _attention_types(config: Mapping[str, object]) -> list[tuple[int, str]]:
    kinds = config.get("attn_type_list")
    return _linear(i for i, kind in enumerate(kinds) if kind == 0) if isinstance(kinds, list) else []


def _interval(config: Mapping[str, object]) -> list[tuple[int, str]]:
    step, n_layers = config.get("full_attention_interval"), config.get("num_hidden_layers")
    if not isinstance(step, int) or not isinstance(n_layers, int) or not 0 < step <= n_layers <= 10**5:
        return []
    return _linear(i for i in range(n_layers) if (i + 1) % step)


def _linear(layers: Iterable[int]) -> list[tuple[int, str]]:
    return [(i, KINDS["linear_attention"]) for i in layers]
