"""Scale, mask and softmax of unfused attention in one kernel: what Megatron-LM did before flash attention.

    python examples/masked_softmax.py

Source: NVIDIA/Megatron-LM megatron/core/fusions/fused_softmax.py, which also says where the kernel exists: 16-bit
scores, 17 to 4096 keys.
"""

import stepgraph
from stepgraph.passes import compare, fuse, fusion
from stepgraph.passes.rewriting.decomposing import decompose

SOURCE = "NVIDIA/Megatron-LM megatron/core/fusions/fused_softmax.py"


@fusion(phase="forward", source=SOURCE)
def masked_softmax(op, scores):
    """Scale, mask, softmax in fp32 registers, and back to 16 bits. Models without a mask have one op less."""
    seen = op.maybe("mask")(op.scale(scores))
    return op.cast(op.softmax(op.cast(seen)))


@masked_softmax.check
def masked_softmax(m):
    """The same, where the library has it."""
    keys = m.scores.shape[-1]
    if m.scores.dtype not in ("bf16", "fp16") or not 16 < keys <= 4096:
        m.reject(f"the kernel is for 17 to 4096 keys in 16 bits, not for {keys} in {m.scores.dtype}")


RULES = (masked_softmax,)


def main() -> None:
    """A layer of Llama-3-8B whose attention is what PyTorch eager runs, at two sequence lengths."""
    model, target = stepgraph.load_model("llama-3-8b"), stepgraph.load_target("h100")
    for seq in (4096, 8192):
        layer = stepgraph.lower(model, stepgraph.Layout(seq=seq), rewrites=(decompose("sdpa"),))["dense"]
        fused, report = fuse(layer, RULES)
        print(f"seq = {seq}", report, compare(layer, fused, target), sep="\n", end="\n\n")


if __name__ == "__main__":
    main()
