"""Small parts of an SVG drawing: elements, numbers, texts, tick marks. Plain strings, equal for equal input."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, takewhile
from math import floor, log10
from xml.sax.saxutils import escape, quoteattr

UNSEEN = "\ufffd"
"""Stands for characters that XML does not allow, as a file name may have them."""


def element(name: str, content: str = "", /, **attributes: str | float) -> str:
    """One element; `content` is finished SVG, attributes are escaped here.

    An underscore in an attribute's name is a hyphen, one at its end is dropped: `class_`, `text_anchor`.
    """
    given = "".join(f" {_attribute(key)}={quoteattr(_value(value))}" for key, value in attributes.items())
    return f"<{name}{given}>{content}</{name}>" if content else f"<{name}{given}/>"


def words(text: str, x: float, y: float, **attributes: str | float) -> str:
    """A line of text whose baseline begins (or is centred, by text_anchor) at x, y."""
    return element("text", escaped(text), x=x, y=y, **attributes)


def box(x: float, y: float, width: float, height: float, **attributes: str | float) -> str:
    """A rectangle."""
    return element("rect", x=x, y=y, width=width, height=height, **attributes)


def tooltip(text: str) -> str:
    """What a viewer shows when the pointer rests on the element that this stands in."""
    return element("title", escaped(text))


def escaped(text: str) -> str:
    """Text as XML content; characters that XML forbids become a replacement character."""
    return escape("".join(character if _allowed(character) else UNSEEN for character in text))


def number(value: float) -> str:
    """A coordinate with at most two decimals: 3, 3.5, 3.14; never -0."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def mixed(colour: str, share: float) -> str:
    """A colour #rrggbb with a share of white: 0 leaves it, 1 is white."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def ticks(end: float, most: int) -> Iterator[float]:
    """0 and the multiples, up to `end`, of the smallest of 1, 2, 5 x 10^k that makes at most `most` steps."""
    if end <= 0:
        return iter((0.0,))
    step = _step(end / max(most, 1))
    return takewhile(lambda tick: tick <= end * (1 + 1e-9), (index * step for index in count()))


def _step(least: float) -> float:
    power = 10.0 ** floor(log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _attribute(name: str) -> str:
    return name.rstrip("_").replace("_", "-")


def _value(value: str | float) -> str:
    return value if isinstance(value, str) else number(value)


def _allowed(character: str) -> bool:
    """Source: W3C, Extensible Markup Language 1.0 (fifth edition), section 2.2, production 2."""
    code = ord(character)
    return character in "\t\n\r" or 0x20 <= code <= 0xD7FF or 0xE000 <= code <= 0xFFFD or code > 0xFFFF
