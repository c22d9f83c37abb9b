"""Read a Hugging Face config.json, or a carried one by name, into a `Model`; list everything wrong with it at once.

The file is read by keys: no class of another library is imported and nothing is downloaded.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import attrs

from stepgraph.errors import InputError, Problem, did_you_mean, refuse
from stepgraph.lowering.checkpoints import DRAFT_KEYS, QUANTIZED_KEYS, checkpoint_warnings, is_draft
from stepgraph.lowering.configfile import carried_names, locate, read_config
from stepgraph.lowering.configkeys import MAX_LAYERS, MAX_WIDTH, Keys, show
from stepgraph.lowering.families import Family
from stepgraph.lowering.familytable import FAMILIES, family_of, family_of_architecture
from stepgraph.lowering.layerkeys import capped, read_attention, read_layers, read_mlp, switched
from stepgraph.lowering.model import Layer, Model
from stepgraph.lowering.namesakes import EXPERT_FEATURE_KEYS, expert_problems, namesakes, spoken_for
from stepgraph.lowering.nested import language_model
from stepgraph.lowering.unsupported import FEATURE_KEYS, is_known_type, unsupported_features, unsupported_type

NO_OVERRIDES: Mapping[str, object] = MappingProxyType({})
DTYPES = MappingProxyType({"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"})
QUIET_KEYS = frozenset({"max_window_layers", "use_sliding_window", "tie_word_embeddings"})
"""Keys that mean nothing by themselves: files carry them whether or not their family reads them."""


def model_names() -> tuple[str, ...]:
    """The models that come with the package, as `load_model` takes them (in any case)."""
    return carried_names()


def load_model(path_or_name: str | os.PathLike[str], overrides: Mapping[str, object] = NO_OVERRIDES) -> Model:
    """The model that a carried name or the path of a config.json describes.

    overrides: raw config keys that replace those of the file, checked as the file is; None takes a key away. A key
    replaces its synonyms too (num_hidden_layers also means n_layer).

    Raises: InputError with every problem of the file; codes begin with "config-" (and "set-unknown-key").
    """
    path = locate(path_or_name)
    config = read_config(path)
    carried = path.stem if os.fspath(path_or_name).lower() == path.stem else ""
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
    inner = language_model(config, source)
    where = f"{source}:{inner.prefix}"
    model_type = overrides.get("model_type", inner.keys.get("model_type"))
    family = family_of(model_type)
    if family is None:
        raise InputError(_unsupported_family(model_type, {**inner.keys, **overrides}, where))
    values = _merged(family, inner.keys, overrides)
    alike = namesakes(family, values, spoken_for(FAMILIES) | DRAFT_KEYS | QUANTIZED_KEYS)
    keys = Keys(values, source, frozenset(overrides), inner.prefix, alike)
    named = EXPERT_FEATURE_KEYS if family.experts else frozenset[str]()
    keys.problems += unsupported_features(values, where, family.keys_read | family.inert_keys | named)
    keys.problems += expert_problems(family, keys)
    warnings = _unread_keys(family, keys, inner.keys) + _architecture_warnings(family, keys)
    model = _model(name, family, keys)
    if model is None or keys.problems:
        raise InputError(dict.fromkeys(keys.problems))  # a key that is looked at twice is reported once
    said = dict.fromkeys((*keys.warnings, *inner.warnings, *warnings))
    return attrs.evolve(model, family=str(model_type), warnings=tuple(said))


def _unsupported_family(model_type: object, config: Mapping[str, object], source: str) -> list[Problem]:
    """Why a file of another family is refused: what it uses, and if that says nothing, which families there are."""
    where, names = f"{source}model_type", [row.model_type for row in FAMILIES]
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
    elsewhere = frozenset().union(*(row.keys_read | row.inert_keys for row in FAMILIES)) - QUIET_KEYS
    elsewhere = (elsewhere | frozenset(keys.alike)) - family.inert_keys
    known = family.keys_read | FEATURE_KEYS | DRAFT_KEYS | QUANTIZED_KEYS
    for key in sorted(keys.overridden - known - family.inert_keys - set(config), key=str):
        fix = did_you_mean(str(key)[:60], family.keys_read)
        keys.note("set-unknown-key", key, f"{family.model_type} has no such key", fix=keys.guess(key) or fix)
    candidates = (elsewhere | keys.overridden) - known
    unread = sorted(key for key in candidates if key in keys.overridden or keys.values.get(key))
    return tuple(_unread(family, key, keys.guess(key)) for key in unread)


def _unread(family: Family, key: str, guess: str) -> str:
    return f"{key} changes nothing: {family.model_type} models do not read it" + (f"; {guess}" if guess else "")


def _architecture_warnings(family: Family, keys: Keys) -> tuple[str, ...]:
    names = keys.values.get("architectures")
    if not isinstance(names, list) or not names or is_draft(keys.values) or names[0] in family.architectures:
        return ()
    return (f"architectures says {show(names[0])}: read as {family.architectures[0]}, a language model",)


def _model(name: str, family: Family, keys: Keys) -> Model | None:
    hidden, vocab = keys.integer(family.hidden), keys.integer(family.vocab)
    n_layers, positions = keys.integer(family.layers, MAX_LAYERS), keys.integer(family.positions)
    tied = keys.flag(family.tie, family.tied)
    dtype = keys.word(family.dtype, DTYPES, "bf16")
    keys.warnings += checkpoint_warnings(keys.values, dtype, named=bool(keys.find(family.dtype)[0]))
    head_bias, softcap = switched(family.head_bias, keys), capped(family.final_softcap, keys)
    mtp = _prediction_modules(family, keys)
    _check_fixed(family, keys, hidden)
    layers = _layers(family, keys, hidden, n_layers, positions)
    if hidden is None or vocab is None or positions is None or not layers:
        return None
    rows = positions + family.extra_position_rows if family.learned_positions else 0
    model = Model(name, family.model_type, hidden, vocab, layers, family.norm, tied, rows, dtype, positions)
    return attrs.evolve(model, head_bias=head_bias, final_softcap=softcap, mtp=mtp)


def _layers(
    family: Family, keys: Keys, hidden: int | None, n_layers: int | None, positions: int | None
) -> tuple[Layer, ...]:
    if n_layers is not None:
        return read_layers(family, keys, hidden, n_layers, positions or MAX_WIDTH)
    # No layer can be built, but what is wrong with their parts is to be said at the same time.
    read_attention(family, keys, hidden)
    if family.experts is None:
        read_mlp(family, keys, hidden)
    return ()


def _prediction_modules(family: Family, keys: Keys) -> int:
    """Multi-token prediction modules, each of one layer: the product of the family's keys, 0 without the first."""
    if not family.mtp or not switched(family.mtp_switch, keys):
        return 0
    defaults = (0, *(1 for _ in family.mtp[1:]))
    counts = [
        keys.optional_integer((key,), default, minimum=0) for key, default in zip(family.mtp, defaults, strict=True)
    ]
    return math.prod(count or 0 for count in counts)


def _check_fixed(family: Family, keys: Keys, hidden: int | None) -> None:
    for row in family.fixed:
        if keys.flag((row.key,), row.value) != row.value:
            keys.note("config-variant", row.key, f"{row.otherwise}: not modelled yet", show(row.value))
    for key in family.same_as_hidden:
        width = keys.optional_integer((key,), hidden)
        if width is not None and hidden is not None and width != hidden:
            keys.note("config-variant", key, f"{width} differs from the hidden size {hidden}", f"{hidden}")
