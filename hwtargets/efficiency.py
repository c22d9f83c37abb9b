"""Which share of the peak an op reaches: a constant per named op, or a law of its shape."""

from __future__ import annotations

from math import inf, log10

from stepgraph.errors import did_you_mean, refuse
from stepgraph.hwtargets.target import GemmShapeLaw, RoleEtas, Target

# Output tiles that GEMM libraries choose from; a GPU with a smaller largest_tile skips the big ones.
_TILES = ((256, 256), (256, 128), (128, 256), (128, 128), (64, 256), (256, 64), (64, 128), (128, 64), (64, 64))
_SPLITS = (1, 2, 4, 8)
ROLES = ("fwd", "dx", "dw")
_DROOP_STARTS_S = 0.5e-3


def eta_constant(target: Target, family: str, role: str) -> float:
    """Fitted efficiency of a named op; the target's `gemm` constant where the op has no entry.

    family: qkv, attn_out, mlp_up, mlp_down, lm_head, router, experts_up, experts_down, sdpa, or any other name;
    role: fwd, dx or dw (for sdpa, dx and dw are both the one backward kernel).
    Raises: InputError for another role.
    """
    for name, etas in target.eta_constant.families:
        if name == family:
            return _of_role(etas, role)
    constant = target.eta_constant.gemm
    return _of_role(RoleEtas(constant, constant, constant), role)


def eta_shape_gemm(
    target: Target,
    m: float,
    n: float,
    k: float,
    *,
    role: str,
    groups: int = 1,
    out_bytes: int = 2,
    accumulate: bool = False,
) -> float:
    """Efficiency of a bf16 GEMM from its shape: tile and wave quantization, K saturation, memory side, droop.

    Shapes: (m, k) x (k, n) -> (m, n) as executed, so dW of (T, n, k) is (n, k, T); `groups` such GEMMs in one kernel.
    Formula: over output tiles (tm, tn) and split-K s,
      t_tiles = min of ceil(ceil(m/tm) ceil(n/tn) groups s / SMs) SMs tm tn 2 (ceil(k/s) + k0) / rate
                + [s > 1] 4 s m n groups / (f_hbm beta), rate = peak eta_inf layout / (1 + h (1/tm + 1/tn)),
      t_memory = groups (2 (m k + k n) + m n out_bytes [x 2 if accumulate]) / (f_hbm beta),
      t = (t_tiles^3 + t_memory^3)^(1/3), times 1 + droop max(0, log10(t / 0.5 ms)),
      eta = 2 groups m n k / (peak t).
    The fixed cost of a kernel is left out: `launch.gap_s` is that cost, added per kernel where kernels are counted.
    Raises: InputError for a role other than fwd, dx, dw, or an extent below 1.
    Source: law of this package, fitted to ai-dynamo/aiconfigurator@095f58a systems/data/*/gemm (target files).
    """
    if min(m, n, k, groups) < 1:
        raise refuse("gemm-shape", "GEMM", f"extents {m} x {n} x {k}, groups {groups}", "every one at least 1")
    law, peak = target.eta_shape, target.peak_flops_per_s("bf16")
    beta = law.f_hbm * target.hbm.bandwidth_bytes_per_s
    rate = peak * law.eta_inf * _of_role(law.layout, role)
    tiles_s = _tiles_s(law, target.compute.sms, rate, beta, m, n, k, groups)
    written_bytes = m * n * out_bytes * (2 if accumulate else 1)
    memory_s = groups * (2 * (m * k + k * n) + written_bytes) / beta
    t_s: float = (tiles_s**3 + memory_s**3) ** (1 / 3)
    t_s *= 1 + law.droop * max(0.0, log10(t_s / _DROOP_STARTS_S))
    return 2 * groups * m * n * k / (peak * t_s)


def eta_shape_sdpa(target: Target, seq: float, head_dim: int, role: str) -> float:
    """Attention efficiency from the sequence length: eta_inf / (1 + s0 / seq), on causal FLOPs.

    Head dimensions up to 64 take the 64 law, larger ones the 128 law; dx and dw both mean the backward kernel.
    Source: section "eta.sdpa_shape" of the target file. Raises: InputError for another role or seq below 1.
    """
    _require_role(role)
    if seq < 1:
        raise refuse("sdpa-shape", "attention", f"sequence length {seq}", "at least 1")
    laws = target.eta_sdpa_shape
    forward = laws.fwd_64 if head_dim <= 64 else laws.fwd_128
    law = forward if role == "fwd" else laws.dx
    return law.eta_inf / (1 + law.s0 / seq)


def _tiles_s(law: GemmShapeLaw, sms: int, rate: float, beta: float, m: float, n: float, k: float, groups: int) -> float:
    """Time of the tensor cores under the best tile and split-K. Units: s."""
    splits = [(s, -(-k // s) + law.k0, s * m * n * groups * 4 / beta if s > 1 else 0.0) for s in _SPLITS]
    best = inf
    for tm, tn in _TILES:
        if tm * tn > law.largest_tile:
            continue
        tiles = -(-m // tm) * -(-n // tn) * groups
        wave_s = sms * tm * tn * 2 * (1 + law.h * (1 / tm + 1 / tn)) / rate
        best = min(best, *(-(-tiles * s // sms) * wave_s * depth + reduce_s for s, depth, reduce_s in splits))
    return best


def _of_role(etas: RoleEtas, role: str) -> float:
    if role == "fwd":
        return etas.fwd
    if role == "dx":
        return etas.dx
    _require_role(role)
    return etas.dw


def _require_role(role: str) -> None:
    if role not in ROLES:
        raise refuse("eta-role", "role", f"unknown role {role!r}", "fwd, dx or dw", did_you_mean(role, ROLES))
