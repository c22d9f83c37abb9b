"""Words: how names and values are spelt in the text form, and a line that is read piece by piece.

A word made of ASCII letters, digits and `_ . # -` stands bare; every other text is a JSON string, so any name survives
and a line never breaks. Values of attributes also tell their types apart: `4` is an int, `4.0` a float, `true` a bool,
and a string that would read as one of these is quoted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TypeVar

import attrs

from stepgraph.ir.op import Attr, Phase
from stepgraph.ir.tensor import Kind

T = TypeVar("T")

_BLANK = re.compile(r"[ \t\r]*")
_BARE = re.compile(r"[A-Za-z0-9_.#\-]+")
_QUOTED = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_VALUE = re.compile(r"[A-Za-z0-9_.#\-+]+")
_INT = re.compile(r"-?[0-9]+")
_FLOAT = re.compile(r"-?(?:[0-9]+\.[0-9]*(?:e[+-]?[0-9]+)?|[0-9]+e[+-]?[0-9]+|inf|nan)")
_BOOLS = ("false", "true")

FIELDS = ("at", "group", "of", "role", "module", "origin")
"""Fields of an op line, in their order; attributes follow."""

_RESERVED = (*FIELDS, "as", "phase", "kind", "inputs", "outputs")


def default_kind(phase: Phase) -> Kind:
    """What a tensor is taken for, by the phase that makes it, unless the text says otherwise."""
    if phase is Phase.FORWARD:
        return Kind.ACT
    return Kind.GRAD if phase is Phase.BACKWARD else Kind.STATE


def word(text: str) -> str:
    """A name as it stands in the text: bare where possible, else quoted."""
    return text if _BARE.fullmatch(text) else json.dumps(text)


def tensor_word(name: str) -> str:
    """A tensor's name where it is read: `%attn.qkv`."""
    return f"%{word(name)}"


def attr_key(key: str) -> str:
    """An attribute's name; quoted when the name means something else about an op."""
    return json.dumps(key) if key in _RESERVED else word(key)


def value(attr: Attr) -> str:
    """An attribute's value, spelt so that its type comes back."""
    if isinstance(attr, bool):
        return _BOOLS[attr]
    if isinstance(attr, str):
        return json.dumps(attr) if _reads_as_other(attr) else word(attr)
    return repr(float(attr)) if isinstance(attr, float) else repr(attr)


def _reads_as_other(text: str) -> bool:
    return text in _BOOLS or _INT.fullmatch(text) is not None or _FLOAT.fullmatch(text) is not None


class TextError(ValueError):
    """A text that cannot be read: number of the line, the line, and what was expected where.

    Raises: nothing; it is what the readers raise.
    """

    def __init__(self, number: int, line: str, expected: str, column: int = 0) -> None:
        self.number = number
        self.line = line
        self.expected = expected
        self.column = column
        super().__init__(f"line {number}: expected {expected}\n  {line}\n  {' ' * column}^")


@attrs.define
class Line:
    """A line of text and how far it has been read. Blanks between the pieces do not count."""

    number: int
    text: str
    column: int = 0

    def error(self, expected: str, column: int | None = None) -> TextError:
        """The error to raise when `expected` is not what stands here (or at `column`)."""
        return TextError(self.number, self.text, expected, self.here() if column is None else column)

    def here(self) -> int:
        """The column of the next piece."""
        self._skip()
        return self.column

    def ahead(self, literal: str) -> bool:
        """Whether `literal` comes next."""
        self._skip()
        return self.text.startswith(literal, self.column)

    def accept(self, literal: str) -> bool:
        """Read `literal` if it comes next."""
        found = self.ahead(literal)
        self.column += len(literal) * found
        return found

    def accept_word(self, keyword: str) -> bool:
        """Read a whole bare word if it is `keyword`."""
        self._skip()
        match = _BARE.match(self.text, self.column)
        found = match is not None and match.group() == keyword
        self.column += len(keyword) * found
        return found

    def need(self, literal: str) -> None:
        """Read `literal`. Raises: TextError when something else comes."""
        if not self.accept(literal):
            raise self.error(f"{literal!r}")

    def done(self) -> bool:
        """Whether nothing is left but a comment: ` ; columns`."""
        self._skip()
        return self.column == len(self.text) or self.text[self.column] == ";"

    def need_end(self) -> None:
        """Raises: TextError when something is left."""
        if not self.done():
            raise self.error("the end of the line")

    def word(self, expected: str) -> str:
        """Read a name, bare or quoted. Raises: TextError."""
        return self._quoted() if self.ahead('"') else self._match(_BARE, expected)

    def tensor_word(self) -> str:
        """Read `%name`. Raises: TextError."""
        if not self.accept("%"):
            raise self.error("a tensor: %name")
        return self.word("a tensor's name")

    def integer(self, expected: str) -> int:
        """Read an integer. Raises: TextError."""
        return int(self._match(_INT, expected))

    def value(self) -> Attr:
        """Read an attribute's value. Raises: TextError."""
        if self.ahead('"'):
            return self._quoted()
        start, text = self.column, self._match(_VALUE, "a value")
        if text in _BOOLS:
            return text == "true"
        if _INT.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            return float(text)
        if not _BARE.fullmatch(text):
            raise self.error("a value (a text like this one in quotes)", start)
        return text

    def listed(self, read: Callable[[], T], separator: str) -> tuple[T, ...]:
        """Read one item, and one more after each separator."""
        items = [read()]
        while self.accept(separator):
            items.append(read())
        return tuple(items)

    def _skip(self) -> None:
        match = _BLANK.match(self.text, self.column)
        self.column = match.end() if match else self.column

    def _match(self, pattern: re.Pattern[str], expected: str) -> str:
        self._skip()
        match = pattern.match(self.text, self.column)
        if match is None:
            raise self.error(expected)
        self.column = match.end()
        return match.group()

    def _quoted(self) -> str:
        start, text = self.column, self._match(_QUOTED, "a text that ends with a quote")
        try:
            return str(json.loads(text))
        except ValueError:
            raise self.error("a JSON string", start) from None
