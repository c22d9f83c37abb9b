"""The claims of the source text, as tables: backward over forward, all-to-all beside flat bandwidth, the router.

python examples/source_claims.py
"""

import stepgraph
from stepgraph.passes.base import setting
from stepgraph.passes.costing import costs

RUNS = (
    ("gpt2-xl", stepgraph.Layout(seq=256)),
    ("gpt2-xl", stepgraph.Layout(seq=1024, micro_batch=8)),
    ("llama-3-8b", stepgraph.Layout(tp=2, dp=4, seq=8192)),
    ("llama-3-70b", stepgraph.Layout(tp=8, pp=4, seq=8192, global_batch=32)),
    ("qwen3-30b-a3b", stepgraph.Layout(dp=8, ep=8, seq=4096)),
    ("deepseek-v3", stepgraph.Layout(pp=16, dp=32, ep=32, seq=4096, global_batch=2048)),
)


def ratio(value: float | None) -> str:
    """Two digits, or a dash where there is nothing to compare."""
    return "-" if value is None else f"{value:.2f}"


def backward_over_forward() -> None:
    """Section 6: 5/3 where HBM dominates, 2 where GEMMs do."""
    print("model          seq   mb   gemm  attention  hbm   communication  total")
    for name, layout in RUNS:
        r = stepgraph.predict(name, layout, "h100").backward_over_forward
        cells = "  ".join(ratio(value) for value in (r.gemm, r.attention, r.hbm, r.communication, r.total))
        print(f"{name:14s} {layout.seq:5d} {layout.micro_batch:3d}   {cells}")


def all_to_alls() -> None:
    """Section 5: what the inter-node term changes, beside S / beta of either link alone."""
    print("\ntarget  ep  domains  leaves   call ms   S/beta scale-up   S/beta NIC")
    for target in ("h100", "b200", "gb200"):
        for ep in (8, 16, 32, 64):
            layout = stepgraph.Layout(pp=4, dp=64, ep=ep, seq=4096, global_batch=1024)
            x = stepgraph.predict("deepseek-v3", layout, target).all_to_alls[0]
            times = f"{x.time_s * 1e3:8.2f}  {x.flat_scale_up_s * 1e3:12.2f}  {x.flat_nic_s * 1e3:14.2f}"
            print(f"{target:6s} {ep:4d} {x.domains:6d} {x.inter_fraction:8.0%}  {times}")


def router_share() -> None:
    """Section 5: the router is a GEMM, a top-k and a permutation; their share of a layer's forward pass."""
    print(
        "\nmodel          router GEMM   top-k   permute + unpermute   (share of a MoE layer's forward, EP inside a node)"
    )
    for name in ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3"):
        program = stepgraph.lower(stepgraph.load_model(name), stepgraph.Layout(dp=8, ep=8, seq=4096))
        cost = costs(program["moe"], setting(stepgraph.load_target("h100")))
        times = {op.name: time for op, time in zip(cost.graph.ops, cost.time_s, strict=True) if not op.of}
        whole = sum(times.values())
        parts = (times["moe.router"], times["moe.topk"], times["moe.permute"] + times["moe.unpermute"])
        print(f"{name:14s} " + "        ".join(f"{part / whole:6.1%}" for part in parts))


if __name__ == "__main__":
    backward_over_forward()
    all_to_alls()
    router_share()
