"""How long simulating a pipeline takes: medians on one core, and ratios taken in one run.

    python benchmarks/pipelines.py
    python benchmarks/pipelines.py --json

The step is that of 1,024 GPUs: 16 ranks of 4 chunks, 512 micro-batches, interleaved. A steady state is skipped, so eight
times the micro-batches should take as long.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median

import attrs

import stepgraph
from stepgraph.lowering.lowering import lower
from stepgraph.passes.base import setting
from stepgraph.passes.iteration import cost_step
from stepgraph.passes.pipeline.modes import BLOCKING, OVERLAP
from stepgraph.passes.pipeline.schedules import schedule_of
from stepgraph.passes.pipeline.simulation import simulate, simulate_schedule
from stepgraph.passes.pipeline.timing import uniform

RUNS = 9
LAYOUT = stepgraph.Layout(tp=8, pp=16, vpp=4, dp=8, global_batch=8 * 512, seq=4096)  # 1,024 GPUs, n = 512


def milliseconds(work: Callable[[], object]) -> float:
    """Median of some runs after one that is not counted."""
    work()
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return median(times)


def figures() -> dict[str, float]:
    """A model of 128 layers of Llama-3-70B, whole predictions and simulations by themselves."""
    target = stepgraph.load_target("h100")
    model = stepgraph.load_model("llama-3-70b", {"num_hidden_layers": 128})
    longer = attrs.evolve(LAYOUT, global_batch=8 * 4096)
    predict_ms = milliseconds(lambda: stepgraph.predict(model, LAYOUT, target))
    longer_ms = milliseconds(lambda: stepgraph.predict(model, longer, target))
    timing = cost_step(lower(model, LAYOUT), setting(target)).timing
    interleaved, plain = schedule_of("interleaved"), schedule_of("1f1b")
    order = interleaved.order(16, 4, 512)
    short_ms = milliseconds(lambda: simulate_schedule(interleaved, 16, 4, 512, timing))
    full_ms = milliseconds(lambda: simulate(order, timing))
    return {
        "predict_ms": predict_ms,
        "predict_4096_micro_batches_ms": longer_ms,
        "ratio_8x_micro_batches": longer_ms / predict_ms,
        "predict_megatron_ms": milliseconds(lambda: stepgraph.predict(model, LAYOUT, target, overlap="megatron")),
        "order_ms": milliseconds(lambda: interleaved.order(16, 4, 512)),
        "simulate_ms": short_ms,
        "simulate_in_full_ms": full_ms,
        "ratio_full_over_skipped": full_ms / short_ms,
        "simulate_overlap_mode_ms": milliseconds(lambda: simulate_schedule(interleaved, 16, 4, 512, timing, OVERLAP)),
        "one_f_one_b_blocking_ms": milliseconds(
            lambda: simulate_schedule(plain, 16, 1, 512, uniform(16, 1.0, 2.0, 0.01), BLOCKING)
        ),
    }


def main() -> None:
    """Print the figures."""
    found = figures()
    if "--json" in sys.argv[1:]:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        print(f"{name:30s} {value:8.2f}")


if __name__ == "__main__":
    main()
