"""GEMMs that add their bias, and apply GELU, before they write: the epilogues of cuBLASLt.

    python examples/gemm_epilogue.py
    stepgraph fuse gpt2-xl --fusions examples/gemm_epilogue.py --against none

Source: NVIDIA/TransformerEngine transformer_engine/common/gemm/cublaslt_gemm.cu (CUBLASLT_EPILOGUE_BIAS and
..._GELU_AUX_BIAS); NVIDIA/apex csrc/fused_dense_cuda.cu. Both need outputs of 16 bits.
"""

import stepgraph
from stepgraph.passes import compare, fuse, fusion

SOURCE = "NVIDIA/TransformerEngine transformer_engine/common/gemm/cublaslt_gemm.cu"


@fusion(phase="forward", source=SOURCE)
def linear_bias_gelu(op, x, weight, bias):
    """Up-projection, bias and GELU. What enters GELU is still written, because backward reads it (the AUX output)."""
    return op.gelu(op.bias_add(op.linear(x, weight), bias))


@linear_bias_gelu.check
def linear_bias_gelu(m):
    """The same, where the library has it."""
    if m.x.dtype not in ("bf16", "fp16"):
        m.reject(f"the epilogue needs outputs of 16 bits, not {m.x.dtype}")


@fusion(phase="forward", source=SOURCE)
def linear_bias(op, x, weight, bias):
    """Projection and bias, wherever the rule above found nothing."""
    return op.bias_add(op.linear(x, weight), bias)


RULES = (linear_bias_gelu, linear_bias)  # the larger pattern first: an op joins one kernel only


RUNS = (
    ("gpt2-xl", stepgraph.Layout(seq=1024, micro_batch=8)),
    ("gpt-3-175b", stepgraph.Layout(tp=8, pp=8, seq=2048, global_batch=64)),
)


def main() -> None:
    """On one GPU, and with tensor parallelism, where a collective stands between a row-parallel GEMM and its bias."""
    target = stepgraph.load_target("a100-80")
    for name, layout in RUNS:
        program = stepgraph.lower(stepgraph.load_model(name), layout)
        fused, report = fuse(program, RULES)
        print(f"{name}, tp = {layout.tp}", report, compare(program, fused, target), sep="\n", end="\n\n")


if __name__ == "__main__":
    main()
