"""What a checkpoint's config says about how it is used: for inference, or as the draft of a larger model."""

from __future__ import annotations

from collections.abc import Mapping

from stepgraph.lowering.configkeys import show

QUANTIZED_KEYS = frozenset({"quantization_config", "compression_config"})
DRAFT_KEYS = frozenset({"draft_vocab_size", "eagle_config", "speculators_model_type", "speculators_config"})
DRAFT_WORDS = ("eagle", "medusa")


def checkpoint_warnings(values: Mapping[str, object], dtype: str, named: bool) -> list[str]:
    """What is assumed about a checkpoint; dtype: the training dtype taken, named: whether the config says it."""
    return [*_dtype_warnings(values, dtype, named), *_draft_warnings(values)]


def is_draft(values: Mapping[str, object]) -> bool:
    """Whether the config describes a draft for speculative decoding."""
    names = values.get("architectures")
    words = [name.lower() for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return any(values.get(key) for key in DRAFT_KEYS) or any(word in name for name in words for word in DRAFT_WORDS)


def _dtype_warnings(values: Mapping[str, object], dtype: str, named: bool) -> list[str]:
    key = next((key for key in sorted(QUANTIZED_KEYS, reverse=True) if values.get(key)), "")
    if key:
        return [f"inference checkpoint ({_method(values[key], key)}): training dtype taken as {dtype}"]
    return [] if named else [f"the config names no dtype: {dtype} is assumed"]


def _method(value: object, key: str) -> str:
    method = value.get("quant_method") if isinstance(value, Mapping) else None
    return method[:20] if isinstance(method, str) else key


def _draft_warnings(values: Mapping[str, object]) -> list[str]:
    if not is_draft(values):
        return []
    text = "this is a draft for speculative decoding: read as the plain decoder that it describes"
    small, vocab = values.get("draft_vocab_size"), values.get("vocab_size")
    if isinstance(small, int) and isinstance(vocab, int) and 0 < small != vocab:
        text += f"; its head of {show(small)} entries is taken as wide as the vocabulary"
    return [text]
