"""compare: two graphs or programs side by side, in kernels, bytes, FLOPs, saved memory and time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from stepgraph.hwtargets.target import Target
from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Phase
from stepgraph.ir.program import Program
from stepgraph.passes.base import Setting, setting
from stepgraph.passes.costing import costs
from stepgraph.passes.fusing.programs import template_counts
from stepgraph.passes.iteration import iterate
from stepgraph.passes.stepping.parts import Part
from stepgraph.passes.stepping.stagecosts import positions, spent_part, spent_s

PHASES = tuple(phase.value for phase in Phase)


@attrs.frozen
class Totals:
    """What runs, on one rank per stage for one micro-batch (the step once). launch_s is part of time_s.

    saved_bytes: activations that forward keeps for backward.
    """

    kernels: int = 0
    hbm_bytes: int = 0
    flops: int = 0
    saved_bytes: int = 0
    time_s: float = 0.0
    launch_s: float = 0.0

    @classmethod
    def of(cls, part: Part, saved_bytes: int) -> Totals:
        """What a part of a step comes to."""
        return cls(part.kernels, part.hbm_bytes, part.flops, saved_bytes, part.time_s, part.buckets.launch)


@attrs.frozen
class Side:
    """One side of a comparison: totals, the same by phase, and the step time (None for a single graph)."""

    totals: Totals
    phases: Mapping[str, Totals]
    step_time_s: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain numbers: totals, step time, and per phase."""
        own = attrs.asdict(self.totals)
        phases = {name: attrs.asdict(totals) for name, totals in self.phases.items()}
        return {**own, "step_time_s": self.step_time_s, "phases": phases}


@attrs.frozen
class Comparison:
    """Before and after."""

    before: Side
    after: Side

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("", "kernels", "HBM GB", "GFLOPs", "saved GB", "time ms", "launch ms")]
        for name in (*PHASES, "total"):
            pair = [side.totals if name == "total" else side.phases[name] for side in (self.before, self.after)]
            if any(totals != Totals() for totals in pair):
                rows.append((name, *_cells(*pair)))
        lines = [_aligned(row, rows) for row in rows]
        if self.before.step_time_s is not None and self.after.step_time_s is not None:
            before, after = self.before.step_time_s, self.after.step_time_s
            change = 1 - after / before
            said = f"{abs(change):.2%} {'saved' if change >= 0 else 'slower'}"
            lines.append(f"step {before:.4f} s -> {after:.4f} s ({said})")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Both sides as plain numbers."""
        return {"before": self.before.to_json(), "after": self.after.to_json()}


def _cells(before: Totals, after: Totals) -> tuple[str, ...]:
    return (
        _arrow(before.kernels, after.kernels, 0),
        _arrow(before.hbm_bytes / 1e9, after.hbm_bytes / 1e9, 3),
        _arrow(before.flops / 1e9, after.flops / 1e9, 0),
        _arrow(before.saved_bytes / 1e9, after.saved_bytes / 1e9, 3),
        _arrow(before.time_s * 1e3, after.time_s * 1e3, 3),
        _arrow(before.launch_s * 1e3, after.launch_s * 1e3, 3),
    )


def _arrow(before: float, after: float, digits: int) -> str:
    left, right = f"{before:,.{digits}f}", f"{after:,.{digits}f}"
    if left == right:
        return left
    saved = f" ({1 - after / before:.1%} saved)" if before and after < before else ""
    return f"{left} -> {right}{saved}"


def _aligned(row: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(other[i]) for other in rows) for i in range(len(row))]
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def compare(before: Graph | Program, after: Graph | Program, target: Target | Setting, **names: Any) -> Comparison:
    """Cost both sides alike.

    target: a target, with the default profile and efficiency law unless `profile=`, `eta=` and the other names
    that `setting` takes say otherwise, or a whole setting. Programs are summed over all stages (one rank each, one micro-batch) and get their step time.
    """
    chosen = target if isinstance(target, Setting) else setting(target, **names)
    return Comparison(side_of(before, chosen), side_of(after, chosen))


def side_of(target: Graph | Program, chosen: Setting) -> Side:
    """Totals of one side."""
    if isinstance(target, Graph):
        return _side(_graph_parts(target, chosen), _saved(target), None)
    found = iterate(target, chosen)
    parts = {
        "forward": sum((stage.forward for stage in found.stages), Part()),
        "backward": sum((stage.backward for stage in found.stages), Part()),
        "step": sum((stage.step for stage in found.stages), Part()),
    }
    counts = template_counts(target)
    saved = sum(count * _saved(target[name]) for name, count in counts.items())
    return _side(parts, saved, found.step_s)


def _graph_parts(graph: Graph, chosen: Setting) -> dict[str, Part]:
    cost = costs(graph, chosen)
    op_s = spent_s(cost, chosen)
    return {phase.value: spent_part(cost, positions(graph, phase), op_s, chosen) for phase in Phase}


def _saved(graph: Graph) -> int:
    """Bytes kept for backward, each storage once: a view is its source."""
    return sum(tensor.nbytes for tensor in graph.saved)


def _side(parts: Mapping[str, Part], saved_bytes: int, step_s: float | None) -> Side:
    phases = {name: Totals.of(part, saved_bytes if name == "forward" else 0) for name, part in parts.items()}
    whole = Totals.of(sum(parts.values(), Part()), saved_bytes)
    return Side(whole, phases, step_s)
