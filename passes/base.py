"""What a prediction is made under: a target, and how software runs on it."""

from __future__ import annotations

import attrs

from stepgraph.errors import refuse, together
from stepgraph.hwtargets.target import Target
from stepgraph.passes.launch import Launching, launch_name, launching
from stepgraph.passes.overlap.policies import Policy, parse_policy
from stepgraph.passes.pipeline.modes import Mode, parse_mode
from stepgraph.passes.profiles import Profile, profile_of

ETA_LAWS = ("constant", "shape")

AUTO = "auto"
"""Transfers between stages as the framework that a schedule comes from issues them."""


@attrs.frozen
class Software:
    """How software runs: profile, efficiency law, launch model, overlap and point-to-point mode, resolved.

    eta: "constant" (one efficiency per named op, the source text's way) or "shape" (tiles, waves and HBM side).
    launch: "additive", "host" or "both"; cuda_graphs: whether the host issues graphs instead of kernels. overlap: which
    collectives run under computation. p2p: how a pipeline's transfers are issued; None is what is usual for its schedule.
    """

    profile: Profile
    eta: str = "constant"
    launch: str = "both"
    cuda_graphs: bool = False
    overlap: Policy = Policy()
    p2p: Mode | None = None

    def on(self, target: Target) -> Setting:
        """The setting on a target. Raises: InputError (launch) when the target lacks a figure that is needed."""
        launching(target, self.launch, cuda_graphs=self.cuda_graphs)
        names = (self.profile, self.eta, self.launch, self.cuda_graphs, self.overlap, self.p2p)
        return Setting(*names, target=target)


@attrs.frozen
class Setting(Software):
    """What a prediction is made under: software on a target."""

    target: Target = attrs.field(kw_only=True)

    @property
    def launching(self) -> Launching:
        """What launches cost here. Raises: InputError (launch)."""
        return launching(self.target, self.launch, cuda_graphs=self.cuda_graphs)


def software(
    profile: str = "reference",
    eta: str = "constant",
    launch: str = "both",
    *,
    cuda_graphs: bool = False,
    overlap: str = "none",
    p2p: str = AUTO,
) -> Software:
    """How software runs, from names. Raises: InputError for unknown names, all of them at once."""
    rows, law, launches, policy, mode = together(
        lambda: profile_of(profile),
        lambda: _law(eta),
        lambda: launch_name(launch, cuda_graphs=cuda_graphs),
        lambda: parse_policy(overlap),
        lambda: None if p2p.strip().lower() == AUTO else parse_mode(p2p),
    )
    return Software(rows, law, launches, cuda_graphs, policy, mode)


def setting(
    target: Target,
    profile: str = "reference",
    eta: str = "constant",
    launch: str = "both",
    *,
    cuda_graphs: bool = False,
    overlap: str = "none",
    p2p: str = AUTO,
) -> Setting:
    """A setting from names. Raises: InputError for unknown names, all of them at once."""
    return software(profile, eta, launch, cuda_graphs=cuda_graphs, overlap=overlap, p2p=p2p).on(target)


def _law(eta: str) -> str:
    if eta not in ETA_LAWS:
        raise refuse("eta", "--eta", f"no efficiency law {eta!r}", " or ".join(ETA_LAWS), "name one of them")
    return eta
