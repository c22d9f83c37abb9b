"""What a drawing or a listing says about each op's cost: time, share, and the rule that bounds it."""

from __future__ import annotations

from collections.abc import Mapping

from stepgraph.ir.drawing import OpNote
from stepgraph.ir.op import Op
from stepgraph.ir.table import row_of
from stepgraph.passes.costing import Costs


def duration(value_s: float) -> str:
    """A short duration for a label."""
    return f"{value_s * 1e3:.2f} ms" if value_s >= 1e-3 else f"{value_s * 1e6:.1f} us"


def op_notes(cost: Costs) -> Mapping[str, OpNote]:
    """A note per op name: its time and its share of the whole graph's time."""
    times = cost.time_s.tolist()
    total = sum(times)
    return {op.name: _note(op, i, times[i], total, cost) for i, op in enumerate(cost.graph.ops)}


def _note(op: Op, position: int, time_s: float, total_s: float, cost: Costs) -> OpNote:
    rule = row_of(op.kind).rule
    lines = (f"{duration(time_s)}, {time_s / total_s:.1%}",) if time_s else ()
    counts = {
        "FLOPs": int(cost.flops[position]),
        "HBM bytes": int(cost.hbm_bytes[position]),
        "bytes sent": int(cost.comm_bytes[position]),
        "kernels": int(cost.kernels[position]),
    }
    tooltip = f"{op.name} ({op.kind}), {rule.value} rule: " + ", ".join(f"{v:,} {k}" for k, v in counts.items() if v)
    return OpNote(lines, tooltip=tooltip)


def cost_columns(cost: Costs) -> Mapping[str, list[object]]:
    """Columns for a text listing, one value per op."""
    return {
        "time_us": [f"{time * 1e6:.1f}" for time in cost.time_s.tolist()],
        "flops": cost.flops.tolist(),
        "hbm_bytes": cost.hbm_bytes.tolist(),
        "comm_bytes": cost.comm_bytes.tolist(),
        "kernels": cost.kernels.tolist(),
    }
