"""Profiles: how software executes each kind of op. One row per kind: HBM passes per operand, kernels, source.

`reference` counts as the text that the project implements does: one kernel per op, norm 3/5, RoPE 3/3, residual 2/3,
GLU 3/5. `exact` counts tensor by tensor what the best single-op kernels move. Neither fuses ops.
"""

from __future__ import annotations

from types import MappingProxyType

import attrs

from stepgraph.errors import did_you_mean, refuse
from stepgraph.ir.op import Op
from stepgraph.ir.table import UnknownKindError

_PAPER = "How to Think About Asymptotic Times in Transformer Forward Passes, rule 2"
_TE = "NVIDIA/TransformerEngine transformer_engine/common/normalization"
_MULTI_TENSOR = "NVIDIA/TransformerEngine transformer_engine/common/multi_tensor/multi_tensor_apply.cuh"
_MCORE_LOSS = "NVIDIA/Megatron-LM megatron/core/tensor_parallel/cross_entropy.py, kernel by kernel"
_NCCL = "one NCCL kernel per call"

NORM_BLOCKS = 132
"""Thread blocks that leave a partial weight gradient each in a norm's backward: one per SM of an H100."""

ELEMENTS_PER_LAUNCH = 65536 * 320
"""What one multi-tensor launch updates: 320 blocks of 65,536 elements."""


@attrs.frozen
class Execution:
    """How one kind runs.

    reads, writes: HBM passes over each operand and each result; a single number stands for all of them.
    kernels: launches of one execution; with elements_per_kernel, one per that many elements of the first operand.
    """

    kind: str
    reads: tuple[float, ...]
    writes: tuple[float, ...]
    kernels: int
    source: str
    elements_per_kernel: int = 0


@attrs.frozen
class Profile:
    """A named table of executions."""

    name: str
    rows: MappingProxyType[str, Execution] = attrs.field(hash=False)

    def __getitem__(self, kind: str) -> Execution:
        """The row of a kind. Raises: UnknownKindError, with a suggestion."""
        row = self.rows.get(kind)
        if row is None:
            raise UnknownKindError(f"profile {self.name!r} has no row for {kind!r}; {did_you_mean(kind, self.rows)}")
        return row


_PARTIALS = 2 * NORM_BLOCKS + 1  # every block's partial sum is written and read once, then the sum is written
_FREE = (0.0,)
_ONCE = (1.0,)

SHARED = (
    Execution("embedding", (1, 0), (2,), 1, "rows are gathered (read) and written"),
    Execution("embedding_dw", (3, 1), (3,), 2, "zero, add rows, add to the fp32 gradient: 12 bytes per table element"),
    Execution("position_add", _ONCE, _ONCE, 1, "R x, R table, W y"),
    Execution("position_add_dw", (1, 0), (2,), 1, "R dy, add to the fp32 gradient"),
    Execution("linear", _ONCE, _ONCE, 1, "R X, R W, W Y"),
    Execution("linear_dx", _ONCE, _ONCE, 1, "R dY, R W, W dX"),
    Execution("linear_dw", _ONCE, (2,), 1, "R dY, R X, add to the fp32 gradient in the GEMM's epilogue"),
    Execution("sdpa", _ONCE, _ONCE, 1, "Dao-AILab/flash-attention: R q k v, W o and log-sum-exp"),
    Execution("sdpa_dx", _ONCE, _ONCE, 3, "Dao-AILab/flash-attention: row sums, main kernel, convert dq"),
    Execution("split_qkv", _FREE, _FREE, 0, "views"),
    Execution("join_qkv", _FREE, _FREE, 0, "gradients are written into one buffer"),
    Execution("grad_add", _ONCE, _ONCE, 1, f"{_PAPER}: residual add, backward 3"),
    Execution("bias_add", _ONCE, _ONCE, 1, "R y, R bias, W y"),
    Execution("bias_add_dw", _ONCE, _ONCE, 1, "R dy, W dbias"),
    Execution("swiglu", _ONCE, _ONCE, 1, f"{_PAPER}: GLU forward 3 of m f (the packed operand is 2 m f)"),
    Execution("swiglu_dx", _ONCE, _ONCE, 1, f"{_PAPER}: GLU backward 5 of m f"),
    Execution("gelu", _ONCE, _ONCE, 1, "R x, W y"),
    Execution("gelu_dx", _ONCE, _ONCE, 1, "R dy, R x, W dx"),
    Execution("relu", _ONCE, _ONCE, 1, "R x, W y"),
    Execution("relu_dx", _ONCE, _ONCE, 1, "R dy, R x, W dx"),
    Execution("slice", _FREE, _FREE, 0, "a view"),
    Execution("reduce_scatter", _FREE, _FREE, 1, _NCCL),
    Execution("all_reduce", _FREE, _FREE, 1, _NCCL),
    Execution("all_to_all", _FREE, _FREE, 1, _NCCL),
    Execution("all_gather", _FREE, _FREE, 1, _NCCL),
    Execution("send", _FREE, _FREE, 1, _NCCL),
    Execution("recv", _FREE, _FREE, 1, _NCCL),
    Execution("grad_norm", _ONCE, _FREE, 1, _MULTI_TENSOR, ELEMENTS_PER_LAUNCH),
)
"""Kinds that both profiles execute alike."""

REFERENCE = (
    Execution("rmsnorm", (2, 0), (1, 0), 1, f"{_PAPER}: norm forward 3 (two sweeps, one write)"),
    Execution("rmsnorm_dx", (1, 1, 0, 0), (1,), 1, f"{_PAPER}: norm backward 5, of which 3 for the input"),
    Execution("rmsnorm_dw", (1, 1, 0), (0,), 1, f"{_PAPER}: norm backward 5, of which 2 for the weight"),
    Execution("layernorm", (2, 0, 0), (1, 0, 0), 1, f"{_PAPER}: norm forward 3"),
    Execution("layernorm_dx", (1, 1, 0, 0, 0), (1,), 1, f"{_PAPER}: norm backward 5, of which 3 for the input"),
    Execution("layernorm_dw", (1, 1, 0, 0), (0, 0), 1, f"{_PAPER}: norm backward 5, of which 2 for the weights"),
    Execution("rope", (2,), (1,), 1, f"{_PAPER}: RoPE 3 (x, its rotated half, out)"),
    Execution("rope_dx", (2,), (1,), 1, f"{_PAPER}: RoPE 3"),
    Execution("add", (1, 0), (1,), 1, f"{_PAPER}: residual forward 2 (the branch is still in L2)"),
    Execution("cross_entropy", (1, 0), (0, 9), 18, f"{_MCORE_LOSS}: 19 bf16 passes"),
    Execution("cross_entropy_dx", (2, 0), (3,), 8, f"{_MCORE_LOSS}: 7 bf16 passes"),
    Execution(
        "adamw",
        (1, 1, 0, 0),
        (1, 1, 0, 0),
        1,
        "How to Think About Asymptotic Times, section 7: both moments read and written, 16 bytes per parameter",
        ELEMENTS_PER_LAUNCH,
    ),
)

EXACT = (
    Execution("rmsnorm", _ONCE, _ONCE, 1, f"{_TE}: one sweep"),
    Execution("rmsnorm_dx", _ONCE, _ONCE, 1, f"{_TE}: R dy, x; W dx"),
    Execution("rmsnorm_dw", _FREE, (_PARTIALS,), 1, f"{_TE}: partial sums of the dx kernel, then one reduction"),
    Execution("layernorm", _ONCE, _ONCE, 1, f"{_TE}: one sweep"),
    Execution("layernorm_dx", _ONCE, _ONCE, 1, f"{_TE}: R dy, x; W dx"),
    Execution("layernorm_dw", _FREE, (_PARTIALS,), 1, f"{_TE}: partial sums of the dx kernel, then one reduction"),
    Execution("rope", _ONCE, _ONCE, 1, "NVIDIA/TransformerEngine common/fused_rope: R x, W y"),
    Execution("rope_dx", _ONCE, _ONCE, 1, "NVIDIA/TransformerEngine common/fused_rope: R dy, W dx"),
    Execution("add", _ONCE, _ONCE, 1, "R both, W sum"),
    Execution("cross_entropy", (2, 1), (1, 1), 2, "linkedin/Liger-Kernel vocabulary-parallel loss: 4 bf16 passes"),
    Execution("cross_entropy_dx", (2, 1), (3,), 2, "linkedin/Liger-Kernel vocabulary-parallel loss: 7 bf16 passes"),
    Execution(
        "adamw",
        _ONCE,
        _ONCE,
        1,
        f"{_MULTI_TENSOR}: moments, fp32 gradient and master read, all but the gradient written: 30 bytes in bf16",
        ELEMENTS_PER_LAUNCH,
    ),
)


def _profile(name: str, own: tuple[Execution, ...]) -> Profile:
    return Profile(name, MappingProxyType({row.kind: row for row in (*SHARED, *own)}))


PROFILES = MappingProxyType({"reference": _profile("reference", REFERENCE), "exact": _profile("exact", EXACT)})
"""Profiles by name."""


def profile_of(name: str) -> Profile:
    """The profile of that name. Raises: InputError, with a suggestion."""
    profile = PROFILES.get(name)
    if profile is None:
        raise refuse("profile", "--profile", f"no profile {name!r}", "reference or exact", did_you_mean(name, PROFILES))
    return profile


def operand_bytes(op: Op, row: Execution) -> int:
    """HBM traffic of one execution: sum over operands and results of passes x bytes on this rank."""
    reads = sum(passes * t.nbytes for passes, t in zip(_each(row.reads, op.inputs), op.inputs, strict=True) if passes)
    writes = sum(
        passes * t.nbytes for passes, t in zip(_each(row.writes, op.outputs), op.outputs, strict=True) if passes
    )
    return int(reads + writes)


def _each(passes: tuple[float, ...], tensors: tuple[object, ...]) -> tuple[float, ...]:
    return passes * len(tensors) if len(passes) == 1 else passes


def kernels_of(op: Op, row: Execution) -> int:
    """Launches of one execution; a collective in pieces is launched once per piece."""
    if row.elements_per_kernel:
        return -(-op.inputs[0].elements // row.elements_per_kernel)
    pieces = op.attr("pieces", 1)
    return row.kernels * int(pieces or 1)
