"""`stepgraph ops`."""

from __future__ import annotations

import json

import click

from stepgraph.commands.options import JSON_OPTION
from stepgraph.errors import did_you_mean, refuse


@click.command("ops", epilog="\b\nExamples:\n  stepgraph ops\n  stepgraph ops rmsnorm_dx\n  stepgraph ops --json")
@click.argument("kinds", nargs=-1)
@JSON_OPTION
def command(kinds: tuple[str, ...], as_json: bool) -> None:
    """The op table: what each kind computes, and how both profiles execute it, with sources."""
    from stepgraph.ir.table import TABLE
    from stepgraph.optable import op_table

    for kind in kinds:
        if kind not in TABLE:
            raise refuse("kind", "KINDS", f"no op kind {kind!r}", fix=did_you_mean(kind, TABLE))
    lines = op_table(kinds or tuple(TABLE))
    if as_json:
        click.echo(json.dumps(lines, indent=2))
        return
    from stepgraph.listings import show_ops

    show_ops(lines, sources=bool(kinds))
