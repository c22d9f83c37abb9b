"""Kernels around norms."""

from __future__ import annotations

from stepgraph.passes.fusing.pattern import fusion
from stepgraph.passes.fusing.recorder import Node, Recorder, Var

_LIGER = "linkedin/Liger-Kernel src/liger_kernel/ops/fused_add_rms_norm.py"
_FLASH = "Dao-AILab/flash-attention flash_attn/ops/triton/layer_norm.py (residual, prenorm)"
_DEEPSPEED = "deepspeedai/DeepSpeed csrc/transformer/inference/csrc/layer_norm.cu"


@fusion(phase="forward", source=f"{_LIGER}; {_FLASH}")
def add_rmsnorm(op: Recorder, x: Var, residual: Var, weight: Var) -> Node:
    """Residual add and the norm that follows, also across the seam to the next layer."""
    return op.rmsnorm(op.add(x, residual), weight)


@fusion(phase="forward", source=_FLASH)
def add_layernorm(op: Recorder, x: Var, residual: Var, weight: Var, bias: Var) -> Node:
    """Residual add and LayerNorm."""
    return op.layernorm(op.add(x, residual), weight, bias)


@fusion(phase="forward", source=f"{_DEEPSPEED} (fused_residual_ln)")
def bias_add_layernorm(op: Recorder, x: Var, y: Var, y_bias: Var, weight: Var, bias: Var) -> Node:
    """Bias of a projection, residual add and LayerNorm."""
    return op.layernorm(op.add(x, op.bias_add(y, y_bias)), weight, bias)


@fusion(phase="forward", source="NVIDIA/TensorRT-LLM fused QK norm and RoPE kernel")
def qk_norm_rope(op: Recorder, x: Var, weight: Var) -> Node:
    """QK-norm of a head and its rotation."""
    return op.rope(op.one_of("rmsnorm_heads", "rmsnorm")(x, weight))


@fusion(
    phase="backward",
    kernels=2,
    source="NVIDIA/TransformerEngine common/normalization: dx with partial dgamma, then a sum",
)
def rmsnorm_backward(op: Recorder, dy: Var, x: Var, weight: Var) -> tuple[Node, Node]:
    """Input and weight gradient of RMSNorm from one read of dy and x."""
    dx = op.one_of("rmsnorm_dx", "rmsnorm_heads_dx")(dy, x, weight)
    return dx, op.one_of("rmsnorm_dw", "rmsnorm_heads_dw")(dy, x)


@fusion(
    phase="backward",
    kernels=2,
    source="NVIDIA/TransformerEngine common/normalization: dx with partial sums, then a sum",
)
def layernorm_backward(op: Recorder, dy: Var, x: Var, weight: Var) -> tuple[Node, Node]:
    """Input, weight and bias gradient of LayerNorm from one read of dy and x."""
    return op.layernorm_dx(dy, x, weight), op.layernorm_dw(dy, x)


@fusion(phase="backward", kernels=2, source="NVIDIA/TransformerEngine pytorch/ops/fused/backward_add_rmsnorm.py")
def rmsnorm_backward_add(op: Recorder, dy: Var, x: Var, weight: Var, other: Var) -> tuple[Node, Node]:
    """RMSNorm backward and the sum with the residual branch's gradient."""
    return op.grad_add(other, op.rmsnorm_dx(dy, x, weight)), op.rmsnorm_dw(dy, x)


@fusion(phase="backward", kernels=2, source=f"{_FLASH}: dresidual")
def layernorm_backward_add(op: Recorder, dy: Var, x: Var, weight: Var, other: Var) -> tuple[Node, Node]:
    """LayerNorm backward and the sum with the residual branch's gradient."""
    return op.grad_add(other, op.layernorm_dx(dy, x, weight)), op.layernorm_dw(dy, x)
