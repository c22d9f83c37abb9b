"""Resolving a layout: what was not said is filled in, what cannot be is refused, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from stepgraph.errors import InputError, Problem, did_you_mean, refuse
from stepgraph.ir.pipelines import PIPELINES, chunk_problems
from stepgraph.lowering.divisibility import CHECKS, padding_problems
from stepgraph.lowering.expertchecks import EXPERT_CHECKS, factor_problems
from stepgraph.lowering.fitting import fit_model
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.mesh import mesh_of
from stepgraph.lowering.model import Model
from stepgraph.lowering.mtpchecks import mtp_problems
from stepgraph.lowering.nearest import divisors, either, multiples_around, nearest, size_problem
from stepgraph.lowering.splitting import layout_split
from stepgraph.lowering.stages import deal_layers

SIZES = ("tp", "cp", "ep", "etp", "pp", "vpp", "dp", "micro_batch")
SINGLE_YET = ("cp",)
RECOMPUTE = ("none", "selective", "full")
DEFAULT_SEQ = 4096
MOST_GPUS = 2**20
MOST_TOKENS = 2**30
"""Largest cluster and largest micro-batch (tokens on one data rank) that are looked at."""


def resolve_layout(layout: Layout, model: Model) -> tuple[Layout, tuple[str, ...]]:
    """The layout without a None in it, and a note for each thing that was assumed.

    seq = min(4096, max positions); global_batch = gpus * micro_batch, the same for every layout of as many GPUs; sp = tp > 1;
    tp_regather = sp.

    Raises: InputError with everything that is impossible at once, each with the nearest values that are possible: sizes
    and choices by themselves (layout-*), what CHECKS, EXPERT_CHECKS and their neighbours say of the model, and what only
    dealing the layers (pipeline-*) and building the mesh can find.
    """
    problems = _value_problems(layout) + _choice_problems(layout) + factor_problems(layout)
    # What is wrong by itself is replaced, so that the rest is still checked against the model.
    sound = attrs.evolve(layout, **{problem.where: _default(problem.where) for problem in problems})
    problems += [problem for name in SINGLE_YET if (problem := _single_problem(sound, name))]
    filled, notes = _filled(sound, model)
    limits = _size_limits(filled)
    if limits:
        raise InputError(problems + limits)
    fitted, fit_notes = fit_model(model, filled)
    problems += [*padding_problems(filled, model), *mtp_problems(filled, model)]
    problems += [problem for check in (*CHECKS, *EXPERT_CHECKS) for problem in check(filled, fitted)]
    problems += _build_problems(filled, model, nested=not problems)
    if problems:
        raise InputError(problems)
    return filled, (*notes, *fit_notes, *_length_notes(filled, model))


def _size_limits(layout: Layout) -> list[Problem]:
    """Sizes beyond anything that exists, which would only take long to refuse."""
    problems = []
    if layout.gpus > MOST_GPUS:
        what = f"{layout.gpus} GPUs (tp * cp * pp * dp)"
        problems.append(Problem("too-many-gpus", "dp", what, f"at most {MOST_GPUS}"))
    tokens = layout.micro_batch * (layout.seq or DEFAULT_SEQ)
    if tokens > MOST_TOKENS:
        what = f"{tokens} tokens in a micro-batch (micro_batch * seq)"
        problems.append(Problem("too-many-tokens", "micro_batch", what, f"at most {MOST_TOKENS}"))
    return problems


def _build_problems(layout: Layout, model: Model, *, nested: bool) -> list[Problem]:
    """What only dealing the layers and, when the sizes are sound, building the mesh can find."""

    def deal() -> object:
        return deal_layers(model.template_names, layout_split(layout, model.n_layers))

    assert layout.schedule is not None  # filled in
    problems = list(chunk_problems(layout.schedule, layout.vpp))
    if problems:
        return problems  # how many stages there are is not known, then
    for step in (deal, lambda: mesh_of(layout)) if nested else (deal,):
        try:
            step()
        except InputError as refused:
            problems.extend(refused.problems)
    if layout.vpp > 1 and layout.pp == 1:
        problems.append(
            Problem("vpp-needs-pp", "vpp", f"{layout.vpp} chunks without pipeline stages", "1, or pp above 1")
        )
    return problems


def dp_from_gpus(gpus: int, tp: int = 1, cp: int = 1, pp: int = 1) -> int:
    """The data-parallel size that uses every GPU: gpus / (tp * cp * pp).

    Raises: InputError: layout-value for sizes that are no sizes, gpus-multiple with the nearest GPU counts, tp and pp.
    """
    sizes = {"gpus": gpus, "tp": tp, "cp": cp, "pp": pp}
    problems = [problem for name, value in sizes.items() if (problem := size_problem(name, value))]
    if problems:
        raise InputError(problems)
    model_ranks = tp * cp * pp
    if gpus % model_ranks == 0:
        return gpus // model_ranks
    fixes = [f"gpus {either(multiples_around(gpus, model_ranks))}"]
    fixes += _dividing_fix("tp", tp, gpus, cp * pp) + _dividing_fix("pp", pp, gpus, tp * cp)
    what = f"{gpus} GPUs are not a multiple of tp * cp * pp = {tp} * {cp} * {pp} = {model_ranks}"
    raise refuse("gpus-multiple", "gpus", what, f"a multiple of {model_ranks}", f"nearest: {'; '.join(fixes)}")


def uneven_stages_note(counts: Sequence[int]) -> str:
    """What to tell the user when stages have different numbers of layers; empty when they do not."""
    if len(set(counts)) == 1:
        return ""
    shown = " ".join(map(str, counts)) if len(counts) <= 16 else f"{min(counts)} to {max(counts)} each"
    return f"pp: {sum(counts)} layers over {len(counts)} stages are uneven ({shown}): the longest stage sets the pace"


def _value_problems(layout: Layout) -> list[Problem]:
    optional = ("global_batch", "seq", "first_stage_layers", "last_stage_layers")
    given = [name for name in optional if getattr(layout, name) is not None]
    found = [size_problem(name, getattr(layout, name)) for name in (*SIZES, "pad_vocab", *given)]
    flags = [_flag_problem(name, getattr(layout, name)) for name in ("sp", "tp_regather")]
    return [problem for problem in found + flags if problem]


def _flag_problem(name: str, value: object) -> Problem | None:
    if value is None or isinstance(value, bool):
        return None
    return Problem("layout-value", name, f"{str(value)[:40]!r} is not a switch", "True, False or None")


def _choice_problems(layout: Layout) -> list[Problem]:
    problems = []
    if layout.recompute not in RECOMPUTE:
        word = str(layout.recompute)[:40]
        problems.append(Problem("layout-choice", "recompute", f"{word!r}", "", did_you_mean(word, RECOMPUTE)))
    if layout.schedule is not None:
        problems.extend(problem for problem in chunk_problems(layout.schedule, 2) if problem.code == "schedule")
    if isinstance(layout.zero, bool) or not isinstance(layout.zero, int) or not 0 <= layout.zero <= 3:
        problems.append(Problem("layout-value", "zero", f"{str(layout.zero)[:40]!r} is not a ZeRO stage", "0 or 1"))
    elif layout.zero > 1:
        what = f"{layout.zero} is not modelled yet: it splits gradients and parameters too"
        problems.append(Problem("layout-not-modelled", "zero", what, "0 or 1", "nearest possible: 1"))
    return problems


def _default(name: str) -> Any:
    return getattr(Layout(), name)


def _single_problem(layout: Layout, name: str) -> Problem | None:
    size = getattr(layout, name)
    what = f"{name} = {size} is not modelled yet"
    return Problem("layout-not-modelled", name, what, "1", "nearest possible: 1") if size > 1 else None


def _filled(layout: Layout, model: Model) -> tuple[Layout, tuple[str, ...]]:
    notes, wanted = [], layout
    layout, chunk_notes = _with_schedule(layout)
    notes += chunk_notes
    if layout.sp is None:
        layout = attrs.evolve(layout, sp=layout.tp > 1)
        notes += ["sp: on, because tp > 1"] if layout.sp else []
    if layout.tp_regather is None:
        layout = attrs.evolve(layout, tp_regather=layout.sp)
        notes += ["tp_regather: on, because sp is on"] if layout.sp else []
    if wanted.seq is None:
        layout = attrs.evolve(layout, seq=min(DEFAULT_SEQ, model.max_positions))
        notes.append(f"seq: {layout.seq} tokens, the smaller of {DEFAULT_SEQ} and {model.max_positions} positions")
    if wanted.global_batch is None:
        layout = attrs.evolve(layout, global_batch=layout.gpus * layout.micro_batch)
        notes.append(f"global_batch: {layout.global_batch} sequences, a micro-batch per GPU whatever the layout")
    return layout, tuple(notes)


def _with_schedule(layout: Layout) -> tuple[Layout, list[str]]:
    """The schedule that was not named, and the chunks that a named one always has."""
    if layout.schedule is None:
        return attrs.evolve(layout, schedule="interleaved" if layout.vpp > 1 else "1f1b"), []
    usual = PIPELINES[layout.schedule].usual_chunks
    if layout.vpp > 1 or usual == 1:
        return layout, []
    return attrs.evolve(layout, vpp=usual), [f"vpp: {usual}, the usual chunks per rank of {layout.schedule}"]


def _length_notes(layout: Layout, model: Model) -> tuple[str, ...]:
    seq = layout.seq or DEFAULT_SEQ
    if seq <= model.max_positions:
        return ()
    return (f"seq: {seq} tokens are more than the {model.max_positions} positions that the model is meant for",)


def _dividing_fix(name: str, value: int, gpus: int, others: int) -> list[str]:
    near = nearest(divisors(gpus // others), value) if gpus % others == 0 else []
    return [f"{name} {either(near)}"] if near else []
