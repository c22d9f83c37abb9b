"""What a prediction is made under: target, profile, efficiency law."""

from __future__ import annotations

import attrs

from stepgraph.errors import refuse
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
    if eta not in ETA_LAWS:
        raise refuse("eta", "--eta", f"no efficiency law {eta!r}", " or ".join(ETA_LAWS), "name one of them")
    return Setting(target, profile_of(profile), eta)
