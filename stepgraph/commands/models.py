"""`stepgraph models`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from stepgraph.commands.options import JSON_OPTION

if TYPE_CHECKING:
    from stepgraph.lowering.model import Model


@click.command("models", epilog="\b\nExamples:\n  stepgraph models\n  stepgraph models --json")
@JSON_OPTION
def command(as_json: bool) -> None:
    """The model configurations that are carried, with their shapes and parameter counts."""
    from stepgraph.lowering.huggingface import load_model, model_names

    models = [load_model(name) for name in model_names()]
    rows: list[dict[str, object]] = [
        {
            "name": model.name,
            "family": model.family,
            "params": _params(model),
            "layers": model.n_layers,
            "hidden": model.hidden,
            "heads": model.layers[0].attention.heads,
            "kv_heads": getattr(model.layers[0].attention, "kv_heads", None),
            "ffn": _ffn(model),
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


def _params(model: Model) -> int | None:
    """None while some of the model's layers are not lowered to ops: parameters are counted on lowered tensors."""
    from stepgraph.errors import InputError
    from stepgraph.lowering.lowering import count_parts
    from stepgraph.passes.modelflops import count_params

    try:
        return count_params(count_parts(model, 1, 1)).total
    except InputError:
        return None


def _ffn(model: Model) -> int:
    """Inner width of the first layer: of its MLP, or of one expert."""
    from stepgraph.lowering.model import Experts

    part = model.layers[0].mlp
    return part.expert.ffn if isinstance(part, Experts) else part.ffn
