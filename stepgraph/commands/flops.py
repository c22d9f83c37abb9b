"""`stepgraph flops`."""

from __future__ import annotations

import json

import attrs
import click

from stepgraph.commands.options import JSON_OPTION, MODEL_OPTIONS, model_from, options

EPILOG = """\b
Examples:
  stepgraph flops llama-3-8b --seq 4096
  stepgraph flops config.json --seq 4100 --micro-batch 2 --attention full --json
"""


@click.command("flops", epilog=EPILOG)
@options(MODEL_OPTIONS)
@click.option("--seq", type=int, help="Tokens per sequence.  [default: 4096 or the model's limit]")
@click.option("--micro-batch", type=int, default=1, show_default=True, help="Sequences.")
@click.option(
    "--attention",
    type=click.Choice(["causal", "full"]),
    default="causal",
    show_default=True,
    help="Count half of the attention square, or all of it, also where the model has windows.",
)
@JSON_OPTION
def command(
    config: str, overrides: tuple[str, ...], seq: int | None, micro_batch: int, attention: str, as_json: bool
) -> None:
    """Parameters and matmul FLOPs of the whole model, by family; backward is twice forward."""
    from stepgraph.lowering.layout import Layout
    from stepgraph.lowering.lowering import count_parts
    from stepgraph.lowering.resolution import resolve_layout
    from stepgraph.passes.modelflops import count_flops, count_params

    model = model_from(config, overrides)
    layout, _ = resolve_layout(Layout(seq=seq, micro_batch=micro_batch), model)
    assert layout.seq is not None  # resolved
    seq, parts = layout.seq, count_parts(model, micro_batch, layout.seq)
    params, families = count_params(parts), count_flops(parts, attention=attention)
    if as_json:
        found = {name: attrs.asdict(family) for name, family in families.items()}
        what = {"model": model.name, "seq": seq, "micro_batch": micro_batch, "attention": attention}
        click.echo(json.dumps({**what, "params": attrs.asdict(params), "families": found}, indent=2))
        return
    from stepgraph.tables import show_flops

    show_flops(model, params, families, seq, micro_batch, attention)
