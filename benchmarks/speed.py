"""How long a prediction takes: medians on one core, and ratios taken in one run.

    python benchmarks/speed.py
    python benchmarks/speed.py --json

Nothing is kept between predictions, so every one of them starts cold. Run it pinned (`taskset -c 0`) on an idle
machine; ratios are worth more than milliseconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import stepgraph
from stepgraph.lowering.lowering import lower
from stepgraph.passes.base import setting
from stepgraph.passes.iteration import iterate

RUNS = 31
LAYOUT = stepgraph.Layout(tp=8, pp=8, micro_batch=1, global_batch=128, seq=4096)  # 64 GPUs, dp 1, n = 128


def milliseconds(work: Callable[[], object], runs: int = RUNS) -> float:
    """Median of some runs after one that is not counted."""
    work()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return median(times)


def in_process() -> dict[str, float]:
    """Predictions for Llama-3-70B on 64 GPUs (with its parts, and with four times the layers) and DeepSeek-V3 on 512."""
    target = stepgraph.load_target("h100")
    model = stepgraph.load_model("llama-3-70b")
    tall = stepgraph.load_model("llama-3-70b", {"num_hidden_layers": 320})
    program = lower(model, LAYOUT)
    chosen = setting(target)
    predict_ms = milliseconds(lambda: stepgraph.predict(model, LAYOUT, target))
    deep = stepgraph.load_model("deepseek-v3")
    spread = stepgraph.Layout(pp=16, dp=32, ep=32, global_batch=2048, seq=4096)  # 512 GPUs, n = 64
    tall_ms = milliseconds(lambda: stepgraph.predict(tall, LAYOUT, target))
    return {
        "predict_ms": predict_ms,
        "lower_ms": milliseconds(lambda: lower(model, LAYOUT)),
        "iterate_ms": milliseconds(lambda: iterate(program, chosen)),
        "predict_4x_layers_ms": tall_ms,
        "ratio_4x_layers": tall_ms / predict_ms,
        "predict_deepseek_v3_ms": milliseconds(lambda: stepgraph.predict(deep, spread, target)),
    }


def processes() -> dict[str, float]:
    """Whole processes: the help page and a cold prediction, beside a bare interpreter."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}

    def run(*arguments: str) -> Callable[[], object]:
        command = [sys.executable, *arguments]
        return lambda: subprocess.run(command, check=True, capture_output=True, env=environment)

    return {
        "python_ms": milliseconds(run("-c", "pass"), 11),
        "help_ms": milliseconds(run("-m", "stepgraph", "--help"), 11),
        "cold_predict_ms": milliseconds(run("-m", "stepgraph", "predict", "llama-3-8b", "--json"), 11),
    }


def main() -> None:
    """Print the figures."""
    figures = {**in_process(), **processes()}
    if "--json" in sys.argv[1:]:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        print(f"{name:24s} {value:8.2f}")


if __name__ == "__main__":
    main()
