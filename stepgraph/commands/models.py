"""`stepgraph models`."""

from __future__ import annotations

import json

import click

from stepgraph.commands.options import JSON_OPTION


@click.command("models", epilog="\b\nExamples:\n  stepgraph models\n  stepgraph models --json")
@JSON_OPTION
def command(as_json: bool) -> None:
    """The model configurations that are carried, with their shapes and parameter counts."""
    from stepgraph.lowering.huggingface import load_model, model_names
    from stepgraph.lowering.lowering import count_parts
    from stepgraph.passes.modelflops import count_params

    models = [load_model(name) for name in model_names()]
    rows: list[dict[str, object]] = [
        {
            "name": model.name,
            "family": model.family,
            "params": count_params(count_parts(model, 1, 1)).total,
            "layers": model.n_layers,
            "hidden": model.hidden,
            "heads": model.layers[0].attention.heads,
            "kv_heads": model.layers[0].attention.kv_heads,
            "ffn": model.layers[0].mlp.ffn,
            "vocab": model.vocab,
            "max_positions": model.max_positions,
            "dtype": model.dtype,
        }
        for model in models
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    from stepgraph.tables import show_models

    show_models(rows)
