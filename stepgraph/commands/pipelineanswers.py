"""What `stepgraph pipeline` says: JSON fields, tables, lines of text and the picture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.markup import escape
from rich.table import Table

from stepgraph.commands.pipelinerun import Answer, Case
from stepgraph.passes.pipeline.accounts import RankRun
from stepgraph.tables import new_console, new_table, show_table
from stepgraph.textlanes import text_lanes
from stepgraph.timeline import Caption, to_svg


def as_fields(found: Answer) -> dict[str, Any]:
    """The JSON of the command; docs/pipeline.md explains every field."""
    case = found.case
    fields: dict[str, Any] = {
        "schedule": case.name,
        "pp": case.pp,
        "vpp": case.vpp,
        "micro_batches": case.micro_batches,
        "tf": case.tf,
        "tb": case.tb,
        "tw": case.tw,
        "p2p": case.p2p,
        "mode": str(case.mode),
        "makespan": found.run.makespan_s,
        "bubble_over_ideal": found.bubble,
        "peak_activations": list(found.peaks),
        "ranks": [_rank_fields(rank) for rank in found.run.ranks],
    }
    if found.jitter is not None:
        fields["jitter"] = {"mean": found.jitter.mean_s, "low": found.jitter.low_s, "high": found.jitter.high_s}
    return fields


def picture_of(found: Answer, most_boxes: int) -> str:
    """The run as SVG. Raises: InputError (too-many-boxes)."""
    case = found.case
    note = (
        f"makespan {_shown(found.run.makespan_s)}, bubble {found.bubble:z.1%} over n (tf + tb) = {_shown(case.ideal)}"
    )
    caption = Caption(_sizes(case), f"{note}; {_times(case)}", "time, in the unit of tf and tb")
    return to_svg(found.bars, case.pp, found.run.makespan_s, caption, most_boxes=most_boxes)


def show_pipeline(found: Answer) -> None:
    """A table with a line per rank, the picture in text where it is small enough, the sums."""
    console = new_console()
    case = found.case
    console.print(escape(_sizes(case)), style="bold")
    console.print(f"{_times(case)}; times per micro-batch and rank, results in their unit\n")
    show_table(console, _ranks(found))
    lanes = text_lanes(found.bars, case.pp, found.run.makespan_s)
    if lanes:
        console.print()
    for rank, lane in enumerate(lanes):
        console.print(f"{rank:>4}  {lane}")
    console.print()
    for line in _sums(found):
        console.print(line)


def _rank_fields(rank: RankRun) -> dict[str, float]:
    return {
        "compute": rank.compute_s,
        "transfer": rank.transfer_s,
        "wait_send": rank.wait_send_s,
        "wait_recv": rank.wait_recv_s,
        "idle": rank.idle_s,
        "longest_wait": rank.longest_wait_s,
        "end": rank.end_s,
    }


def _ranks(found: Answer) -> Table:
    table = new_table("rank", "compute", "transfer", "wait", "longest wait", "idle", "end", "peak activations", left=0)
    for index, (rank, peak) in enumerate(zip(found.run.ranks, found.peaks, strict=True)):
        times = (rank.compute_s, rank.transfer_s, rank.wait_s, rank.longest_wait_s, rank.idle_s, rank.end_s)
        table.add_row(f"{index}", *map(_shown, times), _shown(peak))
    return table


def _sums(found: Answer) -> Iterator[str]:
    case = found.case
    yield f"makespan   {_shown(found.run.makespan_s)}"
    yield f"bubble     {found.bubble:z.1%} over n (tf + tb) = {_shown(case.ideal)}"
    if found.jitter is not None:
        low, mean, high = (_shown(time) for time in (found.jitter.low_s, found.jitter.mean_s, found.jitter.high_s))
        yield f"jitter     {mean} in the mean, {low} to {high} where every time varies by {case.jitter:g} of it"


def _sizes(case: Case) -> str:
    """`interleaved: pp 4, vpp 2, 8 micro-batches`."""
    vpp = f", vpp {case.vpp}" if case.vpp > 1 else ""
    plural = "" if case.micro_batches == 1 else "es"
    return f"{case.name}: pp {case.pp}{vpp}, {case.micro_batches} micro-batch{plural}"


def _times(case: Case) -> str:
    return f"tf {case.tf:g}, tb {case.tb:g}, tw {case.tw:g}, p2p {case.p2p:g}, {case.mode}"


def _shown(time: float) -> str:
    """Six digits; nothing that rounding has left of zero."""
    return f"{time:.6g}" if abs(time) >= 1e-12 else "0"
