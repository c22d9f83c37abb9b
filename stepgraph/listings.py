"""Lists for people: the op table, machines, configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape

from stepgraph.hwtargets.target import Target
from stepgraph.tables import new_console, new_table, scaled, show_table


def show_ops(rows: Sequence[Mapping[str, Any]], *, sources: bool) -> None:
    """The op table joined with both profiles; with sources when single kinds were asked for."""
    console = new_console()
    table = new_table(
        "kind", "rule", "reference r + w", "kernels", "exact r + w", "kernels", "FLOPs", "backward", left=2
    )
    for row in rows:
        ref, exact = row["reference"], row["exact"]
        table.add_row(
            row["kind"], row["rule"], _passes(ref), str(ref["kernels"]), _passes(exact), str(exact["kernels"]),
            row["flops"], ", ".join(row["backward"]),
        )  # fmt: skip
    show_table(console, table)
    if not sources:
        console.print("\nr + w: HBM passes over each operand and each result; one number stands for all of them.")
        return
    for row in rows:
        console.print(f"\n[bold]{row['kind']}[/bold]: {escape(row['meaning'])}; loop nest {escape(row['spec'])}")
        console.print(f"  computes: {escape(row['source'])}")
        for profile in ("reference", "exact"):
            console.print(f"  {profile}: {escape(row[profile]['source'])}")


def _passes(execution: Mapping[str, Any]) -> str:
    reads, writes = (" ".join(f"{passes:g}" for passes in execution[side]) for side in ("reads", "writes"))
    return f"{reads} + {writes}"


def show_targets(targets: Sequence[Target]) -> None:
    """One line per target."""
    table = new_table("target", "", "bf16 dense", "HBM", "HBM rate", "scale-up", "ranks", "NIC", left=2)
    for t in targets:
        table.add_row(
            t.name,
            t.title,
            scaled(t.peak_flops_per_s("bf16"), "FLOP/s"),
            f"{t.hbm.size_bytes / 2**30:.0f} GiB",
            scaled(t.hbm.bandwidth_bytes_per_s, "B/s"),
            scaled(t.scale_up.bandwidth_bytes_per_s, "B/s"),
            str(t.scale_up.domain),
            scaled(t.nic.bandwidth_bytes_per_s, "B/s"),
        )
    console = new_console()
    show_table(console, table)
    console.print("\nRates are per GPU and direction. `stepgraph targets NAME` names the source of every figure.")


def show_target(target: Target) -> None:
    """Every figure of a target with its status and its source."""
    console = new_console()
    console.print(f"{escape(target.name)}: {escape(target.title)}\n", style="bold")
    for key, figure in target.figures():
        console.print(f"{key} = {_value(figure.value)}  [dim]({figure.status})[/dim]")
        console.print(f"    {escape(figure.source)}")


def _value(value: object) -> str:
    """A figure's number, or its break points: `0.39 up to 1048576, ..., 0.71 above`."""
    if not isinstance(value, tuple):
        return f"{value:g}"
    return ", ".join(
        f"{share:g} " + ("above" if bound == float("inf") else f"up to {bound:g}") for bound, share in value
    )


def show_models(rows: Sequence[Mapping[str, object]], families: Sequence[str]) -> None:
    """One line per carried model."""
    table = new_table("model", "parameters", "active", "layers", "hidden", "heads", "vocab", "positions", "dtype")
    for row in rows:
        keys = ("stack", "hidden", "heads", "vocab", "max_positions", "dtype")
        table.add_row(str(row["name"]), f"{row['params']:,}", f"{row['active']:,}", *(str(row[key]) for key in keys))
    console = new_console()
    show_table(console, table)
    console.print("\nA path to any config.json of a supported family works wherever a name does. Families:")
    console.print(", ".join(families))
