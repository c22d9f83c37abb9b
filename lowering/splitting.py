"""Which virtual stage gets which layers: dealt evenly, with fixed counts at the ends, or as a notation says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stepgraph.errors import InputError, Problem
from stepgraph.ir.pipelines import PIPELINES, stages_on_ranks
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.layoutsigns import WHERE
from stepgraph.lowering.nearest import either, multiples_around, size_problem
from stepgraph.lowering.pipelayout import PipelineSplit, StageSpec, read_layout

FIRST = "first_stage_layers"
LAST = "last_stage_layers"


def layout_split(layout: Layout, n_layers: int) -> PipelineSplit:
    """What each virtual stage holds under a layout whose schedule is known. Raises: as `split_of`."""
    bent = PIPELINES[layout.schedule or "1f1b"].v_shaped
    return split_of(n_layers, layout.pp, layout.vpp, *layout.split, mtp=layout.mtp, v_shaped=bent)


def split_of(
    n_layers: int,
    pp: int,
    vpp: int,
    pipeline_layout: str | None = None,
    first: int | None = None,
    last: int | None = None,
    mtp: int | None = None,
    *,
    v_shaped: bool = False,
) -> PipelineSplit:
    """What each virtual stage of a model holds: as the notation says where there is one, else dealt evenly.

    mtp: multi-token-prediction layers of the model; None takes whatever the notation places. v_shaped: the stream
    comes back over the ranks, so that the first rank holds the first and the last stage.

    Raises: InputError with everything that does not fit: layout-value, pipeline-syntax, pipeline-order,
    pipeline-conflict, pipeline-stages, pipeline-layers, pipeline-mtp, and those of `balanced_split`.
    """
    if pipeline_layout is None:
        return balanced_split(n_layers, pp, vpp, first, last, mtp or 0, v_shaped=v_shaped)
    sizes = _size_problems({"layers": n_layers, "pp": pp, "vpp": vpp})
    split, problems = read_layout(pipeline_layout)
    problems += [_conflict(name) for name, count in ((FIRST, first), (LAST, last)) if count is not None]
    if split is not None and not sizes:
        problems += _fit_problems(split, n_layers, pp, vpp, mtp)
    if split is None or sizes or problems:
        raise InputError(sizes + problems)
    return split


def balanced_split(
    n_layers: int,
    pp: int,
    vpp: int = 1,
    first: int | None = None,
    last: int | None = None,
    mtp: int = 0,
    *,
    v_shaped: bool = False,
) -> PipelineSplit:
    """Layers dealt evenly over pp * vpp virtual stages, the extra ones to stages in the middle.

    first, last: layers of the first and of the last rank, over all its vpp stages; the other ranks share the rest.
    mtp: multi-token-prediction layers; they stand before the head.

    Raises: InputError: layout-value, pp-layers, stage-layers, each with the nearest counts that work.
    Source: NVIDIA/Megatron-LM megatron/core/transformer/transformer_config.py, num_layers_in_first_pipeline_stage
    (which also refuses a rest that does not divide; here it is dealt unevenly).
    """
    fixed = {name: count for name, count in ((FIRST, first), (LAST, last)) if count is not None}
    problems = _size_problems({"layers": n_layers, "pp": pp, "vpp": vpp, **fixed})
    problems = problems or list(_count_problems(n_layers, pp, vpp, fixed))
    if problems:
        raise InputError(problems)
    ranks = {0 if name == FIRST else pp - 1: count for name, count in fixed.items()}
    rest = iter(deal_evenly(n_layers - sum(ranks.values()), (pp - len(ranks)) * vpp))
    order = stages_on_ranks(pp, vpp, v_shaped=v_shaped)
    counts = [ranks[rank] // vpp if rank in ranks else next(rest) for rank in order]
    end = len(counts) - 1
    return PipelineSplit(tuple(StageSpec(v == 0, n, mtp * (v == end), v == end) for v, n in enumerate(counts)))


def deal_evenly(n_layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage: n_layers // stages, and one more on the n_layers % stages stages in the middle.

    The first of these is (stages - n_layers % stages) // 2. Over no stages nothing is dealt.
    """
    if not stages:
        return ()
    base, extra = divmod(n_layers, stages)
    start = (stages - extra) // 2
    return tuple(base + (start <= stage < start + extra) for stage in range(stages))


def _size_problems(sizes: Mapping[str, int]) -> list[Problem]:
    return [problem for name, value in sizes.items() if (problem := size_problem(name, value))]


def _conflict(name: str) -> Problem:
    what = f"{WHERE} already says how many layers each stage holds"
    return Problem("pipeline-conflict", name, what, "one of the two", f"leave {name} or {WHERE} out")


def _fit_problems(split: PipelineSplit, n_layers: int, pp: int, vpp: int, mtp: int | None) -> Iterator[Problem]:
    """What the notation says against the sizes of the model and of the pipeline."""
    found, wanted = len(split.stages), pp * vpp
    if found != wanted:
        yield _stages_problem(found, pp, vpp)
    if split.layers != n_layers:
        yield _letters_problem("pipeline-layers", "t", split.layers, n_layers)
    if mtp is not None and split.mtp != mtp:
        yield _letters_problem("pipeline-mtp", "m", split.mtp, mtp)
    stage = next((v for v, held in enumerate(split.stages) if held.mtp), wanted)
    if found == wanted and stage < wanted - pp:
        what = f"m stands in stage {stage}, which is chunk {stage // pp} of rank {stage % pp}"
        expected = f"m in the last chunk of a rank: stages {wanted - pp} to {wanted - 1}"
        yield Problem("pipeline-mtp", WHERE, what, expected, "move m to just before L")


def _stages_problem(found: int, pp: int, vpp: int) -> Problem:
    wanted = pp * vpp
    fixes = [f"vpp {found // pp}"] if found % pp == 0 else []
    fixes += [f"pp {found // vpp}"] if found % vpp == 0 else []
    few = f"add {wanted - found} stages" if found < wanted else f"drop {found - wanted} stages"
    what = f"{found} stages for pp * vpp = {pp} * {vpp} = {wanted}"
    expected = f"{wanted} stages, so {wanted - 1} times '|'"
    return Problem("pipeline-stages", WHERE, what, expected, f"{' or '.join(fixes)}, or {few}" if fixes else few)


def _letters_problem(code: str, letter: str, found: int, wanted: int) -> Problem:
    what = f"{letter} stands {found} times and the model has {wanted} {'layers' if letter == 't' else 'MTP layers'}"
    fix = f"add {wanted - found}" if found < wanted else f"take {found - wanted} away"
    return Problem(code, WHERE, what, f"{wanted} times {letter}", fix)


def _count_problems(n_layers: int, pp: int, vpp: int, fixed: Mapping[str, int]) -> Iterator[Problem]:
    """Counts that cannot be: of the ends by themselves, and of what they leave for the other ranks."""
    if pp == 1 and len(fixed) == 2:
        what = "pp = 1 has one rank, the first and the last"
        yield Problem("stage-layers", LAST, what, "one of the two counts", f"leave {LAST} out, or take pp of 2 or more")
        return
    for name, count in fixed.items():
        if count % vpp:
            what = f"{count} layers do not divide over the {vpp} stages (vpp) of the rank"
            near = f"nearest: {either(multiples_around(count, vpp))}"
            yield Problem("stage-layers", name, what, f"a multiple of {vpp}", near)
    stages, left = (pp - len(fixed)) * vpp, n_layers - sum(fixed.values())
    if not stages and left:
        yield _whole_problem(n_layers, vpp, fixed)
    elif left < stages:
        yield _rest_problem(n_layers, pp, vpp, fixed) if fixed else _empty_problem(n_layers, pp, vpp)


def _whole_problem(n_layers: int, vpp: int, fixed: Mapping[str, int]) -> Problem:
    """The ends are all there is, and do not add up."""
    what = f"{' + '.join(map(str, fixed.values()))} layers on the only ranks are not the model's {n_layers}"
    fix = _possible({name: n_layers - sum(fixed.values()) + count for name, count in fixed.items()}, vpp)
    return Problem("stage-layers", "/".join(fixed), what, f"{n_layers} together", fix)


def _rest_problem(n_layers: int, pp: int, vpp: int, fixed: Mapping[str, int]) -> Problem:
    """The ends leave less than one layer for each stage of the other ranks."""
    stages, left = (pp - len(fixed)) * vpp, n_layers - sum(fixed.values())
    rest = f"{left} layers" if left >= 0 else "less than no layer"
    what = f"{' + '.join(map(str, fixed.values()))} of {n_layers} layers leave {rest} for the other {stages} stages"
    spare = {name: n_layers - stages - (sum(fixed.values()) - count) for name, count in fixed.items()}
    fix = _possible({name: most // vpp * vpp for name, most in spare.items()}, vpp)
    expected = f"at most {max(n_layers - stages, 0)} together: one layer or more for each stage"
    return Problem("stage-layers", "/".join(fixed), what, expected, fix or "use fewer stages (pp, vpp)")


def _possible(counts: Mapping[str, int], vpp: int) -> str:
    """The counts that a rank can hold, as a fix; nothing when there is none."""
    good = [f"{name} {count}" for name, count in counts.items() if count >= vpp and count % vpp == 0]
    return f"nearest possible: {' or '.join(good)}" if good else ""


def _empty_problem(n_layers: int, pp: int, vpp: int) -> Problem:
    """More stages than layers."""
    stages = f"{pp}" if vpp == 1 else f"pp * vpp = {pp} * {vpp} = {pp * vpp}"
    what = f"{stages} stages for {n_layers} layers: a stage would be empty"
    name, near = ("pp", n_layers // vpp) if pp > n_layers or vpp == 1 else ("vpp", n_layers // pp)
    return Problem("pp-layers", name, what, f"1 to {max(near, 1)}", f"nearest possible: {max(near, 1)}")
