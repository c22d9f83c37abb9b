"""`stepgraph graph`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepgraph.commands.options import (
    COST_OPTIONS,
    LAYOUT_OPTIONS,
    MODEL_OPTIONS,
    fusions_option,
    layout_from,
    model_from,
    options,
    rule_faults,
    rules_from,
    target_from,
)
from stepgraph.errors import did_you_mean, refuse, together
from stepgraph.ir.drawing import MOST_OPS

if TYPE_CHECKING:
    from stepgraph.ir.graph import Graph
    from stepgraph.ir.program import Program
    from stepgraph.lowering.layout import Layout
    from stepgraph.passes.base import Setting
    from stepgraph.passes.costing import Costs
    from stepgraph.passes.fusing.grouping import AnyRule

EPILOG = """\b
Examples:
  stepgraph graph llama-3-8b --tp 8 -o layer.svg       a layer as a picture, with costs
  stepgraph graph llama-3-8b --tp 8                    the same as text
  stepgraph graph llama-3-8b --template head --no-costs
  stepgraph graph llama-3-8b --pp 8 --stage 0          a whole stage, written out
  stepgraph graph llama-3-8b --fusions basic -o fused.svg   with fused kernels
  stepgraph graph llama-3-8b --list                    which templates and stages there are
"""


@click.command("graph", epilog=EPILOG)
@options(MODEL_OPTIONS, LAYOUT_OPTIONS, COST_OPTIONS)
@fusions_option("none")
@click.option("--template", help="Which template: embedding, dense, head, step, ...  [default: the first layer's]")
@click.option("--stage", type=int, help="A pipeline stage with all its layers, instead of a template.")
@click.option("--list", "list_only", is_flag=True, help="List templates and stages.")
@click.option("--costs/--no-costs", default=True, show_default=True, help="Write the cost of every op.")
@click.option("--max-ops", type=int, default=MOST_OPS, show_default=True, help="Larger graphs are not drawn.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Picture or text file: svg png pdf dot txt.")
def command(
    config: str,
    overrides: tuple[str, ...],
    target: str,
    profile: str,
    eta: str,
    fusions: str,
    template: str | None,
    stage: int | None,
    list_only: bool,
    costs: bool,
    max_ops: int,
    output: Path | None,
    **layout: Any,
) -> None:
    """The op graph of one layer (or another template, or a whole stage), forward facing backward.

    Without -o the graph is printed as text, one op per line.
    """
    from stepgraph.lowering.lowering import lower
    from stepgraph.lowering.mtpchecks import mtp_warnings
    from stepgraph.passes.base import software
    from stepgraph.passes.costing import costs as cost_pass
    from stepgraph.passes.seating import seat

    model, chosen_layout, machine, runs, rules = together(
        lambda: model_from(config, overrides),
        lambda: layout_from(layout),
        lambda: target_from(target),
        lambda: software(profile, eta),
        lambda: rules_from(fusions),
    )
    program = _fused(lower(model, chosen_layout), rules)
    chosen_setting = seat(runs.on(machine), program)
    for text in (*model.warnings, *mtp_warnings(chosen_layout, model)):
        click.echo(f"warning: {text}", err=True)
    if list_only:
        _list(program)
        return
    graph = _choose(program, template, stage, model.template_names[0])
    cost = cost_pass(graph, chosen_setting) if costs else None
    _write(graph, cost, output, _title(graph, program, chosen_layout, chosen_setting), max_ops)


def _fused(program: Program, rules: tuple[AnyRule, ...]) -> Program:
    if not rules:
        return program
    from stepgraph.soundfusing import fuse_soundly

    with rule_faults(rules):
        return fuse_soundly(program, rules)[0]


def _title(graph: Graph, program: Program, layout: Layout, chosen: Setting) -> str:
    sizes = (f"{name} {getattr(layout, name)}" for name in ("tp", "cp", "ep", "etp", "pp", "dp"))
    kept = [size for size in sizes if not size.endswith(" 1")] or ["one rank"]
    seq = f", seq {layout.seq}" if layout.seq else ""
    where = f"{chosen.target.name}, {', '.join(kept)}, micro-batch {layout.micro_batch}{seq}"
    return f"{program.name}: {graph.name} on {where} ({chosen.profile.name} profile, {chosen.eta} eta)"


def _list(program: Program) -> None:
    from stepgraph.ir.program import shown_runs
    from stepgraph.lowering.resolution import uneven_stages_note
    from stepgraph.lowering.stages import layers_per_stage

    for graph in program.templates:
        click.echo(f"{graph.name}: {len(graph.ops)} ops")
    ranks = 1 + max(stage.rank for stage in program.stages)
    for index, stage in enumerate(program.stages):
        chunk = index // ranks
        place = f" (rank {stage.rank}, chunk {chunk})" if len(program.stages) > ranks else ""
        step = f" | {stage.step}" if chunk == 0 else ""  # once per rank, for the parameters of all its chunks
        click.echo(f"stage {index}{place}: {shown_runs(stage.runs)}{step}")
    uneven = uneven_stages_note(layers_per_stage(program))
    if uneven:
        click.echo(f"warning: {uneven}", err=True)


def _choose(program: Program, template: str | None, stage: int | None, usual: str) -> Graph:
    if stage is not None and template is not None:
        raise refuse("template-or-stage", "--stage", "--template and --stage were both given", "one of them")
    if stage is not None:
        if not 0 <= stage < len(program.stages):
            raise refuse("stage", "--stage", f"there is no stage {stage}", f"0 to {len(program.stages) - 1}")
        return program.unroll(stage)
    name = usual if template is None else template
    if name == "step":
        name = program.stages[0].step
    if name not in program.by_name:
        known = ", ".join(program.by_name)
        raise refuse("template", "--template", f"no template {name!r}", known, did_you_mean(name, program.by_name))
    return program[name]


def _write(graph: Graph, cost: Costs | None, output: Path | None, title: str, max_ops: int) -> None:
    from stepgraph.ir.text import dump
    from stepgraph.opnotes import cost_columns, op_notes

    if output is None:
        click.echo(dump(graph, cost_columns(cost) if cost else None), nl=False)
        return
    from stepgraph.ir.drawing import to_dot
    from stepgraph.rendering import render, suffix_of, write_text

    if suffix_of(output) == "txt":
        engine = write_text(dump(graph, cost_columns(cost) if cost else None), output)
    else:
        limit = len(graph.ops) if suffix_of(output) == "dot" else max_ops  # text needs no layout
        engine = render(to_dot(graph, notes=op_notes(cost) if cost else None, title=title, max_ops=limit), output)
    click.echo(f"{output}: {len(graph.ops)} ops ({engine})", err=True)
