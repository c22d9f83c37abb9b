"""`--explain RULE@OP`: why a rule did or did not fuse with its result at an op, in its layer and across seams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from stepgraph.commands.fusionchecks import known_rule
from stepgraph.commands.options import rule_faults
from stepgraph.errors import did_you_mean, refuse
from stepgraph.ir.joining import LEFT, RIGHT
from stepgraph.ir.program import Program, seam_graph, seam_name
from stepgraph.ir.rewriting import Rewrite
from stepgraph.passes.fusing.grouping import AnyRule, FusionReport, Site, explain, relower_site
from stepgraph.passes.fusing.matching import Matcher
from stepgraph.passes.fusing.pattern import FusionRule
from stepgraph.passes.fusing.programs import seam_counts, template_counts


@attrs.frozen
class Answer:
    """What there is to say about one place: a template, or the seam `left -> right`, and how often it occurs."""

    where: str
    times: int
    text: str

    def __str__(self) -> str:
        return f"{self.where} ({self.times} {'time' if self.times == 1 else 'times'}): {self.text}"


@attrs.frozen
class Question:
    """A rule, and the templates with the op at which its result is looked for."""

    rule: AnyRule
    op: str
    templates: tuple[str, ...]


def question_from(text: str, rules: Sequence[AnyRule], program: Program) -> Question:
    """What an --explain option asks: RULE@OP, the op alone or as `template/op`.

    Raises: InputError, with a suggestion, for an unknown rule, template or op.
    """
    name, at, place = text.partition("@")
    if not (name and at and place):
        raise refuse("explain", "--explain", f"{text!r} is no question", "RULE@OP, as in add_rmsnorm@mlp.norm")
    rule = known_rule(name, rules, "--explain")
    template, slash, op = place.rpartition("/")
    if slash and template not in program.by_name:
        fix = did_you_mean(template, program.by_name)
        raise refuse("explain", "--explain", f"no template {template!r}", fix=fix)
    counts = template_counts(program)
    graphs = [program[template]] if slash else [graph for graph in program.templates if counts[graph.name]]
    found = tuple(graph.name for graph in graphs if op in graph.by_name)
    if not found:
        known = {name for graph in graphs for name in graph.by_name}
        fix = did_you_mean(op, known, "`stepgraph graph CONFIG --template T` lists the ops of a template")
        raise refuse("explain", "--explain", f"no op {op!r}", fix=fix)
    return Question(rule, op, found)


def answers(question: Question, program: Program, report: FusionReport) -> tuple[Answer, ...]:
    """What became of the sites that have the op; where there are none, the nearest miss of every template and seam."""
    tried = tuple(found for site in report.sites if (found := _told(question, site)) is not None)
    known = {answer.where for answer in tried}
    return (*tried, *(answer for answer in _missed(question, program) if answer.where not in known))


def _missed(question: Question, program: Program) -> tuple[Answer, ...]:
    rule, counts = question.rule, template_counts(program)
    if isinstance(rule, Rewrite):
        text = str(relower_site(rule).reasons[0])
        return tuple(Answer(name, counts[name], text) for name in question.templates)
    with rule_faults([rule]):
        return tuple(answer for name in question.templates for answer in _answers(rule, question.op, name, program))


def _told(question: Question, site: Site) -> Answer | None:
    """What became of a site, if it is of the rule and has the op in one of the templates that were asked for."""
    if site.rule != question.rule.name or not site.templates:
        return None
    prefixes = (LEFT, RIGHT) if len(site.templates) > 1 else ("",)
    sides = zip(prefixes, site.templates, strict=True)
    names = [side + question.op for side, template in sides if template in question.templates]
    at = next((member for member in site.members if member in names), None)
    return None if at is None else Answer(site.where, site.times, str(attrs.evolve(site, op=at)))


def _answers(rule: FusionRule, op: str, template: str, program: Program) -> Iterator[Answer]:
    graph = program[template]
    matcher = Matcher(graph, rule)
    inside = Answer(template, template_counts(program)[template], explain(graph, rule, op))
    across = () if matcher.at(graph[op]) else tuple(_across(rule, op, template, program, inside.text))
    yield from across or (inside,)


def _across(rule: FusionRule, op: str, template: str, program: Program, inside: str) -> Iterator[Answer]:
    """What the seams say beyond the layer itself: a match, or another miss."""
    for (left, right), times in seam_counts(program).items():
        for side, neighbour in ((RIGHT, right), (LEFT, left)):
            if neighbour != template:
                continue
            text = explain(seam_graph(program, left, right), rule, side + op)
            if text.replace(LEFT, "").replace(RIGHT, "") != inside:
                yield Answer(seam_name(left, right), times, text)
