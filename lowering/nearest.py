"""The nearest possible values: what a refusal offers instead of a size that does not divide."""

from __future__ import annotations

import math
from collections.abc import Iterable

from stepgraph.errors import Problem

MAX_SIZE = 10**9


def size_problem(name: str, value: object) -> Problem | None:
    """What is wrong with a parallel or batch size by itself (code layout-value), or None."""
    if isinstance(value, bool) or not isinstance(value, int):
        return Problem("layout-value", name, f"{str(value)[:40]!r} is not a whole number", "1 or more")
    if 1 <= value <= MAX_SIZE:
        return None
    closest = 1 if value < 1 else MAX_SIZE
    shown = str(value) if abs(value) < 10**20 else f"a number of {value.bit_length()} bits"
    return Problem("layout-value", name, f"{shown} is out of range", f"1 to {MAX_SIZE}", f"nearest possible: {closest}")


def divisors(number: int) -> list[int]:
    """Every divisor, ascending."""
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})


def nearest(choices: list[int], wanted: int) -> list[int]:
    """The nearest ascending choice below and the nearest above, where there are such."""
    below = [choice for choice in choices if choice < wanted][-1:]
    return below + [choice for choice in choices if choice > wanted][:1]


def multiples_around(value: int, step: int) -> list[int]:
    """The multiples of step below and above a value that is none; only the one above when the other is 0."""
    low = value // step * step
    return [low, low + step] if low else [step]


def either(values: Iterable[int]) -> str:
    """`4 or 8`."""
    return " or ".join(map(str, values))


def listed(values: list[int]) -> str:
    """`1, 2, 4`, cut after the first dozen."""
    return ", ".join(map(str, values[:12])) + (", ..." if len(values) > 12 else "")
