"""Kernels around biases, activations, RoPE and the loss."""

from __future__ import annotations

from stepgraph.passes.fusing.pattern import fusion
from stepgraph.passes.fusing.recorder import Node, Recorder, Var

_MCORE = "NVIDIA/Megatron-LM megatron/core/fusions"


@fusion(phase="forward", source=f"{_MCORE}/fused_bias_gelu.py")
def bias_activation(op: Recorder, y: Var, bias: Var) -> Node:
    """Bias and plain activation."""
    return op.one_of("gelu", "relu", "silu")(op.bias_add(y, bias))


@fusion(phase="forward", source=f"{_MCORE}/fused_bias_swiglu.py")
def bias_glu(op: Recorder, y: Var, bias: Var) -> Node:
    """Bias and gated activation."""
    return op.one_of("swiglu", "geglu", "reglu")(op.bias_add(y, bias))


@fusion(phase="backward", source=f"{_MCORE}/fused_bias_gelu.py (bias_gelu_back)")
def activation_bias_backward(op: Recorder, dy: Var, x: Var) -> Node:
    """Gradient of an activation and, summed over tokens, of the bias before it."""
    return op.bias_add_dw(op.one_of("gelu_dx", "relu_dx", "silu_dx", "swiglu_dx", "geglu_dx", "reglu_dx")(dy, x))


@fusion(phase="forward", source=f"{_MCORE}/fused_bias_dropout.py (dropout 0)")
def bias_add_residual(op: Recorder, x: Var, y: Var, bias: Var) -> Node:
    """Bias of a row-parallel projection and the residual add."""
    return op.add(x, op.bias_add(y, bias))


@fusion(phase="forward", source="linkedin/Liger-Kernel src/liger_kernel/ops/rope.py: q and k in one launch")
def rope_pair(op: Recorder, q: Var, k: Var) -> tuple[Node, Node]:
    """RoPE of queries and keys in one launch."""
    return op.rope(q), op.rope(k)


@fusion(phase="forward", source="linkedin/Liger-Kernel src/liger_kernel/ops/cross_entropy.py (softcap)")
def softcap_loss(op: Recorder, logits: Var, labels: Var) -> Node:
    """Soft-capped logits and the loss."""
    return op.cross_entropy(op.softcap(logits), labels)


@fusion(phase="backward", source="linkedin/Liger-Kernel src/liger_kernel/ops/cross_entropy.py (softcap)")
def softcap_loss_backward(op: Recorder, softmax: Var, labels: Var) -> Node:
    """Gradient of the loss through the soft cap."""
    return op.softcap_dx(op.cross_entropy_dx(softmax, labels))


@fusion(phase="forward", source="NVIDIA/TransformerEngine common/fused_router: scores, top-k and load-balancing loss")
def router(op: Recorder, logits: Var) -> Node:
    """Scores of the chosen experts and the load-balancing loss."""
    return op.aux_loss(op.topk(logits))


@fusion(phase="backward", source="NVIDIA/TransformerEngine common/fused_router")
def router_backward(op: Recorder, dy: Var, scores: Var) -> Node:
    """Gradient of the load-balancing loss and of the scores."""
    return op.topk_dx(op.aux_loss_dx(dy, scores), scores)
