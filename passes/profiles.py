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
from stepgraph.passes.eagerprofile import EAGER
from stepgraph.passes.execution import ELEMENTS_PER_LAUNCH, Execution

__all__ = ["Execution", "Profile", "PROFILES", "profile_of", "operand_bytes", "passes_of", "kernels_of", "experts_of"]

_PAPER = "How to Think About Asymptotic Times in Transformer Forward Passes, rule 2"
_TE = "NVIDIA/TransformerEngine transformer_engine/common/normalization"
_MULTI_TENSOR = "NVIDIA/TransformerEngine transformer_engine/common/multi_tensor/multi_tensor_apply.cuh"
_MCORE_LOSS = "NVIDIA/Megatron-LM megatron/core/tensor_parallel/cross_entropy.py, kernel by kernel"
_NCCL = "one NCCL kernel per call"

_GROUPED = "NVIDIA/TransformerEngine GroupedLinear: one cuBLAS GEMM per expert on several streams"
_LATENT = "NVIDIA/Megatron-LM megatron/core/fusions/fused_mla_yarn_rope_apply.py: one read, one write"
_PERMUTE = "NVIDIA/TransformerEngine transformer_engine/common/permutation"

NORM_BLOCKS = 132
"""Thread blocks that leave a partial weight gradient each in a norm's backward: one per SM of an H100."""


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
    Execution("concat", _ONCE, _ONCE, 1, "R both, W one"),
    Execution("concat_dx", _FREE, _FREE, 0, "views"),
    Execution("linear", _ONCE, _ONCE, 1, "R X, R W, W Y"),
    Execution("linear_dx", _ONCE, _ONCE, 1, "R dY, R W, W dX"),
    Execution("linear_dw", _ONCE, (2,), 1, "R dY, R X, add to the fp32 gradient in the GEMM's epilogue"),
    Execution("grouped_linear", _ONCE, _ONCE, 1, _GROUPED, per_expert=True),
    Execution("grouped_linear_dx", _ONCE, _ONCE, 1, _GROUPED, per_expert=True),
    Execution("grouped_linear_dw", _ONCE, (2,), 1, f"{_GROUPED}; adds to the fp32 gradient", per_expert=True),
    Execution(
        "topk", _ONCE, _FREE, 3, "NVIDIA/Megatron-LM megatron/core/transformer/moe/moe_utils.py: scores, top-k, mask"
    ),
    Execution("topk_dx", _ONCE, _ONCE, 2, "as topk: R d(scores), R scores, W d(logits)"),
    Execution("aux_loss", _ONCE, _FREE, 2, "NVIDIA/Megatron-LM moe_utils.py switch_load_balancing_loss_func: R scores"),
    Execution("aux_loss_dx", (0, 1), _ONCE, 1, "R scores, add to their gradient"),
    Execution("geglu", _ONCE, _ONCE, 1, "as swiglu"),
    Execution("geglu_dx", _ONCE, _ONCE, 1, "as swiglu_dx"),
    Execution("reglu", _ONCE, _ONCE, 1, "as swiglu"),
    Execution("reglu_dx", _ONCE, _ONCE, 1, "as swiglu_dx"),
    Execution("silu", _ONCE, _ONCE, 1, "R x, W y"),
    Execution("silu_dx", _ONCE, _ONCE, 1, "R dy, R x, W dx"),
    Execution("softcap", _ONCE, _ONCE, 1, "R x, W y"),
    Execution("softcap_dx", _ONCE, _ONCE, 1, "R dy, R y, W dx"),
    Execution("gate_mul", _ONCE, _ONCE, 1, "R x, R gate, W y"),
    Execution("gate_mul_dx", _ONCE, _ONCE, 2, "R dy, R x, R gate, W dx, W dgate"),
    Execution("split_latent", _FREE, _FREE, 0, "views"),
    Execution("join_latent", _FREE, _FREE, 0, "gradients are written into one buffer"),
    Execution("latent_keys", _ONCE, _ONCE, 1, _LATENT),
    Execution("latent_keys_dx", _ONCE, _ONCE, 1, _LATENT),
    Execution("sdpa_sink", _ONCE, _ONCE, 1, "as sdpa"),
    Execution("sdpa_sink_dx", _ONCE, _ONCE, 3, "as sdpa_dx"),
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
    Execution("rmsnorm_heads", (2, 0), (1, 0), 1, f"{_PAPER}: norm forward 3"),
    Execution("rmsnorm_heads_dx", (1, 1, 0, 0), (1,), 1, f"{_PAPER}: norm backward 5, of which 3 for the input"),
    Execution("rmsnorm_heads_dw", (1, 1, 0), (0,), 1, f"{_PAPER}: norm backward 5, of which 2 for the weight"),
    Execution("permute", (0, 0), (2,), 6, f"{_PAPER}: dispatch and undo 4, of which 2 here, of k copies"),
    Execution("permute_dx", (2, 0), (0,), 2, f"{_PAPER}: 4, of which 2 here"),
    Execution("unpermute", (0, 2), (0,), 2, f"{_PAPER}: 4, of which 2 here"),
    Execution("unpermute_dx", (0, 0, 0), (0, 2), 2, f"{_PAPER}: 4, of which 2 here"),
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
    Execution("rmsnorm_heads", _ONCE, _ONCE, 1, f"{_TE}: one sweep"),
    Execution("rmsnorm_heads_dx", _ONCE, _ONCE, 1, f"{_TE}: R dy, x; W dx"),
    Execution("rmsnorm_heads_dw", _FREE, (_PARTIALS,), 1, f"{_TE}: partial sums of the dx kernel, then one reduction"),
    Execution("permute", _ONCE, _ONCE, 4, f"{_PERMUTE}: each token read once, k copies written; row map in 3 kernels"),
    Execution("permute_dx", (1, 0), _ONCE, 1, f"{_PERMUTE}: k copies read, each token written once"),
    Execution("unpermute", _ONCE, _ONCE, 1, f"{_PERMUTE}: k copies read, each token written once"),
    Execution("unpermute_dx", _ONCE, _ONCE, 1, f"{_PERMUTE}: R dy, copies, scores; W copies, d(scores)"),
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
    return Profile(name, MappingProxyType({row.kind: row for row in (*SHARED, *EAGER, *own)}))


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
    reads = sum(
        passes * t.nbytes for passes, t in zip(passes_of(row.reads, op.inputs), op.inputs, strict=True) if passes
    )
    writes = sum(
        passes * t.nbytes for passes, t in zip(passes_of(row.writes, op.outputs), op.outputs, strict=True) if passes
    )
    return int(reads + writes)


def passes_of(passes: tuple[float, ...], tensors: tuple[object, ...]) -> tuple[float, ...]:
    """Passes of each tensor; a result that an op may lack (AdamW's copy of fp32 parameters) has the last one."""
    return passes * len(tensors) if len(passes) == 1 else passes[: len(tensors)]


def kernels_of(op: Op, row: Execution) -> int:
    """Launches of one execution."""
    return pieces_of(op, row) if row.elements_per_kernel else row.kernels * pieces_of(op, row)


def pieces_of(op: Op, row: Execution) -> int:
    """Into how many launches an execution is cut: chunks of a multi-tensor op, experts, pieces of a collective."""
    if row.elements_per_kernel:
        return -(-op.inputs[0].elements // row.elements_per_kernel)
    return experts_of(op) if row.per_expert else int(op.attr("pieces", 1) or 1)


def experts_of(op: Op) -> int:
    """Experts on this rank: the extent of letter E in whichever operand has it."""
    for tensor in (*op.inputs, *op.outputs):
        if "E" in tensor.dims:
            return tensor.local_shape[tensor.dims.index("E")]
    return 1
