"""What a cluster is, as records: peaks, memory, links, launch and efficiency constants of one kind of GPU.

The numbers are plain floats, because they are read millions of times; where each one comes from stays reachable
through `Target.figures()`.
"""

from __future__ import annotations

from typing import TypeAlias

import attrs

from stepgraph.errors import InputError, did_you_mean, refuse

BreakPoints: TypeAlias = tuple[tuple[float, float], ...]


@attrs.frozen
class Figure:
    """One sourced figure of a target file.

    value: a number, or for `alpha` the break points ((up to bytes, efficiency), ...), last one at infinity;
    source: a public document, data set or repository path; status: spec, measured, fitted or assumed.
    """

    value: float | BreakPoints
    source: str
    status: str


@attrs.frozen
class Hbm:
    """Device memory. Units: bytes, bytes/s; `reachable_fraction` is the share of the bandwidth that a kernel sees."""

    size_bytes: float
    bandwidth_bytes_per_s: float
    reachable_fraction: float

    @property
    def effective_bytes_per_s(self) -> float:
        """What a streaming kernel reaches: bandwidth * reachable_fraction. Units: bytes/s."""
        return self.bandwidth_bytes_per_s * self.reachable_fraction


@attrs.frozen
class Compute:
    """The compute units: how many, and the last-level cache that they share. Units: bytes."""

    sms: int
    l2_bytes: float


@attrs.frozen
class LinkLevel:
    """One level of the network, seen by one GPU in one direction.

    bandwidth_bytes_per_s: beta; t0_s: fixed cost of a collective; t_link_s: cost of each of its P - 1 steps;
    alpha: share of beta that a message reaches, by its size; domain: ranks that one instance of the level joins
    (None where it joins all of them).
    """

    bandwidth_bytes_per_s: float
    t0_s: float
    t_link_s: float
    alpha: BreakPoints
    domain: int | None = None

    @property
    def ranks(self) -> int:
        """Ranks that one instance joins; 1 where no figure says it."""
        return self.domain or 1


@attrs.frozen
class Launch:
    """What a kernel costs besides its work. Units: s.

    gap_s: device time between two kernels, added per kernel; host_issue_s: host time to issue one; graph_node_s: the
    same for a kernel that is a node of a CUDA graph, None where no figure says it.
    """

    gap_s: float
    host_issue_s: float
    graph_node_s: float | None = None


@attrs.frozen
class RoleEtas:
    """Efficiency of one named op: forward, input gradient (dx), weight gradient (dw)."""

    fwd: float
    dx: float
    dw: float


@attrs.frozen
class EtaConstants:
    """One efficiency per named op; `gemm` answers for every op that has no entry of its own."""

    gemm: float
    families: tuple[tuple[str, RoleEtas], ...]


@attrs.frozen
class GemmShapeLaw:
    """Constants of the GEMM shape law (`efficiency.eta_shape_gemm` has the formula).

    eta_inf: rate of a long, perfectly tiled GEMM; k0: K lost to prologue and epilogue of a tile; h: cost of small
    tiles; f_hbm: reachable share of the memory bandwidth; droop: slowdown per decade above 0.5 ms;
    largest_tile: most output elements of a tile; layout: factors of the rate per role.
    """

    eta_inf: float
    k0: float
    h: float
    f_hbm: float
    droop: float
    largest_tile: int
    layout: RoleEtas


@attrs.frozen
class SdpaLaw:
    """Attention efficiency by sequence length: eta = eta_inf / (1 + s0 / s), on causal FLOPs."""

    eta_inf: float
    s0: float


@attrs.frozen
class SdpaLaws:
    """Attention laws: forward at head dimension 64 and 128, and backward."""

    fwd_64: SdpaLaw
    fwd_128: SdpaLaw
    dx: SdpaLaw


@attrs.frozen(cache_hash=True)
class Target:
    """One kind of GPU and the network around it.

    peaks_flops_per_s: (dtype, dense peak) pairs; ask with `peak_flops_per_s(dtype)`. topk_bytes_per_s: how fast a
    top-k kernel reads scores, far below the HBM rate.
    """

    name: str
    title: str
    peaks_flops_per_s: tuple[tuple[str, float], ...]
    hbm: Hbm
    compute: Compute
    topk_bytes_per_s: float
    scale_up: LinkLevel
    nic: LinkLevel
    launch: Launch
    eta_constant: EtaConstants
    eta_shape: GemmShapeLaw
    eta_sdpa_shape: SdpaLaws
    sourced: tuple[tuple[str, Figure], ...] = attrs.field(repr=False)

    def peak_flops_per_s(self, dtype: str) -> float:
        """Dense peak for a dtype. Units: FLOP/s. Raises: InputError where the GPU has no such peak."""
        for known, peak in self.peaks_flops_per_s:
            if known == dtype:
                return peak
        raise _no_peak(self, dtype)

    def figures(self) -> tuple[tuple[str, Figure], ...]:
        """Every figure under its dotted key ("hbm.size_bytes"), in file order, with its source and status."""
        return self.sourced


def _no_peak(target: Target, dtype: str) -> InputError:
    known = [name for name, _ in target.peaks_flops_per_s]
    what = f"{target.name} has no peak for {dtype!r}"
    return refuse("target-dtype", "dtype", what, f"one of {', '.join(known)}", did_you_mean(dtype, known))
