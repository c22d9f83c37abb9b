"""What a prediction is made under: target, profile, efficiency law."""

from __future__ import annotations

import attrs

from stepgraph.errors import refuse, together
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
    return Setting(target, *how(profile, eta))


def how(profile: str, eta: str) -> tuple[Profile, str]:
    """What of a setting is no machine. Raises: InputError for an unknown profile or law, or for both."""
    chosen, law = together(lambda: profile_of(profile), lambda: _law(eta))
    return chosen, law


def _law(eta: str) -> str:
    if eta not in ETA_LAWS:
        raise refuse("eta", "--eta", f"no efficiency law {eta!r}", " or ".join(ETA_LAWS), "name one of them")
    return eta
