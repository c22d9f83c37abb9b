"""What `stepgraph fuse` finds out: one program, fused twice, and the numbers of both sides."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import attrs

from stepgraph.commands.options import rule_faults
from stepgraph.ir.program import Program
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import count_parts, lower
from stepgraph.lowering.model import Model
from stepgraph.lowering.mtpchecks import mtp_warnings
from stepgraph.passes.base import Setting
from stepgraph.passes.comparison import Side, Totals, compare
from stepgraph.passes.fusing.fusedkernels import FusedKernel, fused_kernels
from stepgraph.passes.fusing.grouping import AnyRule, FusionReport
from stepgraph.passes.modelflops import Mfu
from stepgraph.passes.moduletotals import module_totals
from stepgraph.passes.seating import seat, seating_note
from stepgraph.prediction import dropping_note, finite, mfu_of, modelled_layout
from stepgraph.soundfusing import fuse_soundly


@attrs.frozen
class Fused:
    """One side: the rules, what they were called, the program with their kernels, its numbers.

    totals: as `compare` has them; modules: the same by module.
    """

    name: str
    rules: tuple[AnyRule, ...]
    program: Program
    report: FusionReport
    totals: Side
    modules: Mapping[str, Totals]
    mfu: Mfu

    @property
    def step_time_s(self) -> float:
        """The step."""
        assert self.totals.step_time_s is not None  # programs have one
        return self.totals.step_time_s

    def to_json(self) -> dict[str, Any]:
        """Totals, MFU, the same by phase and by module."""
        modules = {name: attrs.asdict(totals) for name, totals in self.modules.items()}
        return {**self.totals.to_json(), "modules": modules, "mfu": attrs.asdict(self.mfu)}


@attrs.frozen(slots=False)
class FusionRun:
    """A model under a layout, before (`--against`) and after (`--fusions`).

    layout: resolved. warnings, notes: as `predict` has them, of model and layout.
    """

    model: Model
    layout: Layout
    chosen: Setting
    microbatches: int
    before: Fused
    after: Fused
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    @cached_property
    def kernels(self) -> tuple[FusedKernel, ...]:
        """Every distinct fused kernel of the after side."""
        return fused_kernels(self.after.program, self.chosen)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dictionaries, ready for `json.dumps`."""
        return {
            "model": self.model.name,
            "target": self.chosen.target.name,
            "gpus": self.layout.gpus,
            "layout": attrs.asdict(self.layout),
            "profile": self.chosen.profile.name,
            "eta": self.chosen.eta,
            "launch": self.chosen.launch,
            "cuda_graphs": self.chosen.cuda_graphs,
            "overlap": self.chosen.overlap.name,
            "p2p_mode": str(self.chosen.p2p or "auto"),
            "n_microbatches": self.microbatches,
            "fusions": [rule.name for rule in self.after.rules],
            "against": [rule.name for rule in self.before.rules],
            "rules": self.after.report.to_json(),
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "fused_kernels": [attrs.asdict(kernel) for kernel in self.kernels],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }


def run_fusions(
    model: Model,
    layout: Layout,
    chosen: Setting,
    fusions: tuple[str, tuple[AnyRule, ...]],
    against: tuple[str, tuple[AnyRule, ...]],
) -> FusionRun:
    """Lower once, fuse by both sets of rules, cost both.

    fusions, against: what the rules are called, and the rules. Raises: InputError for a layout that cannot be, and for a
    rule's check that fails.
    """
    layout, notes = modelled_layout(layout, model, chosen.overlap)
    program = lower(model, layout)
    machine, chosen = chosen.target, seat(chosen, program)
    notes = (*notes, *seating_note(machine, chosen.target), *dropping_note(layout))
    warnings = (*model.warnings, *mtp_warnings(layout, model))
    programs = [_fused(program, rules) for _, rules in (against, fusions)]
    compared = compare(programs[0][0], programs[1][0], chosen)
    before, after = (
        _side(side, fused, named, (model, layout, chosen))
        for side, fused, named in zip((compared.before, compared.after), programs, (against, fusions), strict=True)
    )
    return FusionRun(model, layout, chosen, program.microbatches, before, after, warnings, notes)


def _fused(program: Program, rules: tuple[AnyRule, ...]) -> tuple[Program, FusionReport]:
    with rule_faults(rules):
        return fuse_soundly(program, rules)


def _side(
    side: Side,
    fused: tuple[Program, FusionReport],
    named: tuple[str, tuple[AnyRule, ...]],
    where: tuple[Model, Layout, Setting],
) -> Fused:
    model, layout, chosen = where
    assert side.step_time_s is not None
    finite(side.step_time_s)
    assert layout.seq is not None  # resolved
    mfu = mfu_of(count_parts(model, 1, layout.seq, layout.mtp), model, layout, chosen.target, side.step_time_s)
    return Fused(*named, *fused, side, module_totals(fused[0], chosen), mfu)
