"""`stepgraph pipeline`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepgraph.commands.options import JSON_OPTION
from stepgraph.errors import refuse, together

if TYPE_CHECKING:
    from stepgraph.commands.pipelinerun import Ask

EPILOG = """\b
Examples:
  stepgraph pipeline                                        1F1B, 4 ranks, 8 micro-batches, backward twice forward
  stepgraph pipeline --schedule all --p2p 0.1               every schedule with the same times, the fastest first
  stepgraph pipeline --schedule zbv --pp 8 --micro-batches 32 --json
  stepgraph pipeline --schedule interleaved --vpp 2 --mode blocking --p2p 0.1 -o pipeline.svg
  stepgraph pipeline --schedule dualpipev --mode joint:0.8  a forward and a backward as one op, at 80% of both
  stepgraph pipeline --schedule my_order.csv -o mine.svg    your own order, in torch's CSV form
  stepgraph pipeline --pp 16 --micro-batches 64 --jitter 0.1
"""

SCHEDULE_HELP = "gpipe, 1f1b, interleaved, zb-h1, zbv, dualpipev, looped-bfs; all of them; or a CSV file with an order."
MODE_HELP = "How tensors are handed over: async, blocking, overlap, or joint:X (async; pairs as one op)."


@click.command("pipeline", epilog=EPILOG)
@click.option("--schedule", default="1f1b", show_default=True, metavar="NAME|all|FILE", help=SCHEDULE_HELP)
@click.option("--pp", type=int, help="Ranks.  [default: 4, or the file's]")
@click.option("--vpp", type=int, help="Stages per rank.  [default: what the schedule needs, or the file's]")
@click.option("--micro-batches", type=int, help="Micro-batches of a step.  [default: 8, or the file's]")
@click.option("--tf", type=float, default=1.0, show_default=True, help="Forward of a micro-batch on a rank.")
@click.option("--tb", type=float, default=2.0, show_default=True, help="Whole backward of a micro-batch on a rank.")
@click.option("--tw", type=float, help="The part of --tb that is the weight gradient.  [default: half of it]")
@click.option("--p2p", type=float, default=0.0, show_default=True, help="One transfer between two ranks.")
@click.option("--mode", default="async", show_default=True, help=MODE_HELP)
@click.option("--jitter", type=float, help="Also run with times that vary by this share of them, as in 0.1.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random numbers of --jitter.")
@click.option("--max-boxes", type=int, help="Larger pictures are not drawn.  [default: 10000]")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Draw ranks x time into this .svg file.")
@JSON_OPTION
def command(max_boxes: int | None, output: Path | None, as_json: bool, **asked: Any) -> None:
    """A pipeline schedule by itself: makespan, bubble, what each rank does and holds, a picture.

    Times are those of one micro-batch on one rank, in seconds or any other unit: results have the unit that was put
    in. With several stages per rank, each takes its share of them. Bubble = makespan / (n (tf + tb)) - 1.
    """
    from stepgraph.commands.pipelineanswers import as_fields, picture_of
    from stepgraph.commands.pipelinerun import Ask, answer, case_of
    from stepgraph.rendering import write_text
    from stepgraph.timeline import MOST_BOXES, check_boxes

    if asked["schedule"].lower() == "all":
        _compare(Ask(**asked), output, as_json=as_json)
        return
    most_boxes = MOST_BOXES if max_boxes is None else max_boxes
    _, case = together(lambda: _check_format(output), lambda: case_of(Ask(**asked)))
    if output is not None:
        check_boxes(case.least_boxes, most_boxes)
    found = answer(case, bars=output is not None or (not as_json and case.may_fit_lines))
    if output is not None:
        write_text(picture_of(found, most_boxes), output)
        click.echo(f"{output}: {len(found.bars)} boxes (svg)", err=True)
    if as_json:
        click.echo(json.dumps(as_fields(found), indent=2))
        return
    from stepgraph.commands.pipelinetables import show_pipeline

    show_pipeline(found)


def _compare(ask: Ask, output: Path | None, *, as_json: bool) -> None:
    from stepgraph.commands.pipelineall import all_fields, answers, show_all

    if output is not None:
        raise refuse("image-format", str(output), "a comparison is a table, not a picture", "--schedule NAME with -o")
    found = answers(ask)
    if as_json:
        click.echo(json.dumps(all_fields(found), indent=2))
        return
    show_all(found)


def _check_format(output: Path | None) -> None:
    if output is not None and output.suffix.lower() != ".svg":
        what = f"no format for the suffix {output.suffix!r}: a pipeline is drawn without an engine, as SVG only"
        raise refuse("image-format", str(output), what, ".svg")
