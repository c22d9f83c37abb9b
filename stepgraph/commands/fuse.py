"""`stepgraph fuse`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

import click

from stepgraph.commands.options import (
    COST_OPTIONS,
    JSON_OPTION,
    LAYOUT_OPTIONS,
    MODEL_OPTIONS,
    RUN_OPTIONS,
    fusions_option,
    layout_from,
    model_from,
    options,
    rules_from,
    target_from,
)
from stepgraph.errors import refuse, together

if TYPE_CHECKING:
    from stepgraph.commands.fusionanswers import Answer
    from stepgraph.commands.fusionrun import FusionRun

EPILOG = """\b
Examples:
  stepgraph fuse llama-3-8b                                       what the basic rules bring
  stepgraph fuse llama-3-8b --savings                             and tensor by tensor, why
  stepgraph fuse llama-3-8b --fusions my_rules.py --against basic
  stepgraph fuse llama-3-8b --fusions basic,my_rules.py:add_norm+other
  stepgraph fuse llama-3-8b --explain add_rmsnorm@attn.norm       why (not) at this op
  stepgraph fuse llama-3-8b --require add_rmsnorm=64 --forbid rope
  stepgraph fuse llama-3-8b --svg layer.svg                       before and after, side by side
"""
PATIENCE_S = 2.0


@click.command("fuse", epilog=EPILOG)
@options(MODEL_OPTIONS, LAYOUT_OPTIONS, COST_OPTIONS, RUN_OPTIONS)
@fusions_option("basic")
@click.option("--against", default="none", show_default=True, metavar="SET|FILE", help="Rules of the other side.")
@click.option(
    "--require", "required", multiple=True, metavar="RULE=N", help="Exit with 1 unless it fused N times; repeatable."
)
@click.option(
    "--forbid",
    "forbidden",
    multiple=True,
    metavar="KIND|RULE",
    help="Exit with 1 if an op of the kind is left outside every kernel, or if the rule fused; repeatable.",
)
@click.option(
    "--explain", "asked", metavar="RULE@OP", help="Say why a rule fused or not at an op (or template/op), and no more."
)
@click.option("--savings", is_flag=True, help="List what every kernel no longer reads and writes.")
@click.option("--svg", type=click.Path(path_type=Path), help="Draw a layer before and after, side by side.")
@click.option("--template", help="What --svg draws: a template, or a seam as left+right.  [default: the first layer's]")
@JSON_OPTION
def command(
    config: str,
    overrides: tuple[str, ...],
    target: str,
    profile: str,
    eta: str,
    launch: str,
    cuda_graphs: bool,
    overlap: str,
    p2p_mode: str,
    fusions: str,
    against: str,
    required: tuple[str, ...],
    forbidden: tuple[str, ...],
    asked: str | None,
    savings: bool,
    svg: Path | None,
    template: str | None,
    as_json: bool,
    **layout: Any,
) -> None:
    """Fused against unfused: kernels, HBM traffic and time, rule by rule, with the reason of every refusal.

    A rule file is Python that runs when you name it, and only then. Exit code 1 when --require or --forbid fails.
    """
    from stepgraph.commands.fusionchecks import bans_from, demands_from
    from stepgraph.commands.fusionrun import run_fusions
    from stepgraph.passes.base import software

    if template is not None and svg is None:
        raise refuse("template", "--template", "nothing is drawn", "--svg FILE", "leave it out or add --svg")
    model, chosen, machine, runs, rules, others = together(
        lambda: model_from(config, overrides),
        lambda: layout_from(layout),
        lambda: target_from(target),
        lambda: software(profile, eta, launch, cuda_graphs=cuda_graphs, overlap=overlap, p2p=p2p_mode),
        lambda: rules_from(fusions),
        lambda: rules_from(against),
    )
    demands, bans = together(lambda: demands_from(required, rules), lambda: bans_from(forbidden, rules))
    with patience(f"fusing {model.name} ..."):
        run = run_fusions(model, chosen, runs.on(machine), (fusions, rules), (against, others))
    said = _answers(run, asked)
    if svg is not None:
        _draw(run, svg, template)
    _print(run, said, savings=savings, as_json=as_json)
    _check(run, demands, bans)


@contextmanager
def patience(text: str) -> Iterator[None]:
    """Say what is being done where it takes long and somebody is watching."""
    timer = Timer(PATIENCE_S, lambda: click.echo(text, err=True))
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _answers(run: FusionRun, asked: str | None) -> tuple[Answer, ...]:
    if asked is None:
        return ()
    from stepgraph.commands.fusionanswers import answers, question_from

    program = run.after.program
    return answers(question_from(asked, run.after.rules, program), program, run.after.report)


def _draw(run: FusionRun, svg: Path, template: str | None) -> None:
    from stepgraph.commands.fusionpictures import draw, drawn_part

    part = drawn_part(run.after.program, template)
    click.echo(f"{svg}: {part} before and after ({draw(run, part, svg)})", err=True)


def _print(run: FusionRun, said: Sequence[Answer], *, savings: bool, as_json: bool) -> None:
    if as_json:
        asked = {"explain": [{"where": a.where, "times": a.times, "text": a.text} for a in said]} if said else {}
        click.echo(json.dumps({**run.to_json(), **asked}, indent=2, allow_nan=False))
        return
    if said:
        for answer in said:
            click.echo(str(answer))
        return
    from stepgraph.commands.fusiontables import show_fusions

    show_fusions(run, savings=savings)


def _check(run: FusionRun, demands: Sequence[Any], bans: Sequence[str]) -> None:
    """Say what does not hold, and exit with 1."""
    from stepgraph.commands.fusionchecks import failures

    problems = failures(run, demands, bans)
    for problem in problems:
        click.echo(f"error: {problem}", err=True)
    if problems:
        raise SystemExit(1)
