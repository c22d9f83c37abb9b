"""Rank every layout of Llama-3-8B on eight H100 by predicted step time.

python examples/compare_layouts.py
"""

from itertools import product

import stepgraph

GPUS = 8


def main() -> None:
    """Predict every layout that uses all GPUs, fastest first."""
    model, target = stepgraph.load_model("llama-3-8b"), stepgraph.load_target("h100")
    rows = []
    for tp, pp in product((1, 2, 4, 8), repeat=2):
        if GPUS % (tp * pp):
            continue
        layout = stepgraph.Layout(tp=tp, pp=pp, dp=GPUS // (tp * pp), global_batch=64, seq=8192)
        try:
            rows.append((stepgraph.predict(model, layout, target), layout))
        except stepgraph.InputError as refused:
            print(f"tp={tp} pp={pp}: {refused}")
    for prediction, layout in sorted(rows, key=lambda row: row[0].step_time_s):
        print(
            f"tp={layout.tp} pp={layout.pp} dp={layout.dp}: {prediction.step_time_s:.2f} s, "
            f"{prediction.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, MFU {prediction.mfu.model_flops:.0%}"
        )


if __name__ == "__main__":
    main()
