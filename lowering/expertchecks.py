"""What expert parallelism asks of a model and a layout, each refusal with the nearest values that work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import isfinite

from stepgraph.errors import Problem
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.model import Experts, Model
from stepgraph.lowering.nearest import divisors, either, listed, nearest

LEAST_CAPACITY = 1e-3
"""A smaller capacity would drop all but a thousandth of the tokens."""


def factor_problems(layout: Layout) -> list[Problem]:
    """Factors that are no factors (code layout-value), and two that exclude each other (capacity-conflict)."""
    found = []
    if layout.capacity_factor is not None and not _is_factor(layout.capacity_factor, LEAST_CAPACITY):
        what = f"{str(layout.capacity_factor)[:40]!r} is no factor"
        found.append(Problem("layout-value", "capacity_factor", what, f"a number from {LEAST_CAPACITY:g} to 1000"))
    if not _is_factor(layout.expert_imbalance, 1):
        what = f"{str(layout.expert_imbalance)[:40]!r} is no imbalance"
        found.append(Problem("layout-value", "expert_imbalance", what, "a number from 1 (even) to 1000"))
    elif layout.capacity_factor is not None and layout.expert_imbalance != 1:
        what = f"{layout.expert_imbalance:g} and a capacity factor: with a capacity every expert gets the same"
        found.append(Problem("capacity-conflict", "expert_imbalance", what, "one of the two", "leave one of them out"))
    if isinstance(layout.mtp, bool) or not isinstance(layout.mtp, int) or layout.mtp < 0:
        found.append(Problem("layout-value", "mtp", f"{str(layout.mtp)[:40]!r} is no count", "0 or more"))
    return found


def _is_factor(value: object, least: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return False
    return least <= value <= 1000


def _experts_of(model: Model) -> list[Experts]:
    return [layer.mlp for layer in model.distinct_layers if isinstance(layer.mlp, Experts)]


def _needless_problems(layout: Layout, model: Model) -> Iterator[Problem]:
    if _experts_of(model):
        return
    for name in ("ep", "etp"):
        if getattr(layout, name) > 1:
            what = f"{name} = {getattr(layout, name)}, but {model.name} has no experts"
            yield Problem("ep-needs-experts", name, what, "1", "nearest possible: 1")
    for name, neutral in (("capacity_factor", None), ("expert_imbalance", 1.0)):
        if getattr(layout, name) != neutral:
            what = f"{name} = {getattr(layout, name)}, but {model.name} has no experts"
            yield Problem("ep-needs-experts", name, what, fix="leave it out")


def _dividing_problems(layout: Layout, model: Model) -> Iterator[Problem]:
    for mixture in _experts_of(model):
        for name, width, word in (
            ("ep", mixture.experts, "experts"),
            ("etp", mixture.expert.ffn, "columns of an expert"),
        ):
            size = getattr(layout, name)
            if width % size:
                what = f"{name} = {size} does not divide {width} {word}"
                near = f"nearest: {either(nearest(divisors(width), size))}"
                yield Problem(
                    f"{name}-experts", name, what, f"{name} that divides {width}: {listed(divisors(width))}", near
                )


def _rank_problems(layout: Layout, model: Model) -> Iterator[Problem]:
    """Experts reuse the ranks of a stage."""
    ranks, share = layout.tp * layout.cp * layout.dp, layout.etp * layout.ep
    if ranks % share:
        what = f"etp * ep = {layout.etp} * {layout.ep} does not divide the {ranks} ranks of a stage (tp * cp * dp)"
        fits = [size for size in divisors(ranks) if size % layout.etp == 0]
        near = either(nearest([size // layout.etp for size in fits], layout.ep)) if fits else "none with this etp"
        yield Problem("ep-ranks", "ep", what, f"ep * etp that divides {ranks}", f"nearest ep: {near}")


def _replicated_problems(layout: Layout, model: Model) -> Iterator[Problem]:
    mixtures = _experts_of(model)
    if mixtures and layout.tp > 1 and not layout.sp:
        what = "experts under tp without sequence parallelism: every rank would send the same tokens"
        yield Problem("moe-needs-sp", "sp", what, "sp on, or tp = 1 (Megatron-LM refuses this too)")
    if layout.etp > 1 and any(mixture.expert.bias for mixture in mixtures):
        what = f"etp = {layout.etp} splits experts that have biases, whose sums it would leave pending"
        yield Problem("etp-bias", "etp", what, "1", "nearest possible: 1")


EXPERT_CHECKS: tuple[Callable[[Layout, Model], Iterable[Problem]], ...] = (
    _needless_problems,
    _dividing_problems,
    _rank_problems,
    _replicated_problems,
)
"""Every check of a filled-in layout against a model's experts."""
