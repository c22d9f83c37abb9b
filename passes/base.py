"""What a prediction is made under: target, profile, efficiency law."""

from __future__ import annotations

import attrs

from stepgraph.errors import InputError, Problem
from stepgraph.hwtargets.target import Target
from stepgraph.passes.profiles import Profile, profile_of

ETA_LAWS = ("constant", "shape")


@attrs.frozen
class Setting:
    """Target, profile and efficiency law, resolved.

    eta: "constant" (one efficiency per named op, the source text's way) or "shape" (tiles, waves and HBM side).
    """

    target: Target
    profile: Profile
    eta: str = "constant"


def setting(target: Target, profile: str = "reference", eta: str = "constant") -> Setting:
    """A setting from names. Raises: InputError for an unknown profile or law."""
    problems = []
    if eta not in ETA_LAWS:
        what = f"no efficiency law {eta!r}"
        problems.append(Problem("eta", "--eta", what, " or ".join(ETA_LAWS), "name one of them"))
    try:
        chosen = profile_of(profile)
    except InputError as refused:
        raise InputError((*refused.problems, *problems)) from None
    if problems:
        raise InputError(problems)
    return Setting(target, chosen, eta)
