"""Where ranks sit: scale-up domains are filled with whole groups, as a topology-aware scheduler fills them."""

from __future__ import annotations

import attrs

from stepgraph.hwtargets.target import Target
from stepgraph.ir.program import Program
from stepgraph.passes.base import Setting


def seat(setting: Setting, program: Program) -> Setting:
    """The setting with as many ranks per scale-up domain as the program's groups can fill evenly.

    A domain of 72 with groups of 8 is filled; with groups of 32 or 64, only 64 of its GPUs are used, because a group
    that straddles two domains would be held up by its smaller part. Groups of one domain at most decide, then those
    that span several. Raises: nothing; without a target domain, or when all ranks fit in one, nothing changes.
    """
    domain = setting.target.scale_up.domain
    seated = ranks_per_domain(cuts_of(program), domain) if domain else domain
    if seated == domain:
        return setting
    level = attrs.evolve(setting.target.scale_up, domain=seated)
    return attrs.evolve(setting, target=attrs.evolve(setting.target, scale_up=level))


def seating_note(machine: Target, seated: Target) -> tuple[str, ...]:
    """What to tell the user when domains are not filled."""
    whole, used = machine.scale_up.domain, seated.scale_up.domain
    if whole == used:
        return ()
    return (f"{used} of the {whole} GPUs of each scale-up domain are used, so that no group straddles two unevenly",)


def cuts_of(program: Program) -> tuple[int, ...]:
    """Numbers of consecutive ranks that belong together, smallest first: stride x size of every axis in use."""
    axes = {axis for graph in program.templates for op in graph.ops for axis in op.group}
    return tuple(sorted({axis.stride * axis.size for axis in axes} | {axis.stride for axis in axes}))


def ranks_per_domain(cuts: tuple[int, ...], domain: int) -> int:
    """How many ranks of a domain are used.

    cuts: as `cuts_of` has them, the last one being all ranks that communicate. Formula: with c the largest cut that
    fits in a domain, the largest multiple of c up to `domain` that divides all larger cuts but the last, if that
    uses at least half of the domain; else the largest multiple of c.
    """
    if not cuts or cuts[-1] <= domain:
        return domain
    whole = max((cut for cut in cuts if cut <= domain), default=1)
    wider = [cut for cut in cuts[:-1] if cut > domain]
    most = domain // whole * whole
    even = (ranks for ranks in range(most, domain // 2, -whole) if not any(cut % ranks for cut in wider))
    return next(even, most)
