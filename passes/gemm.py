"""The compute rule: F / (peak x eta), for matmuls and attention."""

from __future__ import annotations

from math import prod

from stepgraph.hwtargets.efficiency import ROLES, eta_constant, eta_shape_gemm, eta_shape_sdpa
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.rows import Row, Rule, extents, spec_of
from stepgraph.ir.tensor import DTYPE_BYTES
from stepgraph.passes.base import Setting


def role_of(op: Op) -> str:
    """Which of an op's efficiencies applies: forward (recomputed too), input gradient or weight gradient."""
    return op.role if op.phase is Phase.BACKWARD and op.role in ROLES else "fwd"


def gemm_shape(op: Op, row: Row) -> tuple[int, int, int]:
    """M, N, K of a contraction of A and B on one rank; of one expert's where experts are grouped.

    K: letters that A and B share and the result lacks. M: letters of A in the result; N: those of B that A lacks, so
    that the heads of a batched GEMM count once. Experts that both operands and the result have are a batch of GEMMs,
    each with its fraction of all tokens; to a router they are a width.
    """
    reads, writes = spec_of(op, row)
    sizes = extents(op, row)
    if all("E" in letters for letters in (*reads[:2], writes[0])):
        sizes = {**sizes, "E": 1}
    kept = set(writes[0])
    m = _product(reads[0], kept, sizes, op)
    n = prod(sizes[letter] for letter in reads[1] if letter in kept and letter not in reads[0])
    k = _product(reads[0], set(reads[0]) - kept, sizes, op)
    return m, n, k


def _product(letters: str, chosen: set[str], sizes: dict[str, int], op: Op) -> int:
    """Product of some letters' extents, times the fraction of tokens that exists where tokens are among them."""
    part, whole = op.inputs[0].fraction if "s" in chosen else (1, 1)
    return max(1, prod(sizes[letter] for letter in letters if letter in chosen) * part // whole)


def compute_s(op: Op, row: Row, flops: int, setting: Setting) -> float:
    """Seconds under the compute rule: F / (peak eta).

    The efficiency is the named op's constant, or the shape law's (attention: of the keys that a query may see). GEMMs stay on this rule whatever their intensity.
    Source: How to Think About Asymptotic Times, rule 1.
    """
    peak = setting.target.peak_flops_per_s(math_dtype(op))
    return flops / (peak * efficiency(op, row, setting))


def efficiency(op: Op, row: Row, setting: Setting) -> float:
    """The fraction of the dense peak that the op reaches."""
    role = role_of(op)
    if setting.eta == "constant":
        return eta_constant(setting.target, str(op.attr("family")), role)
    if row.rule is Rule.ATTENTION:
        sizes = extents(op, row)
        seen = min(sizes["t"], int(op.attr("window") or op.attr("chunk") or sizes["t"]))
        return eta_shape_sdpa(setting.target, seen, sizes["c"], role)
    m, n, k = gemm_shape(op, row)
    accumulates = role == "dw"
    out_bytes = 4 if accumulates else DTYPE_BYTES[op.outputs[0].dtype]
    return eta_shape_gemm(setting.target, m, n, k, role=role, out_bytes=out_bytes, accumulate=accumulates)


def math_dtype(op: Op) -> str:
    """The type whose peak applies: the first type below fp32 that the op touches, as in the source's F_peak.

    A router with bf16 operands and fp32 logits multiplies in bf16 and accumulates in fp32.
    """
    return next((t.dtype for t in (*op.inputs, *op.outputs) if t.dtype in ("bf16", "fp16", "fp8")), "fp32")
