"""How long fusing takes: a rolled program, where equal layers are one graph, and the same written out.

    python benchmarks/fusing.py
    python benchmarks/fusing.py --json

Times are CPU seconds of this process, so that a busy machine disturbs them less; ratios are worth more than seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median

import attrs

import stepgraph
from stepgraph.passes import compare, fuse
from stepgraph.passes.fusing.sets import BASIC

RUNS = 9
MANY = 50
"""Rules, for the long graph: the basic ones several times, under other names."""

DEEP = stepgraph.Layout(pp=16, dp=32, ep=32, global_batch=2048, seq=4096)
LAYERS = 1600
"""Layers of Llama-3-8B that make a graph of some 50,000 ops."""


def cpu_ms(work: Callable[[], object], runs: int = RUNS) -> float:
    """Median CPU time of some runs after one that is not counted."""
    work()
    times = []
    for _ in range(runs):
        start = time.process_time()
        work()
        times.append(1e3 * (time.process_time() - start))
    return median(times)


def rolled() -> dict[str, float]:
    """DeepSeek-V3 on 512 GPUs: all basic rules, beside lowering and costing it."""
    model, target = stepgraph.load_model("deepseek-v3"), stepgraph.load_target("h100")
    program = stepgraph.lower(model, DEEP)
    fuse_ms, lower_ms = cpu_ms(lambda: fuse(program, BASIC)), cpu_ms(lambda: stepgraph.lower(model, DEEP))
    return {
        "rules": len(BASIC),
        "templates_ops": sum(len(graph.ops) for graph in program.templates),
        "deepseek_v3_fuse_ms": fuse_ms,
        "deepseek_v3_no_rules_ms": cpu_ms(lambda: fuse(program, [])),
        "deepseek_v3_lower_ms": lower_ms,
        "deepseek_v3_compare_ms": cpu_ms(lambda: compare(program, program, target)),
        "ratio_fuse_over_lower": fuse_ms / lower_ms,
    }


def unrolled() -> dict[str, float]:
    """A long graph and many rules, and a quarter of it: four times the ops should take four times as long."""
    rules = [attrs.evolve(BASIC[i % len(BASIC)], name=f"{BASIC[i % len(BASIC)].name}_{i}") for i in range(MANY)]
    figures: dict[str, float] = {}
    for name, layers in (("quarter", LAYERS // 4), ("long", LAYERS)):
        model = stepgraph.load_model("llama-3-8b", {"num_hidden_layers": layers})
        graph = stepgraph.lower(model, stepgraph.Layout(seq=4096)).unroll(0)
        figures |= {f"{name}_ops": len(graph.ops), f"{name}_fuse_s": cpu_ms(lambda g=graph: fuse(g, rules), 3) / 1e3}
    figures["ratio_4x_ops"] = figures["long_fuse_s"] / figures["quarter_fuse_s"]
    return figures


def main() -> None:
    """Print the figures."""
    figures = {**rolled(), **unrolled()}
    if "--json" in sys.argv[1:]:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        print(f"{name:26s} {value:12,.2f}")


if __name__ == "__main__":
    main()
