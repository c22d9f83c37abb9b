"""fuse: matches become kernels, in the order of the rules, and everything that was tried is reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

import attrs

from stepgraph.ir.graph import Graph, Group
from stepgraph.ir.op import Op
from stepgraph.ir.program import seam_name
from stepgraph.ir.rewriting import Rewrite
from stepgraph.passes.fusing.findings import Found, kinds_handed_over
from stepgraph.passes.fusing.legality import Reason, judge, notes_of
from stepgraph.passes.fusing.matching import NOWHERE, Matcher
from stepgraph.passes.fusing.pattern import FusionRule
from stepgraph.passes.fusing.taken import Taken

AnyRule = FusionRule | Rewrite


@attrs.frozen
class Site:
    """One place where a rule was tried: fused or refused, with reasons; `times` it stands for when rolled.

    `str()` says what became of it, as `explain` does.
    """

    rule: str
    op: str
    members: tuple[str, ...]
    reasons: tuple[Reason, ...] = ()
    notes: tuple[Reason, ...] = ()
    times: int = 1
    templates: tuple[str, ...] = ()  # one, or both sides of a seam

    @property
    def where(self) -> str:
        """The template, or the seam."""
        return seam_name(*self.templates) if len(self.templates) > 1 else "".join(self.templates)

    @property
    def is_fused(self) -> bool:
        """Whether it became a kernel."""
        return not self.reasons

    def __str__(self) -> str:
        members = ", ".join(self.members)
        if self.is_fused:
            return f"{self.rule} fuses at {self.op}: {members}" + "".join(f"; {note}" for note in self.notes)
        return f"{self.rule} matches at {self.op} ({members}) and is refused: " + "; ".join(map(str, self.reasons))


@attrs.frozen
class RuleReport:
    """What became of one rule, in sites as if every layer were written out."""

    name: str
    matched: int
    fused: int
    rejected: Mapping[str, int]
    notes: Mapping[str, int]


@attrs.frozen
class FusionReport:
    """Everything that was tried, rule by rule and site by site."""

    rules: tuple[RuleReport, ...]
    sites: tuple[Site, ...]

    def __str__(self) -> str:
        return "\n".join(_line(rule) for rule in self.rules)

    def to_json(self) -> list[dict[str, object]]:
        """One record per rule: name, matched, fused, rejected and notes by code."""
        return [
            {**attrs.asdict(rule), "rejected": dict(rule.rejected), "notes": dict(rule.notes)} for rule in self.rules
        ]


def _line(rule: RuleReport) -> str:
    parts = [f"{rule.name}: fused {rule.fused} of {rule.matched}"]
    if rule.rejected:
        parts.append("rejected " + ", ".join(f"{code} {count}" for code, count in rule.rejected.items()))
    if rule.notes:
        parts.append("still written " + ", ".join(f"{code} {count}" for code, count in rule.notes.items()))
    return "; ".join(parts)


def summarise(rules: Sequence[AnyRule], sites: Iterable[Site]) -> FusionReport:
    """Count sites rule by rule, in the order of the rules; rules of one name are counted together."""
    every = tuple(sites)
    return FusionReport(tuple(_count(name, every) for name in dict.fromkeys(rule.name for rule in rules)), every)


def _count(name: str, sites: Sequence[Site]) -> RuleReport:
    mine = [site for site in sites if site.rule == name]
    rejected: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    for site in mine:
        for code in dict.fromkeys(reason.code for reason in site.reasons):
            rejected[code] += site.times
        for code in dict.fromkeys(note.code for note in site.notes):
            notes[code] += site.times
    fused = sum(site.times for site in mine if site.is_fused)
    return RuleReport(name, sum(site.times for site in mine), fused, dict(rejected), dict(notes))


@attrs.define
class Bench:
    """A graph while kernels are made in it: which op is in which kernel, and the kernels that are new.

    graph: without the new kernels, so that what it knows about itself lasts. spanning: only matches with members on
    both sides of a seam count. handed_over, beyond: as for a matcher. heard: is told of every new kernel.
    repeated: both sides of the seam are the same template, so that an op may be taken on one of them only.
    """

    graph: Graph
    spanning: bool = False
    repeated: bool = False
    handed_over: frozenset[str] = frozenset()
    beyond: Mapping[str, frozenset[str]] = NOWHERE
    heard: Callable[[Group], None] | None = None
    taken: Taken = attrs.field(init=False)
    made: list[Group] = attrs.field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        self.taken = Taken(self.graph, self.graph.groups)

    def take(self, group: Group) -> None:
        """Make a kernel."""
        self.made.append(group)
        self.taken.add(group)
        if self.heard is not None:
            self.heard(group)

    @property
    def fused(self) -> Graph:
        """The graph with its new kernels; the same object where there are none."""
        return attrs.evolve(self.graph, groups=(*self.graph.groups, *self.made)) if self.made else self.graph


def fuse_graph(graph: Graph, rules: Sequence[AnyRule]) -> tuple[Graph, tuple[Site, ...]]:
    """Group the ops of every legal match, rule by rule; the same graph comes back when nothing fused."""
    bench = Bench(graph, handed_over=kinds_handed_over([graph]))
    sites = [site for rule in rules for site in try_rule(bench, rule)]
    return bench.fused, tuple(sites)


RELOWER = "replaces ops by others and fuses nothing: hand it to lower(..., rewrites=[...])"


def relower_site(rule: Rewrite) -> Site:
    """What is reported of a rewrite among the rules."""
    return Site(rule.name, "", (), (Reason("relower", rule.name, RELOWER),))


def try_rule(bench: Bench, rule: AnyRule) -> list[Site]:
    """Make the kernels of one rule; sites in program order of their results."""
    if isinstance(rule, Rewrite):
        return [relower_site(rule)]
    matcher = Matcher(bench.graph, rule, bench.handed_over, bench.beyond, bench.taken)
    seen: set[frozenset[str]] = set()
    fused: set[str] = set()
    sites: list[Site] = []
    for op in matcher.candidates():
        site = _try_at(bench, matcher, op, seen) if op.name not in fused else None
        if site is not None:
            sites.append(site)
            seen.add(frozenset(site.members))
            fused.update(site.members if site.is_fused else ())
    return sites


MOST_TRIED = 100
"""Matches that are tried at one op before the rule is given up there; symmetric rules have very many."""


def _try_at(bench: Bench, matcher: Matcher, op: Op, seen: set[frozenset[str]]) -> Site | None:
    """The first legal match at an op, made a kernel, or else the first illegal one, with its reasons.

    Symmetric rules find their ops once from each result: what was seen before is not reported again.
    """
    refused: Site | None = None
    is_known = False
    for found in islice(matcher.every(op), MOST_TRIED):
        members = frozenset(member.name for member in found.members)
        if bench.spanning and not _spans(found):
            continue
        if members in seen:
            is_known = True
            continue
        site = _settle(bench, matcher.rule, found)
        if site.is_fused:
            return site
        refused = refused or site
    return None if is_known else refused


def _spans(found: Found) -> bool:
    sides = {op.name.split(".", 1)[0] for op in found.members}
    return len(sides) > 1 or any(gap.code == "stage" for gap in found.gaps)


def _settle(bench: Bench, rule: FusionRule, found: Found) -> Site:
    members = tuple(op.name for op in found.members)
    reasons = judge(bench.graph, rule, found, bench.taken)
    if bench.repeated and len({name.split(".", 1)[1] for name in members}) < len(members):
        reasons = (*reasons, Reason("overlap", members[-1], "takes the same op of both layers"))
    if reasons:
        return Site(rule.name, members[-1], members, reasons)
    bench.take(Group(f"{members[-1]}@{rule.name}", rule.name, members, rule.kernels, rule.efficiency))
    return Site(rule.name, members[-1], members, (), notes_of(bench.graph, found))


def unfuse_graph(graph: Graph, *rules: str) -> Graph:
    """The graph without the kernels of the named rules, or without any; ops were never touched, so it is exact."""
    kept = tuple(group for group in graph.groups if rules and group.rule not in rules)
    return graph if kept == graph.groups else attrs.evolve(graph, groups=kept)


def explain(graph: Graph, rule: FusionRule, at: str) -> str:
    """Why a rule did or did not fuse at an op: the reasons, or the nearest miss.

    The op may make the rule's result or be any other member. Raises: KeyError, with a suggestion, when there is no op of
    that name.
    """
    op = graph[at]
    taken = Taken(graph, (group for group in graph.groups if group.rule != rule.name or at not in group.members))
    matcher = Matcher(graph, rule, taken=taken)
    refused: Site | None = None
    around = [found for root in matcher.candidates() if root is not op for found in _with(matcher, root, op)]
    for found in (*islice(matcher.every(op), MOST_TRIED), *around):
        reasons = judge(graph, rule, found, taken)
        site = Site(rule.name, at, tuple(op.name for op in found.members), reasons, notes_of(graph, found))
        if site.is_fused:
            return str(site)
        refused = refused or site
    if refused is not None:
        return str(refused)
    next(matcher.every(op), None)  # the miss of this op, not of the last one tried
    return f"{rule.name} does not match at {at}: {matcher.miss.op} {matcher.miss.reason}"


def _with(matcher: Matcher, root: Op, op: Op) -> list[Found]:
    """Matches from a root that have the op as another member."""
    return [found for found in islice(matcher.every(root), MOST_TRIED) if any(member is op for member in found.members)]
