"""Tables and lines of `stepgraph pipeline` for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from stepgraph.commands.pipelineanswers import over_ideal, shown, sizes, times
from stepgraph.commands.pipelinerun import Answer
from stepgraph.tables import new_console, new_table, show_table
from stepgraph.textlanes import text_lanes

TOO_WIDE = "too wide or too many ranks for a picture in text; -o pipeline.svg draws it"


def show_pipeline(found: Answer) -> None:
    """A table with a line per rank, the picture in text where it is small enough, the sums."""
    console = new_console()
    case = found.case
    console.print(escape(sizes(case)), style="bold")
    console.print(f"{times(case)}; times per micro-batch and rank, results in their unit\n")
    show_table(console, _ranks(found))
    lanes = text_lanes(found.bars, case.pp, found.run.makespan_s)
    if lanes:
        console.print()
    for rank, lane in enumerate(lanes):
        console.print(f"{rank:>4}  {lane}")
    if found.bars and not lanes:
        console.print(f"\n{TOO_WIDE}")
    console.print()
    for line in _sums(found):
        console.print(line)


def _ranks(found: Answer) -> Table:
    table = new_table("rank", "compute", "transfer", "wait", "longest wait", "idle", "end", "peak activations", left=0)
    for index, (rank, peak) in enumerate(zip(found.run.ranks, found.peaks, strict=True)):
        spent = (rank.compute_s, rank.transfer_s, rank.wait_s, rank.longest_wait_s, rank.idle_s, rank.end_s)
        table.add_row(f"{index}", *(shown(time, found.run.makespan_s) for time in spent), f"{peak:g}")
    return table


def _sums(found: Answer) -> Iterator[str]:
    yield f"makespan   {found.run.makespan_s:.6g}"
    yield f"bubble     {over_ideal(found)}"
    if found.jitter is not None:
        low, mean, high = (f"{time:.6g}" for time in (found.jitter.low_s, found.jitter.mean_s, found.jitter.high_s))
        yield f"jitter     {mean} in the mean, {low} to {high} where every time varies by {found.case.jitter:g} of it"
