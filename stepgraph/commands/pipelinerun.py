"""What `stepgraph pipeline` was asked, checked, and what it found: the order, its simulation, the memory it holds."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Final

import attrs

from stepgraph.bars import Bar, bars_of
from stepgraph.errors import InputError, Problem, refuse, together
from stepgraph.ir.pipelines import PIPELINES
from stepgraph.passes.pipeline.accounts import PipelineRun
from stepgraph.passes.pipeline.actions import Order
from stepgraph.passes.pipeline.jitter import Range, jittered
from stepgraph.passes.pipeline.modes import Mode, parse_mode, refuse_without_pairs
from stepgraph.passes.pipeline.orderfile import read_order
from stepgraph.passes.pipeline.peaks import peak_activations
from stepgraph.passes.pipeline.schedule import Schedule
from stepgraph.passes.pipeline.schedules import SCHEDULES, schedule_of
from stepgraph.passes.pipeline.simulation import simulate, simulate_schedule
from stepgraph.passes.pipeline.timing import Timing, uniform
from stepgraph.textlanes import MOST_COLUMNS, MOST_RANKS

USUAL_PP: Final = 4
USUAL_MICRO_BATCHES: Final = 8
MOST_VARIED: Final = 500_000
"""Every computation of a run whose times vary is run, and there are several runs."""


@attrs.frozen
class Ask:
    """The options of the command. None: not given."""

    schedule: str
    pp: int | None
    vpp: int | None
    micro_batches: int | None
    tf: float
    tb: float
    tw: float | None
    p2p: float
    mode: str
    jitter: float | None = None
    seed: int = 0


@attrs.frozen
class Case:
    """A schedule with its sizes and times, all of which fit each other.

    name: of the schedule, or the file. schedule: None for a file. order: of the schedule's shortest step that repeats
    as this one does, or the file's: enough to know what a rank holds.

    Units: of times, those that the user has in mind; per micro-batch and rank.
    """

    name: str
    schedule: Schedule | None
    order: Order
    pp: int
    vpp: int
    micro_batches: int
    tf: float
    tb: float
    tw: float
    p2p: float
    mode: Mode
    jitter: float | None = None
    seed: int = 0

    @property
    def ideal(self) -> float:
        """n (tf + tb): what a rank computes, without any bubble."""
        return self.micro_batches * (self.tf + self.tb)

    @property
    def timing(self) -> Timing:
        """Times of every virtual stage and boundary."""
        return uniform(self.pp * self.vpp, self.tf, self.tb, self.p2p, self.tw, self.vpp)

    @property
    def least_boxes(self) -> int:
        """A picture has a forward and a backward per stage and micro-batch, or more."""
        return 2 * self.pp * self.vpp * self.micro_batches

    @property
    def may_fit_lines(self) -> bool:
        """Whether lines of text may be wide enough: a computation takes two columns or more."""
        return self.pp <= MOST_RANKS and 4 * self.vpp * self.micro_batches <= MOST_COLUMNS

    def whole_order(self) -> Order:
        """The order of all micro-batches."""
        return self.schedule.order(self.pp, self.vpp, self.micro_batches) if self.schedule else self.order


@attrs.frozen
class Answer:
    """What was found. bubble: makespan / ideal - 1. bars: empty unless a picture needs them."""

    case: Case
    run: PipelineRun
    bubble: float
    peaks: tuple[float, ...]
    bars: tuple[Bar, ...]
    jitter: Range | None = None


def case_of(ask: Ask) -> Case:
    """Check everything that was asked, and report all that is wrong at once.

    Raises: InputError (pipeline-times, pipeline-jitter, pipeline-mode, pipeline-count, pipeline-schedule, those of the
    schedule and of the file, and pipeline-file-shape where an option contradicts the file).
    """
    tw = ask.tb / 2 if ask.tw is None else ask.tw
    (name, schedule, order, (pp, vpp, micro_batches)), mode, _ = together(
        lambda: _order(ask),
        lambda: parse_mode(ask.mode),
        lambda: _check(_time_problems(ask, tw)),
    )
    refuse_without_pairs(mode, name, pairs=_has_pairs(order), where="--mode")
    return Case(
        name=name,
        schedule=schedule,
        order=order,
        pp=pp,
        vpp=vpp,
        micro_batches=micro_batches,
        tf=ask.tf,
        tb=ask.tb,
        tw=tw,
        p2p=ask.p2p,
        mode=mode,
        jitter=ask.jitter,
        seed=ask.seed,
    )


def _has_pairs(order: Order) -> bool:
    return any(len(slot) > 1 for slots in order.ranks for slot in slots)


def answer(case: Case, *, bars: bool) -> Answer:
    """Simulate a case. bars: whether they are wanted for a picture; then every micro-batch has to be run.

    Raises: InputError (those of the simulation, such as an order that deadlocks; pipeline-size for long steps with
    jitter; pipeline-times where makespan or bubble are more than a number can hold).
    """
    run, drawn = _drawn_run(case) if bars else (_run(case), ())
    bubble = run.makespan_s / case.ideal - 1
    if not isfinite(bubble):
        what = "too large to be added up, or too far apart to be compared"
        raise refuse("pipeline-times", "--tf, --tb, --p2p", what, "times of about one size")
    return Answer(
        case=case,
        run=run,
        bubble=bubble,
        peaks=peak_activations(case.order),
        bars=drawn,
        jitter=None if case.jitter is None else _jitter(case, case.jitter),
    )


def _drawn_run(case: Case) -> tuple[PipelineRun, tuple[Bar, ...]]:
    order = case.whole_order()
    run = simulate(order, case.timing, case.mode, events=True)
    return run, tuple(bars_of(run.events, order))


def _run(case: Case) -> PipelineRun:
    if case.schedule is None:
        return simulate(case.order, case.timing, case.mode)
    return simulate_schedule(case.schedule, case.pp, case.vpp, case.micro_batches, case.timing, case.mode)


def _jitter(case: Case, relative: float) -> Range:
    """The makespan of several runs whose times vary."""
    if case.least_boxes > MOST_VARIED:
        what = f"{case.least_boxes} computations in each of several runs"
        raise refuse("pipeline-size", "--jitter", what, f"at most {MOST_VARIED}", "take fewer micro-batches")
    found = jittered(case.whole_order(), case.timing, case.mode, relative=relative, seed=case.seed).makespan
    if not isfinite(found.mean_s):
        raise refuse("pipeline-times", "--tf, --tb, --p2p", "too large to be added up", "times of about one size")
    return found


def _order(ask: Ask) -> tuple[str, Schedule | None, Order, tuple[int, int, int]]:
    """(name, schedule, order, (pp, vpp, micro-batches)), of a name or a file."""
    if _is_file(ask.schedule):
        return _from_file(ask)
    schedule = schedule_of(ask.schedule)
    usual_vpp = PIPELINES[schedule.name].usual_chunks
    pp = USUAL_PP if ask.pp is None else ask.pp
    vpp = usual_vpp if ask.vpp is None else ask.vpp
    micro_batches = USUAL_MICRO_BATCHES if ask.micro_batches is None else ask.micro_batches
    counts = (("--pp", pp), ("--vpp", vpp), ("--micro-batches", micro_batches))
    _check(Problem("pipeline-count", option, f"{count}", "1 or more") for option, count in counts if count < 1)
    order = schedule.order(pp, vpp, schedule.shortest(pp, vpp, micro_batches))
    return schedule.name, schedule, order, (pp, vpp, micro_batches)


def _is_file(text: str) -> bool:
    """A name of a schedule is one even where a file has it too; what looks like a path, or is one, is a file."""
    if text.lower() in SCHEDULES:
        return False
    return text.lower().endswith(".csv") or "/" in text or _exists(text)


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # too long, or a zero byte
        return False


def _from_file(ask: Ask) -> tuple[str, None, Order, tuple[int, int, int]]:
    order = read_order(ask.schedule)
    micro_batches = 1 + max(which for slots in order.ranks for slot in slots for _, _, which in slot)
    sizes = (len(order.ranks), order.chunks, micro_batches)
    given = (("--pp", ask.pp), ("--vpp", ask.vpp), ("--micro-batches", ask.micro_batches))
    _check(
        Problem("pipeline-file-shape", option, f"{asked}, but {ask.schedule} has {size}", fix=f"leave out {option}")
        for (option, asked), size in zip(given, sizes, strict=True)
        if asked not in (None, size)
    )
    return ask.schedule, None, order, sizes


def _time_problems(ask: Ask, tw: float) -> Iterator[Problem]:
    if ask.jitter is not None and not 0 <= ask.jitter <= 1:
        yield Problem("pipeline-jitter", "--jitter", f"{ask.jitter:g}", "0 to 1, as in 0.1")
    if ask.seed < 0:
        yield Problem("pipeline-jitter", "--seed", f"{ask.seed}", "0 or more")
    times = (("--tf", ask.tf), ("--tb", ask.tb), ("--tw", ask.tw), ("--p2p", ask.p2p))
    wrong = [(option, time) for option, time in times if time is not None and not (isfinite(time) and time >= 0)]
    for option, time in wrong:
        yield Problem("pipeline-times", option, f"{time:g}", "a finite number, zero or more")
    if wrong:
        return
    if tw > ask.tb:
        yield Problem("pipeline-times", "--tw", f"tw = {tw:g}", f"at most tb = {ask.tb:g}, the whole backward")
    if not ask.tf + ask.tb > 0:
        yield Problem("pipeline-times", "--tf, --tb", "both are zero", "at least one of them above zero")


def _check(problems: Iterator[Problem]) -> None:
    found = list(problems)
    if found:
        raise InputError(found)
