"""Tables of `stepgraph fuse`: rules with reasons, totals before and after, and the arithmetic of every kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stepgraph.commands.fusionrun import Fused, FusionRun
from stepgraph.passes.comparison import PHASES, Totals
from stepgraph.passes.fusing.fusedkernels import FusedKernel
from stepgraph.passes.fusing.grouping import RuleReport
from stepgraph.tables import new_console, new_table, seconds, show_table, sizes_of


def show_fusions(run: FusionRun, *, savings: bool) -> None:
    """Everything that a person asked for."""
    console = new_console()
    _header(console, run)
    _rules(console, run.after.report.rules)
    console.print(
        "\nBefore -> after, all stages together (one rank each, one micro-batch, the step once; launches are part of the time):\n"
    )
    show_table(console, _totals("phase", _phases(run.before), _phases(run.after)))
    changed = [name for name, totals in run.before.modules.items() if totals != run.after.modules[name]]
    if changed:
        console.print("\nModules that changed:\n")
        show_table(
            console, _totals("module", *({name: side.modules[name] for name in changed} for side in _sides(run)))
        )
    console.print()
    for line in _headline(run):
        console.print(line)
    if savings:
        _savings(console, run.kernels)
    for text in run.warnings:
        console.print(f"warning: {escape(text)}", style="yellow")
    for note in run.notes:
        console.print(f"note: {escape(note)}", style="dim")


def _sides(run: FusionRun) -> tuple[Fused, Fused]:
    return run.before, run.after


def _header(console: Console, run: FusionRun) -> None:
    layout = run.layout
    sizes = ", ".join(sizes_of(layout))
    batch = f"micro-batch {layout.micro_batch}, global batch {layout.global_batch}, {run.microbatches} micro-batches"
    what = f"profile {run.chosen.profile.name}, eta {run.chosen.eta}"
    console.print(
        f"{escape(run.model.name)} on {layout.gpus} x {escape(run.chosen.target.name)}: {sizes}", style="bold"
    )
    console.print(f"{batch}, seq {layout.seq}, recompute {layout.recompute}, {what}")
    count = len(run.after.rules)
    rules = f"{count} rule{'' if count == 1 else 's'}"
    console.print(escape(f"fusions {run.after.name} ({rules}) against {run.before.name}\n"))


def _rules(console: Console, rules: tuple[RuleReport, ...]) -> None:
    """A row per rule that found something; the others in one line."""
    met = [rule for rule in rules if rule.matched]
    if met:
        table = new_table("rule", "matched", "fused", "rejected", "still written")
        for rule in met:
            cells = (_counts(rule.rejected), _counts(rule.notes))
            table.add_row(escape(rule.name), str(rule.matched), str(rule.fused), *cells)
        for column in table.columns[3:]:
            column.justify = "left"
        show_table(console, table)
    missed = ", ".join(rule.name for rule in rules if not rule.matched)
    if missed:
        console.print(escape(f"no site: {missed}"))


def _counts(codes: Mapping[str, int]) -> str:
    return ", ".join(f"{code} {count}" for code, count in codes.items())


def _phases(side: Fused) -> dict[str, Totals]:
    return {**{name: side.totals.phases[name] for name in PHASES}, "total": side.totals.totals}


def _totals(title: str, before: Mapping[str, Totals], after: Mapping[str, Totals]) -> Table:
    table = new_table(title, "kernels", "", "HBM GB", "", "time ms", "", "launch ms", "")
    for name, left in before.items():
        right = after[name]
        table.add_row(
            name,
            *_change(left.kernels, right.kernels, 0),
            *_change(left.hbm_bytes / 1e9, right.hbm_bytes / 1e9, 3),
            *_change(left.time_s * 1e3, right.time_s * 1e3, 3),
            *_change(left.launch_s * 1e3, right.launch_s * 1e3, 3),
            end_section=name == PHASES[-1],
        )
    return table


def _change(before: float, after: float, digits: int) -> tuple[str, str]:
    """`405 -> 309` and `-23.7%`; one number where nothing changed."""
    left, right = f"{before:,.{digits}f}", f"{after:,.{digits}f}"
    return (left, "") if left == right else (f"{left} -> {right}", _percent(before, after))


def _percent(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else ""


def _headline(run: FusionRun) -> Iterator[str]:
    before, after = _sides(run)
    saved = [side.totals.totals.saved_bytes / 1e9 for side in _sides(run)]
    change = after.step_time_s / before.step_time_s - 1
    how = f"{change:+.2%}" if change else "unchanged"
    same = "   (unchanged: ops stay in the graph)" if saved[0] == saved[1] else ""
    yield f"step            {seconds(before.step_time_s)} -> {seconds(after.step_time_s)}   ({how})"
    yield f"MFU             {before.mfu.model_flops:.1%} -> {after.mfu.model_flops:.1%} of model FLOPs"
    yield f"saved memory    {saved[0]:.3f} GB" + (same or f" -> {saved[1]:.3f} GB")


def _savings(console: Console, kernels: tuple[FusedKernel, ...]) -> None:
    """Per distinct kernel, what it no longer reads and writes; the sum is the difference of the HBM column."""
    console.print("\nWhat each kernel no longer moves, per run on one rank:\n")
    table = new_table("kernel", "tensor", "why", "MB", "runs", "GB", left=3)
    for kernel in sorted(kernels, key=lambda kernel: -kernel.times * kernel.saved_bytes):
        _savings_of(table, kernel)
    whole = sum(kernel.times * kernel.saved_bytes for kernel in kernels)
    table.add_section()
    table.add_row("total", "", "", "", "", f"{whole / 1e9:.3f}")
    show_table(console, table)


def _savings_of(table: Table, kernel: FusedKernel) -> None:
    launches = f"{kernel.launches_before} -> {kernel.launches}" if kernel.launches != kernel.launches_before else ""
    title = (escape(f"{kernel.rule} in {kernel.where}"), escape(" + ".join(kernel.members)))
    size = kernel.saved_bytes
    table.add_row(
        title[0], title[1], f"launches {launches}" if launches else "", f"{size / 1e6:.3f}", f"x {kernel.times}",
        f"{kernel.times * size / 1e9:.3f}",
    )  # fmt: skip
    for saving in kernel.savings:
        reader = "" if saving.why == "never written" else f" by {saving.op}"
        table.add_row("", escape(f"  %{saving.tensor}"), escape(f"{saving.why}{reader}"), f"{saving.bytes / 1e6:.3f}")
