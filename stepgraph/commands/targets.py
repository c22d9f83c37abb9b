"""`stepgraph targets`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from stepgraph.commands.options import JSON_OPTION

if TYPE_CHECKING:
    from stepgraph.hwtargets.target import Figure


@click.command(
    "targets",
    epilog="\b\nExamples:\n  stepgraph targets\n  stepgraph targets h100\n  stepgraph targets my-target.toml --json",
)
@click.argument("name", required=False)
@JSON_OPTION
def command(name: str | None, as_json: bool) -> None:
    """The hardware targets; with a NAME (or a TOML file), every figure of one and where it comes from."""
    from stepgraph.hwtargets.reading import load_target, target_names

    chosen = [load_target(name)] if name else [load_target(known) for known in target_names()]
    if as_json:
        found = [
            {"name": t.name, "title": t.title, "figures": {key: _figure(figure) for key, figure in t.figures()}}
            for t in chosen
        ]
        click.echo(json.dumps(found[0] if name else found, indent=2))
        return
    from stepgraph.listings import show_target, show_targets

    if name:
        show_target(chosen[0])
    else:
        show_targets(chosen)


def _figure(figure: Figure) -> dict[str, object]:
    """A figure as JSON has it: the open end of a table of break points is null, since JSON knows no infinity."""
    value: object = figure.value
    if isinstance(figure.value, tuple):
        value = [[None if bound == float("inf") else bound, number] for bound, number in figure.value]
    return {"value": value, "source": figure.source, "status": figure.status}
