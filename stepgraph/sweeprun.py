"""Running a sweep: every micro-batch size predicted, costs per micro-batch, and where the fastest size changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import lcm
from typing import TYPE_CHECKING

import attrs

from stepgraph.errors import InputError
from stepgraph.flips import Flips, find_flips
from stepgraph.growth import faster_than_linear, split_buckets
from stepgraph.hwtargets.reading import load_target
from stepgraph.hwtargets.target import Target
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import lower
from stepgraph.lowering.model import Model
from stepgraph.passes.base import Setting, setting
from stepgraph.passes.iteration import cost_step
from stepgraph.passes.pipeline.schedules import schedule_of
from stepgraph.prediction import named_rules, predict_under
from stepgraph.report import Prediction
from stepgraph.sweep import SIZES, RefusedSize, Sweep, SweptSize, checked_sizes, regime_of

if TYPE_CHECKING:
    from stepgraph.passes.fusing.grouping import AnyRule

MOST_TIMES = 64
"""Up to how many times the global batch a flip is looked for."""

MOST_SLOTS = 150_000
"""Stages x micro-batches that looking upwards may simulate on its grid where no steady state is skipped: about a second."""

SLOT_S = 7e-6
"""What simulating one of them takes, roughly; for deciding whether progress is shown."""


def sweep_micro_batch(
    model: Model | str | os.PathLike[str],
    layout: Layout,
    target: Target | str | os.PathLike[str],
    sizes: Sequence[int] = SIZES,
    *,
    fusions: str | Sequence[AnyRule] = "none",
    profile: str = "reference",
    eta: str = "constant",
    launch: str = "both",
    cuda_graphs: bool = False,
    overlap: str = "none",
    p2p: str = "auto",
    progress: Callable[[str], object] | None = None,
) -> Sweep:
    """Predict one training step for each micro-batch size, and the global batch at which another one is the fastest.

    layout: its micro_batch is not read; a global batch that is not given is gpus x the largest size. The other arguments
    are those of `predict`. progress: is told what is going on if it will take long.

    Raises: InputError for sizes that are none, and with what `predict` refuses when it refuses every size.
    Source: How to Think About Asymptotic Times, sections 10 and 11.
    """
    sizes = checked_sizes(sizes)
    model = model if isinstance(model, Model) else load_model(model)
    target = target if isinstance(target, Target) else load_target(target)
    machine = setting(target, profile, eta, launch, cuda_graphs=cuda_graphs, overlap=overlap, p2p=p2p)
    return sweep_under(model, layout, machine, sizes, named_rules(fusions), progress)


def sweep_under(
    model: Model,
    layout: Layout,
    machine: Setting,
    sizes: Sequence[int] = SIZES,
    rules: Sequence[AnyRule] = (),
    progress: Callable[[str], object] | None = None,
) -> Sweep:
    """A sweep under a whole setting: see `sweep_micro_batch`. Raises: InputError."""
    sizes = checked_sizes(sizes)
    layout, notes = _with_global_batch(layout, sizes)
    say = _progress(progress, layout, sizes)

    def predicted(size: int, rank: int | None = None) -> Prediction:
        say(f"micro-batch {size}")
        return predict_under(model, attrs.evolve(layout, micro_batch=size), machine, rules, rank)

    found, refused = _predictions(predicted, sizes)
    best = min(found, key=lambda p: (p.step_time_s, p.layout.micro_batch))
    found = [p if p.rank == best.rank else predicted(p.layout.micro_batch, best.rank) for p in found]
    at = {p.layout.micro_batch: _step_times(model, p.layout, machine, rules) for p in found}
    say("where another size is the fastest")
    flips = _flips(found, best, at)
    assert best.layout.global_batch is not None  # resolved
    return Sweep(
        _swept(found, overlapped=machine.overlap.overlaps),
        refused,
        best,
        best.layout.global_batch,
        flips,
        (*notes, *best.notes),
    )


def _with_global_batch(layout: Layout, sizes: tuple[int, ...]) -> tuple[Layout, tuple[str, ...]]:
    """One global batch for all sizes; without one, the largest micro-batch per GPU."""
    if layout.global_batch is not None or not isinstance(layout.gpus, int) or layout.gpus < 1:
        return layout, ()  # sizes that are none are refused by what reads them
    batch = layout.gpus * sizes[-1]
    note = f"global_batch: {batch} sequences, {sizes[-1]} per GPU, so that the largest micro-batch is possible"
    return attrs.evolve(layout, global_batch=batch), (note,)


def _progress(
    progress: Callable[[str], object] | None, layout: Layout, sizes: tuple[int, ...]
) -> Callable[[str], object]:
    """The caller's, if this is going to take more than two seconds."""
    slots = layout.pp * (layout.global_batch or 1) / max(layout.dp, 1) * sum(1 / size for size in sizes)
    searched = 3 * slots + min(MOST_SLOTS, 4 * MOST_TIMES * slots)  # down, two brackets, and up
    if progress is None or (slots + searched) * SLOT_S < 2:
        return lambda _: None
    return progress


def _predictions(
    predicted: Callable[[int], Prediction], sizes: tuple[int, ...]
) -> tuple[list[Prediction], tuple[RefusedSize, ...]]:
    """What is possible, and what is not. Raises: InputError with every distinct problem if nothing is possible."""
    found, refused = [], []
    for size in sizes:
        try:
            found.append(predicted(size))
        except InputError as error:
            refused.append(RefusedSize(size, error.problems))
    if not found:
        raise InputError(dict.fromkeys(problem for size in refused for problem in size.problems))
    return found, tuple(refused)


def _step_times(model: Model, layout: Layout, machine: Setting, rules: Sequence[AnyRule]) -> Callable[[int], float]:
    """Step time of one micro-batch size by its number of micro-batches; lowered and costed once."""
    program = lower(model, layout)
    if rules:
        from stepgraph.soundfusing import fuse_soundly

        program = fuse_soundly(program, rules)[0]
    cost = cost_step(program, machine)
    return cache(lambda microbatches: cost.at(microbatches).step_s)


def _flips(found: Sequence[Prediction], best: Prediction, at: Mapping[int, Callable[[int], float]]) -> Flips:
    """Where another of the possible sizes is the fastest."""
    layout = best.layout
    assert layout.global_batch is not None  # resolved
    if len(at) == 1:
        return Flips(None, None, layout.global_batch, layout.global_batch)
    # Interleaved schedules take rounds of P micro-batches.
    unit = layout.dp * lcm(*at) * (layout.pp if layout.vpp > 1 else 1)

    @cache
    def step_times(units: int) -> tuple[float, ...] | None:
        if units * unit == layout.global_batch:
            return tuple(p.step_time_s for p in found)
        try:
            return tuple(step_s(units * unit // (layout.dp * size)) for size, step_s in at.items())
        except InputError:
            return None

    sizes, slots = tuple(at), layout.pp * layout.vpp * sum(p.n_microbatches for p in found)
    position = sizes.index(layout.micro_batch)
    repeats = schedule_of(str(layout.schedule)).repeating is not None
    return find_flips(sizes, position, step_times, layout.global_batch, unit, MOST_TIMES if repeats else _reach(slots))


def _reach(slots: int) -> int:
    """How many times the global batch the grid may go, doubling, when once takes so many slots."""
    times = 1
    while times < MOST_TIMES and 4 * times * slots <= MOST_SLOTS:  # 2 + 4 + ... + 2 times < 4 times
        times *= 2
    return times


def _swept(found: Sequence[Prediction], *, overlapped: bool) -> tuple[SweptSize, ...]:
    split = [split_buckets(p.buckets_s, p.n_microbatches) for p in found]
    swept: list[SweptSize] = []
    for p, (cost, step) in zip(found, split, strict=True):
        last = swept[-1] if swept else None
        size = p.layout.micro_batch
        grown = (
            faster_than_linear(last.micro_batch, last.per_micro_batch_s, size, cost, overlapped=overlapped)
            if last
            else ()
        )
        swept.append(
            SweptSize(
                micro_batch=size,
                n_microbatches=p.n_microbatches,
                step_time_s=p.step_time_s,
                mfu_active=p.mfu.active,
                bubble=p.bubble,
                regime=regime_of(p.n_microbatches, p.layout.pp, p.layout.vpp),
                per_micro_batch_s=cost,
                per_step_s=step,
                faster_than_linear=grown,
            )
        )
    return tuple(swept)
