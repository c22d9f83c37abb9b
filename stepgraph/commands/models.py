"""`stepgraph models`."""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING

import click

from stepgraph.commands.options import JSON_OPTION

if TYPE_CHECKING:
    from stepgraph.lowering.model import Model


@click.command("models", epilog="\b\nExamples:\n  stepgraph models\n  stepgraph models --json")
@JSON_OPTION
def command(as_json: bool) -> None:
    """The model configurations that are carried, with their layers and parameter counts."""
    from stepgraph.lowering.huggingface import load_model, model_names

    rows = [_row(load_model(name)) for name in model_names()]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    from stepgraph.listings import show_models
    from stepgraph.lowering.familytable import FAMILIES

    show_models(rows, [family.model_type for family in FAMILIES])


def _row(model: Model) -> dict[str, object]:
    from stepgraph.lowering.lowering import count_parts
    from stepgraph.passes.modelflops import count_params

    params = count_params(count_parts(model, 1, 1))
    return {
        "name": model.name,
        "family": model.family,
        "params": params.total,
        "active": params.active,
        "layers": model.n_layers,
        "stack": stack_of(model),
        "hidden": model.hidden,
        "heads": model.layers[0].attention.heads,
        "vocab": model.vocab,
        "max_positions": model.max_positions,
        "dtype": model.dtype,
    }


def stack_of(model: Model) -> str:
    """The layers as a run-length list, `3 dense, 58 moe`; a repeating pattern is written once."""
    runs = [(name, len(list(group))) for name, group in groupby(model.template_names)]
    for period in range(1, len(runs) // 2 + 1):
        if len(runs) % period == 0 and runs == runs[:period] * (len(runs) // period):
            return f"{len(runs) // period} x ({_listed(runs[:period])})"
    return _listed(runs) if len(runs) <= 6 else f"{_listed(runs[:4])}, ..."


def _listed(runs: list[tuple[str, int]]) -> str:
    return ", ".join(f"{count} {name}" for name, count in runs)
