"""`stepgraph doctor`."""

from __future__ import annotations

import json
import platform
from importlib import metadata, util

import click

from stepgraph.commands.options import JSON_OPTION
from stepgraph.version import VERSION

NEEDED = ("networkx", "attrs", "numpy", "graphviz", "click", "rich")
OPTIONAL = {"pygraphviz": "pictures without a system Graphviz: pip install 'stepgraph[render]'"}


@click.command("doctor", epilog="\b\nExamples:\n  stepgraph doctor\n  stepgraph doctor --json")
@JSON_OPTION
def command(as_json: bool) -> None:
    """What is installed: versions, and the engine that would draw a picture. Exit code 1 when something is missing."""
    from stepgraph.rendering import engines

    found = {name: _version(name) for name in (*NEEDED, *OPTIONAL)}
    drawing = [str(engine) for engine in engines()]
    missing = [name for name in NEEDED if found[name] is None]
    if as_json:
        versions = {"stepgraph": VERSION, "python": platform.python_version(), **found}
        click.echo(json.dumps({"versions": versions, "engines": drawing, "missing": missing}, indent=2))
    else:
        _show(found, drawing)
    if missing:
        raise SystemExit(1)


def _version(name: str) -> str | None:
    if util.find_spec(name if name != "attrs" else "attr") is None:
        return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "installed, version unknown"


def _show(found: dict[str, str | None], drawing: list[str]) -> None:
    click.echo(f"stepgraph {VERSION}, Python {platform.python_version()}")
    for name, version in found.items():
        missing = f"missing ({OPTIONAL[name]})" if name in OPTIONAL else "MISSING: pip install stepgraph again"
        click.echo(f"  {name}: {version or missing}")
    if drawing:
        click.echo(f"pictures: {drawing[0]}" + (f" (also found: {', '.join(drawing[1:])})" if drawing[1:] else ""))
    else:
        click.echo("pictures: no engine; DOT and text only. pip install 'stepgraph[render]'")
