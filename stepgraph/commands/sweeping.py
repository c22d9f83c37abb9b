"""The option `predict --sweep-micro-batch`, and what it does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from stepgraph.commands.options import rule_faults
from stepgraph.errors import refuse
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.model import Model

if TYPE_CHECKING:
    from stepgraph.passes.base import Setting
    from stepgraph.passes.fusing.grouping import AnyRule

OPTION = "--sweep-micro-batch"
DEFAULT = "1,2,4,8"


def _sizes(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """The sizes of a list. Raises: InputError (sweep-sizes)."""
    if text is None:
        return None
    from stepgraph.sweep import checked_sizes

    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        fix = f"leave the list out at the end of the line, or write {OPTION}={DEFAULT}"
        raise refuse("sweep-sizes", OPTION, f"{text[:40]!r} is no list of sizes", f"sizes as in {DEFAULT}", fix)
    return checked_sizes([int(word) for word in words])


sweep_option = click.option(
    OPTION,
    "sweep_sizes",
    is_flag=False,
    flag_value=DEFAULT,
    callback=_sizes,
    metavar="[SIZES]",
    help=f"Compare micro-batch sizes, per micro-batch; stands behind CONFIG.  [sizes: {DEFAULT}]",
)
"""The option: alone, or with sizes."""


def sweep_command(
    model: Model,
    layout: Layout,
    machine: Setting,
    sizes: tuple[int, ...],
    rules: tuple[AnyRule, ...],
    *,
    as_json: bool,
) -> None:
    """Sweep and print."""
    from stepgraph.sweeprun import sweep_under

    with rule_faults(rules):
        found = sweep_under(model, layout, machine, sizes, rules, _say)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2, allow_nan=False))
        return
    from stepgraph.commands.sweeptables import show_sweep

    show_sweep(found)


def refuse_contradictions(context: click.Context) -> None:
    """Raises: InputError (sweep-option) for options that say what a sweep decides."""
    given = click.core.ParameterSource.COMMANDLINE
    for name, why in (("micro_batch", "the sweep sets it"), ("rank", "the sweep shows the slowest one")):
        if context.get_parameter_source(name) is given:
            option = f"--{name.replace('_', '-')}"
            raise refuse("sweep-option", option, why, "", f"leave out {option} or {OPTION}")


def _say(text: str) -> None:
    click.echo(f"sweep: {text}", err=True)
