"""`--require` and `--forbid`: what has to have fused, or must not, so that a script can hold on to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import attrs

from stepgraph.commands.fusionrun import FusionRun
from stepgraph.errors import InputError, Problem, did_you_mean, refuse, together
from stepgraph.ir.joining import LEFT, RIGHT
from stepgraph.ir.program import Program
from stepgraph.ir.table import TABLE
from stepgraph.passes.fusing.grouping import AnyRule
from stepgraph.passes.fusing.programs import seam_counts, template_counts

SHOWN = 4
"""How many places or reasons a message lists."""


@attrs.frozen
class Demand:
    """A rule that has to fuse at least `least` times."""

    rule: str
    least: int


def demands_from(texts: Sequence[str], rules: Sequence[AnyRule]) -> tuple[Demand, ...]:
    """The demands of --require options. Raises: InputError, for all of them together."""
    return tuple(together(*(partial(_demand, text, rules) for text in texts)))


def _demand(text: str, rules: Sequence[AnyRule]) -> Demand:
    name, _, number = text.partition("=")
    if not (number.isascii() and number.isdigit()):
        raise refuse("require", "--require", f"{text!r} is no demand", "RULE=COUNT, as in add_rmsnorm=64")
    return Demand(known_rule(name, rules, "--require").name, int(number))


def known_rule(name: str, rules: Sequence[AnyRule], option: str) -> AnyRule:
    """The rule of that name. Raises: InputError with a suggestion."""
    known = {rule.name: rule for rule in rules}
    if name not in known:
        fix = did_you_mean(name, known) if known else "name rules with --fusions"
        raise refuse("rule", option, f"no rule {name!r} among those of --fusions", fix=fix)
    return known[name]


def bans_from(names: Sequence[str], rules: Sequence[AnyRule]) -> tuple[str, ...]:
    """The names of --forbid options: rules of --fusions, or op kinds. Raises: InputError, for all of them together."""
    known = {*(rule.name for rule in rules), *TABLE}
    problems = [
        Problem("forbid", "--forbid", f"{name!r} is neither a rule of --fusions nor an op kind", "", _fix(name, known))
        for name in names
        if name not in known
    ]
    if problems:
        raise InputError(problems)
    return tuple(names)


def _fix(name: str, known: set[str]) -> str:
    return did_you_mean(name, known, "`stepgraph ops` lists the kinds")


def failures(run: FusionRun, demands: Sequence[Demand], bans: Sequence[str]) -> tuple[Problem, ...]:
    """Every demand and every ban that does not hold."""
    fused = {rule.name: rule.fused for rule in run.after.report.rules}
    short = [_short(run, demand) for demand in demands if fused[demand.rule] < demand.least]
    found = [problem for name in bans if (problem := _banned(run, name, fused)) is not None]
    return (*short, *found)


def _short(run: FusionRun, demand: Demand) -> Problem:
    rule = next(rule for rule in run.after.report.rules if rule.name == demand.rule)
    what = f"fused {rule.fused} times" if rule.matched else "fused nowhere: the pattern is nowhere to be found"
    if rule.rejected:
        counts = ", ".join(f"{code} {count}" for code, count in rule.rejected.items())
        what += f" of {rule.matched} matches, rejected: {counts} ({'; '.join(_reasons(run, demand.rule))})"
    fix = "" if "relower" in rule.rejected else f"`--explain {demand.rule}@OP` tells the nearest miss at an op"
    return Problem("require", f"--require {demand.rule}={demand.least}", what, f"at least {demand.least}", fix)


def _reasons(run: FusionRun, rule: str) -> list[str]:
    reasons = [str(r) for site in run.after.report.sites if site.rule == rule for r in site.reasons]
    return _listed(list(dict.fromkeys(reasons)))


def _listed(texts: list[str]) -> list[str]:
    return texts if len(texts) <= SHOWN else [*texts[:SHOWN], f"and {len(texts) - SHOWN} more"]


def _banned(run: FusionRun, name: str, fused: dict[str, int]) -> Problem | None:
    """A rule that fused, or a kind with ops outside every kernel."""
    if name in fused:
        what = f"the rule fused {fused[name]} times ({', '.join(_places(run, name))})"
        return Problem("forbid", f"--forbid {name}", what, "never") if fused[name] else None
    loose = tuple(unfused(run.after.program, name))
    if not loose:
        return None
    where = ", ".join(_listed([f"{op} {left} of {times}" for op, left, times in loose]))
    what = f"{sum(left for _, left, _ in loose)} outside every fused kernel: {where}"
    return Problem("forbid", f"--forbid {name}", what, "none")


def _places(run: FusionRun, rule: str) -> list[str]:
    return _listed([f"{k.where}: {' + '.join(k.members)}" for k in run.kernels if k.rule == rule])


def unfused(program: Program, kind: str) -> Iterator[tuple[str, int, int]]:
    """Ops of a kind outside every kernel, as `template/op`, how many of them, and how many there are of it in all."""
    counts, inside = template_counts(program), dict(_in_seams(program))
    for graph in program.templates:
        times = counts[graph.name]
        for op in graph.ops:
            left = times - sum(inside.get((graph.name, op.name), ()))
            if op.kind == kind and op.name not in graph.group_of and left > 0:
                yield f"{graph.name}/{op.name}", left, times


def _in_seams(program: Program) -> dict[tuple[str, str], list[int]]:
    """How often each op of a template is in a kernel across a seam."""
    found: dict[tuple[str, str], list[int]] = {}
    for (left, right), times in seam_counts(program).items():
        for name in (name for group in program.groups_between(left, right) for name in group.members):
            key = (left, name.removeprefix(LEFT)) if name.startswith(LEFT) else (right, name.removeprefix(RIGHT))
            found.setdefault(key, []).append(times)
    return found
