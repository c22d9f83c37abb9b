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
from stepgraph.ir.op import Phase
from stepgraph.passes.fusing.recorder import Node, PatternError, Recorder, Var

PHASES = ("forward", "backward", "step", "either")
LEAST_EFFICIENCY = 1e-6
RESERVED = ("graph", "ops", "inputs", "outputs", "interior", "escaping", "reject")
"""Names that a match has for itself, so that no parameter may be called so."""


@attrs.frozen(eq=False)
class FusionRule:
    """A fused kernel that software has: which ops it joins, when, and how well it runs.

    phase: "forward" (recomputed copies too), "backward", "step" (the optimizer) or "either" forward or backward. kernels: launches of the
    fused kernel; where a member is cut into pieces (one GEMM per expert, chunks of parameters), launches per piece.
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
        """Decorator: the rule with a further condition, which calls `m.reject(reason)` to refuse a match.

        Raises: PatternError for a function that does not take one argument.
        """
        if len(inspect.signature(function).parameters) != 1:
            raise PatternError(f"{_place(function)}: the check of rule {self.name!r} takes one argument, the match")
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
        if inspect.iscoroutinefunction(pattern) or inspect.isgeneratorfunction(pattern):
            raise PatternError(f"{_place(pattern)}: a rule is a plain function that returns what leaves the kernel")
        if not isinstance(name, str) or not name.isprintable():
            raise PatternError(f"{_place(pattern)}: {name!r} is no name for a rule; give printable text")
        rule = _record(pattern, name or pattern.__name__)
        return attrs.evolve(_checked(rule, phase, kernels, efficiency), source=source)

    return make if function is None else make(function)


def _place(function: Callable[..., object]) -> str:
    """File and line of a function."""
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"


def _record(pattern: Callable[..., object], name: str) -> FusionRule:
    where = _place(pattern)
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
    numbers = isinstance(kernels, int) and isinstance(efficiency, int | float)
    if not numbers or kernels < 1 or not LEAST_EFFICIENCY <= efficiency <= 1:
        raise PatternError(
            f"{rule.where}: rule {rule.name!r} needs a whole number of kernels, at least 1, and 0 < efficiency <= 1 ({LEAST_EFFICIENCY} or more)"
        )
    return attrs.evolve(rule, phase=phase, kernels=kernels, efficiency=efficiency)


def runs_in(rule: FusionRule, phase: Phase) -> bool:
    """Whether the rule is for ops of this phase."""
    return rule.phase == phase.value or (rule.phase == "either" and phase is not Phase.STEP)
