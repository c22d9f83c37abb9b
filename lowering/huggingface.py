"""Read a Hugging Face config.json, or a carried one by name, into a `Model`; list everything wrong with it at once.

The file is read by keys: no class of another library is imported and nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import attrs

from stepgraph.errors import InputError, Problem, did_you_mean, refuse
from stepgraph.lowering.configfile import carried_names, locate, read_config
from stepgraph.lowering.configkeys import MAX_LAYERS, Keys, show
from stepgraph.lowering.families import FAMILIES, WINDOW_KEYS, Family, Switch, family_of, family_of_architecture
from stepgraph.lowering.model import Attention, Layer, Mlp, Model
from stepgraph.lowering.unsupported import FEATURE_KEYS, is_known_type, spans, unsupported_features, unsupported_type

NO_OVERRIDES: Mapping[str, object] = MappingProxyType({})
DTYPES = MappingProxyType({"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"})
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


def model_names() -> tuple[str, ...]:
    """The models that come with the package, as `load_model` takes them (in any case)."""
    return carried_names()


def load_model(path_or_name: str | Path, overrides: Mapping[str, object] = NO_OVERRIDES) -> Model:
    """The model that a carried name or the path of a config.json describes.

    overrides: raw config keys that replace those of the file, checked as the file is; None takes a key away. A key
    replaces its synonyms too (num_hidden_layers also means n_layer).

    Raises: InputError with every problem of the file; codes begin with "config-" (and "set-unknown-key").
    """
    path = locate(path_or_name)
    config = read_config(path)
    carried = path.stem if str(path_or_name).lower() == path.stem else ""
    source = carried or str(path)
    return _read(carried or _name_of(path), source, config, overrides)


def parse_override(text: str) -> tuple[str, object]:
    """`num_hidden_layers=4` -> ("num_hidden_layers", 4): the value is JSON, or else the text itself.

    Raises: InputError (set-syntax) when there is no key or no `=`.
    """
    key, equals, raw = (part.strip() for part in text.partition("="))
    if not key or not equals or not raw:
        example = "key=value, as in num_hidden_layers=4"
        raise refuse("set-syntax", "--set", f"{show(text)} is not an assignment", example)
    try:
        return key, json.loads(raw)
    except RecursionError:
        expected = "a number, a word or null"
        raise refuse("set-syntax", f"--set {key}", "the value is nested too deeply", expected) from None
    except ValueError:
        return key, raw


def _name_of(path: Path) -> str:
    return path.absolute().parent.name or path.stem if path.stem == "config" else path.stem


def _read(name: str, source: str, config: Mapping[str, object], overrides: Mapping[str, object]) -> Model:
    model_type = overrides.get("model_type", config.get("model_type"))
    family = family_of(model_type)
    if family is None:
        raise InputError(_unsupported_family(model_type, {**config, **overrides}, source))
    keys = Keys(_merged(family, config, overrides), source, frozenset(overrides))
    keys.problems += unsupported_features(keys.values, source)
    warnings = _unread_keys(family, keys, config) + _architecture_warnings(family, keys)
    model = _model(name, family, keys)
    if model is None or keys.problems:
        raise InputError(dict.fromkeys(keys.problems))  # a key that is looked at twice is reported once
    return attrs.evolve(model, warnings=(*model.warnings, *warnings))


def _unsupported_family(model_type: object, config: Mapping[str, object], source: str) -> list[Problem]:
    """Why a file of another family is refused: what it uses, and if that says nothing, which families there are."""
    where, names = f"{source}:model_type", [row.model_type for row in FAMILIES]
    supported = f"a supported architecture: {', '.join(names)}"
    # The usual advice, to switch the feature off, would not make the family readable.
    problems = [attrs.evolve(problem, fix="") for problem in unsupported_features(config, source)]
    if model_type is None:
        hint = family_of_architecture(config.get("architectures"))
        fix = f'add "model_type": "{hint.model_type}"' if hint else "add the key"
        return [*problems, Problem("config-missing-key", where, "model_type is missing", supported, fix)]
    if not isinstance(model_type, str):
        return [*problems, Problem("config-type", where, f"is {show(model_type)}", supported)]
    problems += unsupported_type(model_type, source, problems)
    if problems and is_known_type(model_type):
        return problems
    what = f"architecture {show(model_type)} is not modelled yet"
    guess = did_you_mean(model_type[:60], names)
    fix = guess if guess.startswith("did you mean") else ""
    return [*problems, Problem("config-family", where, what, supported, fix)]


def _merged(family: Family, config: Mapping[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    replaced = {key for group in family.synonyms if set(group) & set(overrides) for key in group}
    return {**{key: value for key, value in config.items() if key not in replaced}, **overrides}


def _unread_keys(family: Family, keys: Keys, config: Mapping[str, object]) -> tuple[str, ...]:
    """Warnings for keys that mean something elsewhere but nothing in this family; problems for unknown overrides."""
    elsewhere = frozenset().union(*(row.keys_read for row in FAMILIES), WINDOW_KEYS)
    known = family.keys_read | FEATURE_KEYS
    for key in sorted(keys.overridden - known - set(config), key=str):
        fix = did_you_mean(str(key)[:60], family.keys_read)
        keys.note("set-unknown-key", key, f"{family.model_type} has no such key", fix=fix)
    candidates = (elsewhere | keys.overridden) - known
    unread = sorted(key for key in candidates if key in keys.overridden or keys.values.get(key))
    return tuple(f"{key} changes nothing: {family.model_type} models do not read it" for key in unread)


def _architecture_warnings(family: Family, keys: Keys) -> tuple[str, ...]:
    names = keys.values.get("architectures")
    if not isinstance(names, list) or not names or family.architecture in names:
        return ()
    return (f"architectures says {show(names[0])}: read as {family.architecture}, a language model",)


def _model(name: str, family: Family, keys: Keys) -> Model | None:
    hidden = keys.integer(family.hidden)
    vocab = keys.integer(family.vocab)
    n_layers = keys.integer(family.layers, MAX_LAYERS)
    positions = keys.integer(family.positions)
    layer = _layer(family, keys, hidden)
    tied = keys.flag(family.tie, family.tied)
    dtype = keys.word(family.dtype, DTYPES, "bf16")
    assumed = () if keys.find(family.dtype)[0] else ("the config names no dtype: bf16 is assumed",)
    _check_fixed(family, keys, hidden)
    if hidden is None or vocab is None or n_layers is None or positions is None:
        return None
    _check_layer_types(keys, n_layers)
    _check_window(family, keys, n_layers, positions)
    if layer is None:
        return None
    rows = positions + family.extra_position_rows if family.learned_positions else 0
    layers = (layer,) * n_layers
    return Model(
        name, family.model_type, hidden, vocab, layers, family.norm, tied, rows, dtype, positions, warnings=assumed
    )


def _layer(family: Family, keys: Keys, hidden: int | None) -> Layer | None:
    attention = _attention(family, keys, hidden)
    ffn = _ffn(family, keys, hidden)
    activation = keys.word(family.activation, ACTIVATIONS, ACTIVATIONS[family.default_activation])
    bias = _switch(family.mlp_bias, keys)
    if attention is None or ffn is None:
        return None
    return Layer(attention, Mlp(ffn, family.gated, activation, bias), family.norm)


def _ffn(family: Family, keys: Keys, hidden: int | None) -> int | None:
    if not family.ffn_ratio:
        return keys.integer(family.ffn)
    return keys.optional_integer(family.ffn, family.ffn_ratio * hidden if hidden else None)


def _attention(family: Family, keys: Keys, hidden: int | None) -> Attention | None:
    heads = keys.integer(family.heads)
    kv_heads = keys.optional_integer(family.kv_heads, heads)
    head_dim = _head_dim(family, keys, hidden, heads)
    qkv_bias, out_bias = _switch(family.qkv_bias, keys), _switch(family.out_bias, keys)
    if heads is None or kv_heads is None:
        return None
    if heads % kv_heads:
        key = keys.find(family.kv_heads)[0]
        keys.note("config-heads", key, f"{heads} heads do not divide into {kv_heads} groups", f"a divisor of {heads}")
    if head_dim is None:
        return None
    return Attention(heads, kv_heads, head_dim, qkv_bias, out_bias, rope=not family.learned_positions)


def _head_dim(family: Family, keys: Keys, hidden: int | None, heads: int | None) -> int | None:
    """The width of one head: its own key, or hidden / heads. Rotary positions turn pairs, so they need an even one."""
    key, _ = keys.find(family.head_dim)
    key = key or keys.find(family.heads)[0]
    head_dim = keys.optional_integer(family.head_dim, None)
    if keys.find(family.head_dim)[0] == "" and hidden and heads:
        if hidden % heads:
            why = f"hidden size {hidden} is not a multiple of {heads} heads"
            keys.note("config-head-dim", key, why, fix=f"add {family.head_dim[0]}" if family.head_dim else "")
            return None
        head_dim = hidden // heads
    if head_dim and head_dim % 2 and not family.learned_positions:
        keys.note("config-head-dim", key, f"heads of width {head_dim}", "an even width, as rotary positions turn pairs")
    return head_dim


def _switch(switch: Switch, keys: Keys) -> bool:
    return keys.flag((switch.key,), switch.default) if switch.key else switch.default


def _check_fixed(family: Family, keys: Keys, hidden: int | None) -> None:
    for row in family.fixed:
        if keys.flag((row.key,), row.value) != row.value:
            keys.note("config-variant", row.key, f"{row.otherwise}: not modelled yet", show(row.value))
    for key in family.same_as_hidden:
        width = keys.optional_integer((key,), hidden)
        if width is not None and hidden is not None and width != hidden:
            keys.note("config-variant", key, f"{width} differs from the hidden size {hidden}", f"{hidden}")


def _check_layer_types(keys: Keys, n_layers: int) -> None:
    kinds = keys.values.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        keys.note("config-type", "layer_types", f"is {show(kinds)}", "a list of words, one per layer")
    elif len(kinds) != n_layers:
        keys.note("config-layer-count", "layer_types", f"has {len(kinds)} entries for {n_layers} layers", f"{n_layers}")


def _check_window(family: Family, keys: Keys, n_layers: int, positions: int) -> None:
    """Refuse a window that some layer uses; one as long as the longest sequence changes nothing."""
    if family.window == "ignored" or not (family.window == "always" or keys.flag(("use_sliding_window",), False)):
        return
    window = keys.optional_integer(("sliding_window",), None)
    # 28 is the default of the library's class; below it, layers see everything.
    first = keys.optional_integer(("max_window_layers",), 28, minimum=0) if family.window == "flag" else 0
    if window is None or first is None or window >= positions or first >= n_layers:
        return
    what = f"layers {spans(range(first, n_layers))} see a window of {window} tokens: windows are not modelled yet"
    fix = "use_sliding_window=false" if family.window == "flag" else "sliding_window=null"
    keys.note("config-window", "sliding_window", what, fix=f"--set {fix} models full attention instead")
