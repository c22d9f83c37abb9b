"""`stepgraph predict`."""

from __future__ import annotations

import json
from typing import Any

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
    rule_faults,
    rules_from,
    target_from,
)
from stepgraph.commands.sweeping import refuse_contradictions, sweep_command, sweep_option
from stepgraph.errors import together

EPILOG = """\b
Examples:
  stepgraph predict llama-3-8b --target h100
  stepgraph predict llama-3-70b --gpus 64 --tp 8 --pp 8 --global-batch 128 --target h200
  stepgraph predict config.json --set num_hidden_layers=4 --recompute full --json
  stepgraph predict llama-3-8b --fusions basic
  stepgraph predict llama-3-70b --gpus 64 --tp 8 --pp 4 --vpp 4 --global-batch 64 --overlap megatron
  stepgraph predict llama-3-70b --gpus 64 --tp 8 --pp 8 --global-batch 128 --sweep-micro-batch
"""


@click.command("predict", epilog=EPILOG)
@options(MODEL_OPTIONS, LAYOUT_OPTIONS, COST_OPTIONS, RUN_OPTIONS)
@fusions_option("none")
@click.option("--rank", type=int, help="Whose time to break down.  [default: a rank of the slowest stage]")
@click.option("--check", is_flag=True, help="Verify every graph first.")
@sweep_option
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
    rank: int | None,
    check: bool,
    sweep_sizes: tuple[int, ...] | None,
    as_json: bool,
    **layout: Any,
) -> None:
    """Predict one training step: its time, where it goes, MFU and warnings.

    CONFIG is a Hugging Face config.json or the name of a carried one (see `stepgraph models`).
    """
    from stepgraph.passes.base import software
    from stepgraph.prediction import predict_under

    if sweep_sizes:
        refuse_contradictions(click.get_current_context())
    model, chosen, machine, runs, rules = together(
        lambda: model_from(config, overrides),
        lambda: layout_from(layout),
        lambda: target_from(target),
        lambda: software(profile, eta, launch, cuda_graphs=cuda_graphs, overlap=overlap, p2p=p2p_mode),
        lambda: rules_from(fusions),
    )
    if check:
        _verify(model, chosen)
    if sweep_sizes:
        sweep_command(model, chosen, runs.on(machine), sweep_sizes, rules, as_json=as_json)
        return
    with rule_faults(rules):
        prediction = predict_under(model, chosen, runs.on(machine), rules, rank)
    if as_json:
        click.echo(json.dumps(prediction.to_json(), indent=2, allow_nan=False))
        return
    from stepgraph.tables import show_prediction

    show_prediction(prediction)


def _verify(model: Any, layout: Any) -> None:
    from stepgraph.ir.verifier import verify_program
    from stepgraph.lowering.lowering import lower

    verify_program(lower(model, layout))
    click.echo("every graph verifies", err=True)
