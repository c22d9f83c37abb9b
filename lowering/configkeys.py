"""Typed reading of raw config keys: every slip is collected, nothing is converted, null is the same as absent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping

import attrs

from stepgraph.errors import Problem, did_you_mean

MAX_WIDTH = 10**9
MAX_LAYERS = 10**5
NOTHING = ("none", "null", "nil", "no", "off", "false", "")
"""Words that are meant to say that there is no such thing, which JSON writes as null."""
SCALARS = (bool, int, float, str)


def show(value: object) -> str:
    """A value in a message: short whatever it is, however long or deep."""
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return f"an object with {len(value)} keys"
    if value is not None and not isinstance(value, SCALARS):
        return f"a {type(value).__name__}"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


@attrs.define
class Keys:
    """The raw keys of one config, the problems found so far and what had to be assumed.

    values: key -> raw value, overrides applied; source: the file, for messages, and prefix the object inside it
    ("text_config."); overridden: keys that came from the user's overrides; alike: what a key that is not read probably
    means. A reading method returns None, and notes a problem, when the value cannot be used.
    """

    values: Mapping[str, object]
    source: str
    overridden: frozenset[str] = frozenset()
    prefix: str = ""
    alike: Mapping[str, str] = attrs.field(factory=dict)
    problems: list[Problem] = attrs.field(factory=list)
    warnings: list[str] = attrs.field(factory=list)

    def where(self, key: str) -> str:
        """Where a key stands: in the file, or on the command line."""
        return f"--set {key}" if key in self.overridden else f"{self.source}:{self.prefix}{key}"

    def note(self, code: str, key: str, what: str, expected: str = "", fix: str = "") -> None:
        """Remember one problem with a key."""
        self.problems.append(Problem(code, self.where(key), what, expected, fix))

    def guess(self, key: str) -> str:
        """What an unread key probably means, as a question; nothing when it resembles none."""
        return f"did you mean {self.alike[key]!r}?" if key in self.alike else ""

    def is_null(self, key: str) -> bool:
        """Whether the key is there and says null: the one difference that some keys make between null and absent."""
        return key in self.values and self.values[key] is None

    def find(self, names: Iterable[str]) -> tuple[str, object]:
        """The first synonym that is set, with its value; ("", None) when none is. Contradictions are noted."""
        present = [(name, self.values[name]) for name in names if self.values.get(name) is not None]
        for name, value in present[1:]:
            self._compare(present[0], name, value)
        return present[0] if present else ("", None)

    def integer(self, names: tuple[str, ...], maximum: int = MAX_WIDTH, minimum: int = 1) -> int | None:
        """A required whole number between minimum and maximum.

        Problems: config-missing-key, config-type, config-range, config-conflict.
        """
        key, value = self.find(names)
        if key:
            return self._checked_integer(key, value, maximum, minimum)
        others = f" (or {', '.join(names[1:])})" if names[1:] else ""
        what = "is null" if names[0] in self.values else "is missing"
        other = next((key for key, own in self.alike.items() if own in names), "")
        fix = f"{other} is set: {self.values.get('model_type')} calls it {names[0]}" if other else "add the key"
        self.note("config-missing-key", names[0], f"{names[0]}{others} {what}", "a whole number", fix)
        return None

    def optional_integer(self, names: tuple[str, ...], default: int | None, minimum: int = 1) -> int | None:
        """A whole number, or the default when every synonym is absent."""
        key, value = self.find(names)
        return self._checked_integer(key, value, MAX_WIDTH, minimum) if key else default

    def positive(self, key: str, maximum: float = math.inf) -> float | None:
        """A number above 0 and up to maximum, or None when absent. Problems: config-type, config-range."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.note("config-type", key, f"is {show(value)}", "a number")
            return None
        if 0 < value <= maximum and value != math.inf:
            return float(min(value, MAX_WIDTH))
        expected = "a number above 0" + (f", at most {maximum:g}" if maximum < math.inf else "")
        self.note("config-range", key, f"is {show(value)}", expected)
        return None

    def integers(self, key: str) -> list[int] | None:
        """A list of whole numbers from 0, or None when absent. Problem: config-type."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, list) and all(type(entry) is int and entry >= 0 for entry in value):  # true is no 1
            return value
        self.note("config-type", key, f"is {show(value)}", "a list of whole numbers")
        return None

    def flag(self, names: tuple[str, ...], default: bool) -> bool:
        """true or false, or the default when absent. Problem: config-type."""
        key, value = self.find(names)
        if not key:
            return default
        if isinstance(value, bool):
            return value
        self.note("config-type", key, f"is {show(value)}", "true or false", "write it in lower case, without quotes")
        return default

    def word(self, names: tuple[str, ...], choices: Mapping[str, str], default: str) -> str:
        """One of the known words, translated; the default when absent. Problems: config-type, config-value."""
        key, value = self.find(names)
        if not key:
            return default
        if not isinstance(value, str):
            self.note("config-type", key, f"is {show(value)}", f"one of: {', '.join(choices)}")
            return default
        if value not in choices:
            expected = f"one of: {', '.join(choices)}"
            self.note("config-value", key, f"is {show(value)}", expected, did_you_mean(value[:60], choices))
        return choices.get(value, default)

    def _checked_integer(self, key: str, value: object, maximum: int, minimum: int) -> int | None:
        if isinstance(value, bool) or not isinstance(value, int):
            nothing = isinstance(value, str) and value.strip().lower() in NOTHING
            fix = "write null where there is none" if nothing else "write digits, without quotes or point"
            self.note("config-type", key, f"is {show(value)}", "a whole number", fix)
            return None
        if minimum <= value <= maximum:
            return value
        self.note("config-range", key, f"is {show(value)}", f"a whole number from {minimum} to {maximum}")
        return None

    def _compare(self, first: tuple[str, object], name: str, value: object) -> None:
        # Only scalars: comparing deeply nested lists could exhaust the stack, and they are refused by type anyway.
        if not isinstance(value, SCALARS) or not isinstance(first[1], SCALARS) or value == first[1]:
            return
        what = f"is {show(value)} but {first[0]}, which means the same, is {show(first[1])}"
        self.note("config-conflict", name, what, fix="keep one of the two keys")
