"""Tables for people: what the commands print when nobody asked for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stepgraph.lowering.layout import Layout
from stepgraph.lowering.model import Model
from stepgraph.passes.modelflops import Family, Params
from stepgraph.passes.stepping.pipelining import usual_transfers
from stepgraph.report import Prediction

WIDTH = 400
"""Rows are never folded: a terminal wraps what it cannot show, a pipe or a file keeps lines whole."""

_SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


VISIBLE_SHARE = 1e-6
"""Buckets below this share of the step are rounding, not causes."""

SHORTEST_S = 1e-7
"""What would print as `0.0 us` or nearly so is what rounding has left of nothing."""


def seconds(value: float) -> str:
    """A duration with the unit that suits it."""
    if value < SHORTEST_S:
        return "0"
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= scale:
            return f"{value / scale:.3f} {unit}"
    return f"{value * 1e6:.1f} us"


def scaled(value: float, unit: str) -> str:
    """A count with a decimal prefix: 989.4 TFLOP/s."""
    for scale, prefix in _SCALES:
        if value >= scale:
            return f"{value / scale:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def new_table(*columns: str, left: int = 1) -> Table:
    """A plain table; the first `left` columns hold words, the others numbers."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    return table


def new_console() -> Console:
    """Where tables go: standard output, rows never folded."""
    return Console(highlight=False, width=WIDTH, soft_wrap=True)


def show_table(console: Console, table: Table) -> None:
    """Print a table without the blanks that fill its last column."""
    with console.capture() as kept:
        console.print(table)
    console.file.write("".join(f"{line.rstrip()}\n" for line in kept.get().splitlines()))


def _bar(console: Console) -> str:
    """What bars are made of: a block where the terminal's encoding has it."""
    return "█" if console.encoding.lower().startswith("utf") else "#"


def show_prediction(p: Prediction) -> None:
    """The step, its buckets, its stages and what to know about it."""
    console = new_console()
    layout = p.layout
    sizes = ", ".join(sizes_of(layout))
    batch = f"micro-batch {layout.micro_batch}, global batch {layout.global_batch}, {p.n_microbatches} micro-batches"
    console.print(f"{escape(p.model)} on {p.gpus} x {escape(p.target)}: {sizes}", style="bold")
    how = f"recompute {layout.recompute}, profile {p.profile}, eta {p.eta}"
    console.print(f"{batch}, seq {layout.seq}, {', '.join((how, *run_of(p)))}\n")
    for line in _headline(p):
        console.print(line)
    console.print(f"\nWhere the step goes on rank {p.rank}:\n")
    show_table(console, _buckets(p, _bar(console)))
    communication = _communication(p)
    if p.overlap != "none" and communication.row_count:
        console.print(f"\nCommunication of rank {p.rank} under overlap policy {p.overlap}:\n")
        show_table(console, communication)
    if len(p.stages) > 1:
        console.print("\nStages: forward, backward and kernels of one micro-batch, wait and idle of the step:\n")
        show_table(console, _stages(p))
    for title, texts in (("warning", p.warnings), ("note", p.notes)):
        for text in texts:
            console.print(f"{title}: {escape(text)}", style="yellow" if title == "warning" else "dim")


def sizes_of(layout: Layout) -> Iterator[str]:
    """The layout in short: the usual sizes always, the others where they are not their defaults."""
    yield f"tp {layout.tp}{' (sp)' if layout.sp else ''}"
    yield from _unusual(layout, "cp", "ep", "etp")
    yield f"pp {layout.pp}"
    yield from _unusual(layout, "vpp")
    if layout.schedule not in (None, "1f1b"):
        yield str(layout.schedule)
    yield f"dp {layout.dp}"
    yield f"zero {layout.zero}"
    yield from _unusual(layout, "mtp", "capacity_factor", "expert_imbalance", "pad_vocab")


def run_of(p: Prediction) -> Iterator[str]:
    """How software runs the step, where that is not the default."""
    if p.overlap != "none":
        yield f"overlap {p.overlap}"
    if p.launch != "both":
        yield f"launch {p.launch}"
    if p.cuda_graphs:
        yield "CUDA graphs"
    if p.layout.pp > 1 and p.p2p_mode != str(usual_transfers(str(p.layout.schedule))):
        yield f"transfers {p.p2p_mode}"


def _unusual(layout: Layout, *names: str) -> Iterator[str]:
    usual = Layout()
    for name in names:
        if getattr(layout, name) != getattr(usual, name):
            yield f"{name.replace('_', ' ')} {getattr(layout, name):g}"


def _parameters(params: Params) -> str:
    """All of them, and the active ones where a token does not visit all."""
    active = f"   {params.active:,} active" if params.active < params.total else ""
    return f"{params.total:,}{active}"


def _headline(p: Prediction) -> tuple[str, ...]:
    closed = seconds(p.step_time_closed_form_s)
    return (
        f"step            {seconds(p.step_time_s)}   ({closed} by the closed form: equal stages, free transfers)",
        f"throughput      {p.tokens_per_s:,.0f} tokens/s   {p.tokens_per_s_per_gpu:,.0f} per GPU",
        f"MFU             {p.mfu.model_flops:.1%} of model FLOPs   {p.mfu.active:.1%} by 6 N",
        f"bubble          {p.bubble.simulated:.1%} simulated   {p.bubble.closed_form:.1%} by {_bubble_form(p)}",
        f"roofline        {seconds(p.roofline_s)}: what max(F/peak, B/beta) per op would have said",
        f"kernels         {p.kernels_per_rank:,} per rank and step",
        f"parameters      {_parameters(p.params)}",
        *([f"host            the device waits {seconds(p.host_wait_s)} for it"] if p.host_wait_s > SHORTEST_S else []),
        *([f"fusions         {_few(p.fusions)}; `stepgraph fuse` tells what each did"] if p.fusions else []),
    )


def _bubble_form(p: Prediction) -> str:
    return "(P - 1)/n" if p.layout.vpp == 1 else "(P - 1)/(n V)"


def _few(names: Sequence[str]) -> str:
    """The first names of many."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _buckets(p: Prediction, bar: str) -> Table:
    table = new_table("bucket", "time", "share", "")
    for name, value in attrs.asdict(p.buckets_s).items():
        share = value / p.step_time_s
        if share > VISIBLE_SHARE:
            table.add_row(name, seconds(value), f"{share:.1%}", bar * round(40 * share))
    table.columns[-1].justify = "left"
    return table


def _communication(p: Prediction) -> Table:
    """What each communicator takes, and how much of it runs under computation."""
    table = new_table("communicator", "total", "hidden", "exposed")
    for name, times in attrs.asdict(p.communication_s, recurse=False).items():
        if times.total > VISIBLE_SHARE * p.step_time_s:
            table.add_row(name, seconds(times.total), seconds(times.hidden), seconds(times.exposed))
    return table


def _stages(p: Prediction) -> Table:
    table = new_table("stage", "runs", "forward", "backward", "kernels", "wait", "idle", left=2)
    for stage in p.stages:
        table.add_row(
            str(stage.stage),
            stage.runs,
            seconds(stage.forward_s),
            seconds(stage.backward_s),
            str(stage.kernels_forward + stage.kernels_backward),
            seconds(stage.buckets_s.pp_wait),
            seconds(stage.buckets_s.idle),
        )
    return table


def show_flops(
    model: Model, params: Params, families: Mapping[str, Family], seq: int, micro_batch: int, attention: str
) -> None:
    """Parameters, then FLOPs by family."""
    console = new_console()
    console.print(
        f"{escape(model.name)}: {params.total:,} parameters, {params.active:,} active, "
        f"{params.embedding:,} in input tables; {params.multiplied:,} that a token is multiplied with"
    )
    console.print(f"FLOPs of {micro_batch} x {seq} tokens, {attention} attention:\n")
    table = new_table("family", "fwd", "dgrad", "wgrad", "share")
    whole = sum(family.total for family in families.values())
    for name, f in families.items():
        table.add_row(name, f"{f.fwd:,}", f"{f.dgrad:,}", f"{f.wgrad:,}", f"{f.total / whole:.1%}")
    sums = [sum(getattr(f, part) for f in families.values()) for part in ("fwd", "dgrad", "wgrad")]
    table.add_row("total", *(f"{value:,}" for value in sums), "")
    show_table(console, table)
