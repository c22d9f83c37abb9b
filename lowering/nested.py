"""Where the language model stands in a config: at the top, or inside a model that also sees and hears."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from stepgraph.errors import refuse
from stepgraph.lowering.configkeys import show

INNER_KEYS = ("text_config", "thinker_config", "llm_config", "language_config")
"""Keys whose object holds the language model, or a further model that holds it (thinker_config.text_config)."""
INHERITED = ("tie_word_embeddings", "torch_dtype", "dtype", "quantization_config")
"""Keys that may stand outside and are meant for the language model too."""
OTHER_PARTS = ("vision_config", "audio_config", "talker_config", "token2wav_config")


@attrs.frozen
class LanguageModel:
    """The keys of the language model, the path to them ("text_config."), and what was left out on the way."""

    keys: Mapping[str, object]
    prefix: str
    warnings: tuple[str, ...]


def language_model(config: Mapping[str, object], source: str) -> LanguageModel:
    """The language model of a config; the top level when nothing is nested.

    Raises: InputError (config-type) when the key that should hold it does not hold an object.
    """
    keys, path, left_out, warnings = config, "", _parts(config), []
    while inner_key := next((key for key in INNER_KEYS if keys.get(key) is not None), ""):
        inner = keys[inner_key]
        if not isinstance(inner, Mapping):
            raise refuse("config-type", f"{source}:{path}{inner_key}", f"is {show(inner)}", "an object")
        path += f"{inner_key}."
        warnings += _contradictions(keys, inner)
        keys, left_out = _inherit(keys, inner), left_out + _parts(inner)
    if path or left_out:
        shown = f" ({', '.join(dict.fromkeys(left_out))})" if left_out else ""
        place = f"in {path[:-1]} " if path else ""
        warnings.insert(0, f"only the language model {place}is read: vision and audio parts{shown} are not counted")
    return LanguageModel(_flat_rope(keys), path, tuple(warnings))


def _parts(keys: Mapping[str, object]) -> list[str]:
    return [key for key in OTHER_PARTS if keys.get(key)]


def _inherit(outer: Mapping[str, object], inner: Mapping[str, object]) -> dict[str, object]:
    """What the outer object says for both; its model_type too, where the inner one has none."""
    wanted = {key: outer[key] for key in (*INHERITED, "model_type") if outer.get(key) is not None}
    if any(inner.get(key) is not None for key in ("torch_dtype", "dtype")):
        wanted = {key: value for key, value in wanted.items() if key not in ("torch_dtype", "dtype")}
    return {**wanted, **{key: value for key, value in inner.items() if value is not None or key not in wanted}}


def _contradictions(outer: Mapping[str, object], inner: Mapping[str, object]) -> list[str]:
    said, own = outer.get("tie_word_embeddings"), inner.get("tie_word_embeddings")
    if not isinstance(said, bool) or not isinstance(own, bool) or said == own:
        return []
    return [f"tie_word_embeddings is {show(own)} for the language model and {show(said)} outside: the first is taken"]


def _flat_rope(keys: Mapping[str, object]) -> Mapping[str, object]:
    """Newer files keep partial_rotary_factor inside rope_parameters."""
    rope = keys.get("rope_parameters")
    if not isinstance(rope, Mapping) or rope.get("partial_rotary_factor") is None:
        return keys
    return {"partial_rotary_factor": rope["partial_rotary_factor"], **keys}
