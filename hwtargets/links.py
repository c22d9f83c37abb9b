"""How long a collective or a transfer takes, by where the ranks of its group sit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf

import attrs

from stepgraph.errors import refuse
from stepgraph.hwtargets.target import Figure, LinkLevel, Target

# NCCL changes protocol (LL, LL128, Simple) with the message size. Inside a node measurements are slower than this.
DEFAULT_BREAK_POINTS = ((32768.0, 0.5), (1048576.0, 0.7), (inf, 0.9))
DEFAULT_ALPHA = Figure(
    DEFAULT_BREAK_POINTS,
    'generic default: "How to Think About Asymptotic Times in Transformer Forward Passes", section 2: '
    "LL, LL128, Simple around 32 KB and 1 MB",
    "assumed",
)


@attrs.frozen
class GroupGeometry:
    """Where a process group sits: its ranks, the fewest of them in any scale-up domain it touches, those domains.

    The fewest count: they have the fewest NICs to let a ring through, and the most peers elsewhere.
    """

    size: int
    ranks_per_domain: int
    domains: int


def group_geometry(offsets: Sequence[int], domain: int) -> GroupGeometry:
    """Geometry of a group from the offsets of its ranks, the first one standing at rank 0.

    domain: consecutive ranks that one scale-up domain joins.
    Example: offsets (0, 4, 8, 12) in domains of 8 are 4 ranks, 2 per domain, 2 domains.
    Raises: InputError for an empty group, a repeated rank or a domain below 1.
    """
    if domain < 1 or not offsets or len(set(offsets)) < len(offsets):
        what = f"offsets {tuple(offsets)} in domains of {domain}"
        raise refuse("group-geometry", "process group", what, "distinct offsets, domains of at least 1 rank")
    per_domain = Counter(offset // domain for offset in offsets)
    return GroupGeometry(len(offsets), min(per_domain.values()), len(per_domain))


def alpha(level: LinkLevel, size_bytes: float) -> float:
    """Share of the level's bandwidth that a message of this size reaches; break points are inclusive."""
    for up_to_bytes, share in level.alpha:
        if size_bytes <= up_to_bytes:
            return share
    return level.alpha[-1][1]


def transfer_s(level: LinkLevel, size_bytes: float, beta_bytes_per_s: float) -> float:
    """S / (alpha(S) beta), which never falls as S grows.

    A larger message may use a better protocol, but it is not faster than a smaller one: where a break point would make
    it so, the time at the break point holds.
    """
    held = (bound / share for bound, share in level.alpha if bound < size_bytes)
    return max(size_bytes / alpha(level, size_bytes), *held, 0.0) / beta_bytes_per_s


def ring_s(target: Target, geometry: GroupGeometry, size_bytes: float) -> float:
    """Time of one ring reduce-scatter or all-gather; an all-reduce is the two of them.

    size_bytes: S, the whole buffer (a rank's share times the group's size).
    Formula: t0 + (P - 1) t_link + (P - 1)/P S / (alpha(S) beta). Inside one domain all constants are the scale-up
    level's. Across domains the latencies and alpha are the NIC's, with beta = min(beta_scale_up, ranks per domain *
    beta_nic), because the ring enters and leaves a domain through the NICs of all its ranks; and it is never faster
    than the part inside a domain. Units: s, 0 for a group of one.
    Source: NVIDIA/nccl-tests doc/PERFORMANCE.md (bandwidth term); aliyun/SimAI astra-sim-alibabacloud
    astra-sim/system/calbusbw.cc (NICs per node).
    """
    ranks = geometry.size
    if ranks <= 1:
        return 0.0
    near, moved = target.scale_up, (ranks - 1) / ranks
    inside_s = transfer_s(near, size_bytes, near.bandwidth_bytes_per_s)
    if geometry.domains == 1:
        return _steps_s(near, ranks) + moved * inside_s
    beta = min(near.bandwidth_bytes_per_s, geometry.ranks_per_domain * target.nic.bandwidth_bytes_per_s)
    across_s = transfer_s(target.nic, size_bytes, beta)
    if geometry.ranks_per_domain > 1:
        across_s = max(across_s, inside_s)
    return _steps_s(target.nic, ranks) + moved * across_s


def all_to_all_s(target: Target, geometry: GroupGeometry, size_bytes: float) -> float:
    """Time of one all-to-all, the scale-up and the NIC part running side by side.

    size_bytes: S, what one rank sends in all, its own share included.
    Formula: t0 + (P - 1) t_link + max(S (g - 1)/P / (alpha_up beta_up), S (P - g)/P / (alpha_nic beta_nic)) with g
    ranks of the group in a domain; t0 and t_link are the NIC's as soon as the group leaves the domain. Each rank uses
    its own NIC only. Units: s, 0 for a group of one. Source: NVIDIA/nccl-tests#130 (the inter-node share).
    """
    ranks, near = geometry.size, geometry.ranks_per_domain
    if ranks <= 1:
        return 0.0
    near_s = (near - 1) / ranks * _whole_s(target.scale_up, size_bytes)
    far_s = (ranks - near) / ranks * _whole_s(target.nic, size_bytes)
    return _steps_s(_slowest_level(target, geometry), ranks) + max(near_s, far_s)


def point_to_point_s(target: Target, crosses_domain: bool, size_bytes: float) -> float:
    """Time of one send and its receive: t0 + t_link + S / (alpha(S) beta) of the level that it uses. Units: s."""
    level = target.nic if crosses_domain else target.scale_up
    return level.t0_s + level.t_link_s + _whole_s(level, size_bytes)


def _slowest_level(target: Target, geometry: GroupGeometry) -> LinkLevel:
    return target.nic if geometry.domains > 1 else target.scale_up


def _steps_s(level: LinkLevel, ranks: int) -> float:
    return level.t0_s + (ranks - 1) * level.t_link_s


def _whole_s(level: LinkLevel, size_bytes: float) -> float:
    return transfer_s(level, size_bytes, level.bandwidth_bytes_per_s)
