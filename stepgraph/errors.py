"""What the user did wrong, said once and said well.

Every refusal of the package is a list of problems, each with a short code, a place, what was found, what was
expected and what to do. The command line prints them and exits with 2; Python callers catch `InputError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

import attrs


@attrs.frozen
class Problem:
    """One thing that is wrong.

    code: short, stable, kebab-case ("tp-heads"); where: file and key, or the option; what: what was found;
    expected: what would have been right; fix: what to do about it. `expected` and `fix` may be empty.
    """

    code: str
    where: str
    what: str
    expected: str = ""
    fix: str = ""

    def __str__(self) -> str:
        expected = f"; expected {self.expected}" if self.expected else ""
        fix = f". {self.fix[0].upper()}{self.fix[1:]}" if self.fix else ""
        end = "" if fix.endswith(("?", "!", ".")) or not fix else "."
        return f"{self.where}: {self.what}{expected}{fix}{end} [{self.code}]"


class InputError(ValueError):
    """Bad input: carries every problem that was found, not only the first.

    Raises: nothing; it is what others raise.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def refuse(code: str, where: str, what: str, expected: str = "", fix: str = "") -> InputError:
    """An `InputError` with a single problem, ready to be raised."""
    return InputError([Problem(code, where, what, expected, fix)])


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """`did you mean 'h100'?`; when none is close, `otherwise`, or the known words."""
    choices = sorted(known)
    close = get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else otherwise or f"choose one of: {', '.join(choices)}"


def together(*steps: Callable[[], Any]) -> list[Any]:
    """Run all steps and refuse once, with the problems of all of them. Raises: InputError."""
    results: list[Any] = []
    problems: list[Problem] = []
    for step in steps:
        try:
            results.append(step())
        except InputError as refused:
            problems.extend(refused.problems)
    if problems:
        raise InputError(problems)
    return results
