"""The rule language: a pattern is a function whose parameters enter the kernel and whose calls run inside it.

    @fusion(phase="forward")
    def add_rmsnorm(op, x, residual, weight):
        total = op.add(x, residual)
        return op.rmsnorm(total, weight)

The function is called once, with a recorder for `op` and symbols for the tensors; nothing of a graph is in sight.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import NoReturn, overload

import attrs

from stepgraph.errors import did_you_mean
from stepgraph.ir.op import Attr, Phase
from stepgraph.ir.table import KINDS_OF, TABLE

PHASES = ("forward", "backward", "either")
RESERVED = ("graph", "ops", "inputs", "outputs", "interior", "escaping", "reject")
"""Names that a match has for itself, so that no parameter may be called so."""


class PatternError(TypeError):
    """A rule that cannot be understood: names its file and line, and what was wrong."""


@attrs.frozen
class Var:
    """A tensor that enters the kernel, by parameter name."""

    name: str


@attrs.frozen(eq=False)
class Node:
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
        """Any op of a family: ends, matmuls, attention, norms, pointwise, experts, moves, step."""
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


@attrs.frozen(eq=False)
class FusionRule:
    """A fused kernel that software has: which ops it joins, when, and how well it runs.

    phase: "forward" (recomputed copies too), "backward" or "either". kernels: launches of the fused kernel.
    efficiency: part of the reachable HBM rate that it gets. source: where the kernel exists.
    """

    name: str
    params: tuple[str, ...]
    roots: tuple[Node, ...]
    phase: str = "either"
    kernels: int = 1
    efficiency: float = 1.0
    source: str = ""
    where: str = ""
    checks: tuple[Callable[..., None], ...] = ()

    def check(self, function: Callable[..., None]) -> FusionRule:
        """Decorator: the rule with a further condition, which calls `m.reject(reason)` to refuse a match."""
        return attrs.evolve(self, checks=(*self.checks, function))

    def __call__(self, *_: object) -> NoReturn:
        raise PatternError(f"{self.where}: rule {self.name!r} is not called; give it to fuse(...)")


@overload
def fusion(function: Callable[..., object]) -> FusionRule: ...


@overload
def fusion(
    *, name: str = "", phase: str = "either", kernels: int = 1, efficiency: float = 1.0, source: str = ""
) -> Callable[[Callable[..., object]], FusionRule]: ...


def fusion(
    function: Callable[..., object] | None = None,
    *,
    name: str = "",
    phase: str = "either",
    kernels: int = 1,
    efficiency: float = 1.0,
    source: str = "",
) -> FusionRule | Callable[[Callable[..., object]], FusionRule]:
    """Make a fusion rule of a pattern function.

    Raises: PatternError, naming file and line, for an unknown kind or family, a parameter that is never used or is
    called like a part of a match, an op whose result is neither used nor returned, a result that is no op or that may
    be absent, a phase, kernel count or efficiency that cannot be.
    """

    def make(pattern: Callable[..., object]) -> FusionRule:
        if not inspect.isfunction(pattern):
            raise PatternError(f"{pattern!r} is no function: a rule is one, decorated with @fusion or @fusion(...)")
        rule = _record(pattern, name or pattern.__name__)
        return attrs.evolve(_checked(rule, phase, kernels, efficiency), source=source)

    return make if function is None else make(function)


def _record(pattern: Callable[..., object], name: str) -> FusionRule:
    code = pattern.__code__
    where = f"{code.co_filename}:{code.co_firstlineno}"
    params = _parameters(pattern, name, where)
    recorder = Recorder(where)
    result = pattern(recorder, *map(Var, params))
    roots = tuple(root for root in (result if isinstance(result, tuple) else (result,)) if isinstance(root, Node))
    if not roots or (isinstance(result, tuple) and len(roots) < len(result)):
        raise PatternError(f"{where}: rule {name!r} has to return what leaves the kernel: the result of an op")
    if any(root.optional for root in roots):
        raise PatternError(f"{where}: rule {name!r} returns an op that may be absent; return one that is always there")
    reached = _reached(roots)
    lost = next((node for node in recorder.made if id(node) not in reached), None)
    if lost is not None:
        raise PatternError(f"{where}: the result of {lost} in rule {name!r} is neither used nor returned")
    variables = {part.name for part in reached.values() if isinstance(part, Var)}
    unused = next((param for param in params if param not in variables), None)
    if unused is not None:
        raise PatternError(f"{where}: parameter {unused!r} of rule {name!r} is never used")
    return FusionRule(name, params, roots, where=where)


def _parameters(pattern: Callable[..., object], name: str, where: str) -> tuple[str, ...]:
    """Names of the tensors of a pattern, whose first parameter is the recorder."""
    found = tuple(inspect.signature(pattern).parameters.values())
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not found or any(param.kind not in plain for param in found):
        raise PatternError(f"{where}: rule {name!r} takes (op, tensor, ...): plain parameters, the first for the ops")
    clash = next((param.name for param in found[1:] if param.name in RESERVED), None)
    if clash is not None:
        raise PatternError(f"{where}: a parameter of {name!r} may not be called {clash!r}")
    return tuple(param.name for param in found[1:])


def _reached(roots: Sequence[Node]) -> dict[int, Var | Node]:
    """Every part of a pattern that leads to its results, by identity."""
    found: dict[int, Var | Node] = {}
    waiting: list[Var | Node] = list(roots)
    while waiting:
        part = waiting.pop()
        if id(part) not in found:
            found[id(part)] = part
            waiting.extend(part.args if isinstance(part, Node) else ())
    return found


def _checked(rule: FusionRule, phase: str, kernels: int, efficiency: float) -> FusionRule:
    if phase not in PHASES:
        raise PatternError(f"{rule.where}: no phase {phase!r} for rule {rule.name!r}; {did_you_mean(phase, PHASES)}")
    if kernels < 1 or not 0 < efficiency <= 1:
        raise PatternError(f"{rule.where}: rule {rule.name!r} needs kernels of at least 1 and 0 < efficiency <= 1")
    return attrs.evolve(rule, phase=phase, kernels=kernels, efficiency=efficiency)


def runs_in(rule: FusionRule, phase: Phase) -> bool:
    """Whether the rule is for ops of this phase."""
    return rule.phase == "either" or rule.phase == phase.value
