"""Tables of `predict --sweep-micro-batch`: the step by size, costs per micro-batch, what grows too fast, the flips."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stepgraph.flips import Flip
from stepgraph.growth import NAMES
from stepgraph.sweep import RefusedSize, Sweep, SweptSize
from stepgraph.tables import new_console, new_table, run_of, seconds, show_table, sizes_of


def show_sweep(sweep: Sweep) -> None:
    """Everything that a person asked for."""
    console = new_console()
    _header(console, sweep)
    show_table(console, _steps(sweep))
    console.print(f"\nSeconds of one micro-batch on rank {sweep.best.rank} (times those of the size above):\n")
    show_table(console, _costs(sweep))
    console.print()
    for line in (*_growths(sweep), *_verdict(sweep)):
        console.print(line, markup=False)
    for size in sweep.refused:
        console.print(f"refused: micro-batch {size.micro_batch}: {escape(size.reason)}", style="yellow")
    for text in sweep.best.warnings:
        console.print(f"warning: at micro-batch {sweep.best_micro_batch}: {escape(text)}", style="yellow")
    for text in sweep.notes:
        console.print(f"note: {escape(text)}", style="dim")


def _header(console: Console, sweep: Sweep) -> None:
    p, layout = sweep.best, sweep.best.layout
    console.print(f"{escape(p.model)} on {p.gpus} x {escape(p.target)}: {', '.join(sizes_of(layout))}", style="bold")
    how = f"recompute {layout.recompute}, profile {p.profile}, eta {p.eta}"
    console.print(f"global batch {sweep.global_batch}, seq {layout.seq}, {', '.join((how, *run_of(p)))}")
    console.print(f"fusions by {len(p.fusions)} rules\n" if p.fusions else "")


def _steps(sweep: Sweep) -> Table:
    layout = sweep.best.layout
    chunks = "(P - 1)/n" if layout.vpp == 1 else "(P - 1)/(n V)"
    table = new_table("micro-batch", "n", "step", "MFU by 6 N", chunks, "simulated", "pipeline", "", left=0)
    for column in table.columns[-2:]:
        column.justify = "left"
    for size in sweep.entries:
        table.add_row(
            str(size.micro_batch),
            *(["", "", "", "", "", "", "refused"] if isinstance(size, RefusedSize) else _step(sweep, size)),
        )
    return table


def _step(sweep: Sweep, size: SweptSize) -> list[str]:
    return [
        str(size.n_microbatches),
        seconds(size.step_time_s),
        f"{size.mfu_active:.1%}",
        f"{size.bubble.closed_form:.1%}",
        f"{size.bubble.simulated:.1%}",
        _regime(size, sweep.best.layout.pp, sweep.best.layout.vpp),
        "best" if size.micro_batch == sweep.best_micro_batch else "",
    ]


def _regime(size: SweptSize, ranks: int, chunks: int) -> str:
    n = "n" if chunks == 1 else "n V"
    bounds = {"starved": f"{n} < 2P = {2 * ranks}", "tolerable": f"{n} < 4P = {4 * ranks}"}
    bounds["comfortable"] = f"{n} >= 4P = {4 * ranks}"
    return f"{size.regime}: {bounds[size.regime]}" if size.regime in bounds else size.regime


def _costs(sweep: Sweep) -> Table:
    """One row per size, one column per cost that occurs, then what runs once per step."""
    names = [name for name in NAMES if any(getattr(size.per_micro_batch_s, name) > 0 for size in sweep.sizes)]
    table = new_table("micro-batch", *names, "in all", "dp per step", "optimizer per step", left=0)
    for last, size in pairwise((None, *sweep.sizes)):
        assert size is not None
        table.add_row(
            str(size.micro_batch),
            *(_cost(name, last, size) for name in (*names, "total")),
            seconds(size.per_step_s.dp),
            seconds(size.per_step_s.optimizer),
        )
    return table


def _cost(name: str, last: SweptSize | None, size: SweptSize) -> str:
    new = getattr(size.per_micro_batch_s, name)
    old = getattr(last.per_micro_batch_s, name) if last else 0
    grown = name in (growth.cost for growth in size.faster_than_linear)
    return f"{seconds(new)} ({new / old:.2f}x{'!' if grown else ''})" if old else seconds(new)


def _growths(sweep: Sweep) -> Iterator[str]:
    """One line per meaning, with the costs and sizes that have it."""
    found = [(growth, size.micro_batch) for size in sweep.sizes for growth in size.faster_than_linear]
    if not found:
        yield "! faster than linear   nothing"
    order = sorted(found, key=lambda pair: NAMES.index(pair[0].cost))
    for cost, members in groupby(order, key=lambda pair: pair[0].cost):
        pairs = list(members)
        steps = ", ".join(f"{growth.since} -> {size}" for growth, size in pairs)
        yield f"! faster than linear   {cost} ({steps}): {pairs[0][0].meaning}"


def _verdict(sweep: Sweep) -> Iterator[str]:
    best = sweep.best
    yield (
        f"best                   micro-batch {sweep.best_micro_batch} at global batch {sweep.global_batch}: "
        f"{seconds(best.step_time_s)}"
    )
    if len(sweep.sizes) > 1:
        yield f"flips                  {_below(sweep)}"
        yield f"                       {_above(sweep)}"


def _below(sweep: Sweep) -> str:
    if sweep.flips.below:
        return f"below: {_flip(sweep.flips.below)}"
    if sweep.flips.lowest == sweep.global_batch:
        return "below: no smaller global batch allows all sizes"
    return f"below: none down to {sweep.flips.lowest}"


def _above(sweep: Sweep) -> str:
    if sweep.flips.above:
        return f"above: {_flip(sweep.flips.above)}"
    if sweep.flips.highest == sweep.global_batch:
        return "above: not searched, it would take long to simulate"
    return f"above: none up to {sweep.flips.highest}"


def _flip(flip: Flip) -> str:
    return f"at global batch {flip.global_batch} micro-batch {flip.after} takes over from {flip.before}"
