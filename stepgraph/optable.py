"""The op table and the profiles, joined, as rows to print."""

from __future__ import annotations

from collections.abc import Sequence

from stepgraph.ir.rows import Row
from stepgraph.ir.table import TABLE
from stepgraph.passes.profiles import PROFILES, Execution


def op_table(kinds: Sequence[str]) -> list[dict[str, object]]:
    """One row per kind: meaning, loop nest, rule, FLOPs, backward, and passes and kernels in each profile."""
    return [_row(TABLE[kind]) for kind in kinds]


def _row(row: Row) -> dict[str, object]:
    return {
        "kind": row.kind,
        "rule": row.rule.value,
        "meaning": row.meaning,
        "spec": row.spec or "its operands' letters",
        "whole": row.whole,
        "inner": row.inner,
        "flops": row.flops.value,
        "backward": [grad.kind for grad in row.grads] or (["(passes through)"] if row.passes else []),
        "source": row.source,
        **{name: _execution(profile[row.kind]) for name, profile in PROFILES.items()},
    }


def _execution(execution: Execution) -> dict[str, object]:
    kernels: object = execution.kernels
    if execution.elements_per_kernel:
        kernels = f"{execution.kernels} per {execution.elements_per_kernel:,} elements"
    if execution.per_expert:
        kernels = f"{execution.kernels} per expert"
    return {
        "reads": list(execution.reads),
        "writes": list(execution.writes),
        "kernels": kernels,
        "source": execution.source,
    }
