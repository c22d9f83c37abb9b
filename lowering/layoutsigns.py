"""The signs of the pipeline notation: letters and bars read one by one, repetitions written out.

What the signs mean together is not known here. A problem is placed at its character, the first being 1.
"""

from __future__ import annotations

import attrs

from stepgraph.errors import Problem

WHERE = "pipeline_layout"
LETTERS = "E embedding, t transformer layer, m MTP layer, L loss"
MAX_SIGNS = 10_000


@attrs.frozen
class Sign:
    """A letter or a bar, and where it is written (the first character is 1)."""

    sign: str
    at: int


@attrs.define
class Reader:
    """A text, how far it has been read, and what was wrong up to there."""

    text: str
    column: int = 0
    problems: list[Problem] = attrs.field(factory=list)
    strange: set[str] = attrs.field(factory=set)

    def items(self, *, inside: bool = False) -> list[Sign]:
        """Signs up to the end, or up to the bracket that closes a group, repetitions written out."""
        found: list[Sign] = []
        while (sign := self.ahead()) and not (inside and sign == ")"):
            more = self.item(sign, inside)
            found += more if len(found) <= MAX_SIGNS else []
        return found

    def item(self, sign: str, inside: bool) -> list[Sign]:
        """A sign or a group with its repetition. What makes no sense is skipped."""
        self.column += 1
        at = self.column
        if sign in "EtmL|":
            return self.repeated([Sign(sign, at)])
        if sign == "(":
            return self.nested(at) if inside else self.group(at)
        self.stray(at, sign)
        self.column -= sign == "*"
        return self.repeated([])  # so that what repeats a strange sign is not strange again

    def stray(self, at: int, sign: str) -> None:
        """Complain about each sort of strange sign once."""
        sort = "0" if sign.isdigit() else sign
        if sort not in self.strange:
            self.complain(at, f"{sign!r} means nothing here", *_hint(sign))
        self.strange.add(sort)

    def group(self, at: int) -> list[Sign]:
        """What the bracket opened at `at` holds, repeated."""
        found, wrong = self.items(inside=True), len(self.problems)
        if not self.ahead():
            self.complain(at, "the group is never closed", "')*n' further on", "close it: (tt|)*4")
            return []
        self.column += 1
        if self.ahead() != "*":
            self.complain(self.column, "the group is not repeated", "'*n' after ')'", "write *n, or drop the brackets")
        elif not found and not wrong:
            self.complain(at, "the group is empty", "letters or | between the brackets")
        return self.repeated(found)

    def nested(self, at: int) -> list[Sign]:
        """Skip a group inside a group."""
        self.complain(at, "a group opens inside a group", "groups side by side", "write the inner one out")
        depth = 1
        while depth and self.ahead():
            depth += {"(": 1, ")": -1}.get(self.ahead(), 0)
            self.column += 1
        return self.repeated([])

    def repeated(self, found: list[Sign]) -> list[Sign]:
        """The signs as often as the `*n` behind them says; once when there is none."""
        if self.ahead() != "*":
            return found
        self.column += 1
        at, digits = self.column, ""
        while self.ahead() in tuple("0123456789"):
            digits += self.text[self.column]
            self.column += 1
        if not digits:
            self.complain(at, "'*' without a number", "how often, as in t*4")
            return []
        if len(digits) > 9 or int(digits) * len(found) > MAX_SIGNS:
            self.complain(at, f"{digits[:9]} times are more than {MAX_SIGNS} signs", "the stages of one model")
            return []
        return found * int(digits)

    def ahead(self) -> str:
        """The next sign, nothing at the end. Commas are skipped: they only please the eye."""
        while self.text[self.column : self.column + 1] == ",":
            self.column += 1
        return self.text[self.column : self.column + 1]

    def complain(self, at: int, what: str, expected: str, fix: str = "") -> None:
        """Note what is wrong at a character."""
        self.problems.append(Problem("pipeline-syntax", WHERE, placed(self.text, at, what), expected, fix))


def _hint(sign: str) -> tuple[str, str]:
    """What was expected instead of a strange sign, and the fix."""
    if sign.isdigit():
        return "'*' before a number", "write t*4, not t4"
    if sign in ")*":
        return "a letter, | or a group before it", "leave it out"
    if sign.swapcase() in tuple("EtmL"):
        return LETTERS, f"did you mean {sign.swapcase()!r}?"
    return LETTERS, "leave it out" if sign in "\\'\" \t" else ""


def placed(text: str, at: int, what: str) -> str:
    """`at character 7, after '*4|(': what`."""
    if not at:
        return what
    before = text[max(0, at - 9) : at - 1]
    dots = "..." if at > 9 else ""
    return f"at character {at}{f', after {dots + before!r}' if before else ''}: {what}"
