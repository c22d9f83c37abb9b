"""`stepgraph pipeline --schedule all`: every schedule with the same sizes and times, one line each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from stepgraph.commands.pipelineanswers import as_fields, over_ideal, shown, times
from stepgraph.commands.pipelinerun import Answer, Ask, answer, case_of
from stepgraph.errors import InputError
from stepgraph.ir.pipelines import PIPELINES
from stepgraph.passes.pipeline.schedules import SCHEDULES
from stepgraph.tables import new_console, new_table, show_table

Found = dict[str, Answer | InputError]
"""By schedule, what it comes to, or why it does not run."""


def answers(ask: Ask) -> Found:
    """Run every schedule. A number of chunks is for those that can have it; the others take the only one they have.

    Raises: InputError where none runs: what is wrong is then wrong with all.
    """
    found: Found = {}
    for name, schedule in SCHEDULES.items():
        only = PIPELINES[name].usual_chunks if schedule.chunks else ask.vpp
        try:
            found[name] = answer(case_of(attrs.evolve(ask, schedule=name, vpp=only)), bars=False)
        except InputError as refused:
            found[name] = refused
    refusals = [own for own in found.values() if isinstance(own, InputError)]
    if len(refusals) == len(found):
        raise refusals[0]
    return found


def all_fields(found: Found) -> dict[str, Any]:
    """The JSON: one entry per schedule, those of the command or `refused`."""
    return {
        "schedules": [
            {"schedule": name, "refused": str(own)} if isinstance(own, InputError) else as_fields(own)
            for name, own in found.items()
        ]
    }


def show_all(found: Found) -> None:
    """A table, the fastest first, and what was refused."""
    ran = sorted((own for own in found.values() if isinstance(own, Answer)), key=lambda own: own.run.makespan_s)
    console = new_console()
    case = ran[0].case
    console.print(f"pp {case.pp}, {case.micro_batches} micro-batches; {times(case)}\n", style="bold")
    table = new_table("schedule", "vpp", "makespan", "bubble", "longest wait", "peak activations")
    for own in ran:
        table.add_row(*_row(own))
    show_table(console, table)
    console.print(f"\nbubble over n (tf + tb) = {case.ideal:.6g}; longest wait and peak of any rank")
    for name, refused in found.items():
        if isinstance(refused, InputError):
            console.print(f"refused: {name}: {refused.problems[0]}", style="yellow", markup=False)


def _row(found: Answer) -> Iterator[str]:
    makespan_s = found.run.makespan_s
    yield from (found.case.name, f"{found.case.vpp}", f"{makespan_s:.6g}", over_ideal(found).split()[0])
    yield shown(max(rank.longest_wait_s for rank in found.run.ranks), makespan_s)
    yield f"{max(found.peaks):g}"
