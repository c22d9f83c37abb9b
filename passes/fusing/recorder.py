"""What a pattern is written with: the recorder `op`, symbols for tensors, and the nodes that calls leave behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import attrs

from stepgraph.errors import did_you_mean
from stepgraph.ir.op import Attr
from stepgraph.ir.table import KINDS_OF, TABLE


class PatternError(TypeError):
    """A rule that cannot be understood: names its file and line, and what was wrong."""


class Symbol:
    """What a pattern's parameters and results are: they stand for one tensor and cannot be computed with."""

    def _is_no_value(self, *_: object) -> NoReturn:
        raise TypeError(
            "a pattern computes nothing: write op.mul(a, b) for a * b; only an op's first result has a name"
        )

    __iter__ = __getitem__ = _is_no_value
    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __neg__ = _is_no_value
    __lt__ = __le__ = __gt__ = __ge__ = _is_no_value


@attrs.frozen(order=False)
class Var(Symbol):
    """A tensor that enters the kernel, by parameter name."""

    name: str


@attrs.frozen(eq=False)
class Node(Symbol):
    """One op inside the kernel: the kinds that it may be, its operands, attributes that must be equal.

    optional: the op may be absent, its first operand standing for its result.
    """

    kinds: frozenset[str]
    args: tuple[Var | Node, ...]
    attrs: tuple[tuple[str, Attr], ...] = ()
    optional: bool = False
    written: str = ""

    def __str__(self) -> str:
        return self.written


class Recorder:
    """The `op` of a pattern: every attribute is a kind of the op table."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._made: list[Node] = []

    def __getattr__(self, kind: str) -> Callable[..., Node]:
        if kind not in TABLE:
            raise PatternError(f"{self._where}: no op kind {kind!r}; {did_you_mean(kind, TABLE)}")
        return self._caller(frozenset({kind}), kind)

    @property
    def made(self) -> tuple[Node, ...]:
        """Every op that was called."""
        return tuple(self._made)

    def any(self, family: str, *operands: Var | Node, **attributes: Attr) -> Node:
        """Any op of a family, as `stepgraph.ir.table.FAMILIES` has them."""
        if family not in KINDS_OF:
            raise PatternError(f"{self._where}: no family {family!r}; {did_you_mean(family, KINDS_OF)}")
        return self._caller(frozenset(KINDS_OF[family]), f"any {family}")(*operands, **attributes)

    def one_of(self, *kinds: str) -> Callable[..., Node]:
        """An op of one of the kinds."""
        return self._caller(self._known(kinds), " | ".join(kinds))

    def maybe(self, *kinds: str) -> Callable[..., Node]:
        """An op of one of the kinds, or nothing: then the first operand stands for the result."""
        return self._caller(self._known(kinds), " | ".join(kinds) + " or nothing", optional=True)

    def _known(self, kinds: Sequence[str]) -> frozenset[str]:
        if not kinds:
            raise PatternError(f"{self._where}: names no op kind; give one or more")
        for kind in kinds:
            getattr(self, kind)
        return frozenset(kinds)

    def _caller(self, kinds: frozenset[str], written: str, optional: bool = False) -> Callable[..., Node]:
        def call(*operands: Var | Node, **attributes: Attr) -> Node:
            for operand in operands:
                if not isinstance(operand, Var | Node):
                    what = f"{self._where}: {written} was given {operand!r}"
                    raise PatternError(f"{what}; operands are the pattern's parameters and results of other ops")
            for name, value in attributes.items():
                if not isinstance(value, int | float | str):
                    what = f"{self._where}: {written} was given {name}={value!r}"
                    raise PatternError(f"{what}; tensors go by position, attributes are numbers, texts, true or false")
            if optional and not operands:
                raise PatternError(f"{self._where}: {written} needs an operand, which stands for the result")
            self._made.append(Node(kinds, operands, tuple(sorted(attributes.items())), optional, written))
            return self._made[-1]

        return call
