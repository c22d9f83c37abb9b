"""Simulated pipelines against the numbers of an independent simulation, in every mode of transfer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeAlias

import pytest

from stepgraph.passes.pipeline.modes import parse_mode
from stepgraph.passes.pipeline.schedules import schedule_of
from stepgraph.passes.pipeline.simulation import simulate
from stepgraph.passes.pipeline.timing import uniform

DATA = json.loads((Path(__file__).parent / "data" / "schedules.json").read_text())
Row: TypeAlias = dict[str, float]
ROWS: dict[str, list[Row]] = {
    name: [dict(zip(DATA["columns"], row, strict=True)) for row in rows] for name, rows in DATA["rows"].items()
}
MODES = {
    "makespan": "async",
    "blocking": "blocking",
    "overlap": "overlap",
    "joint:1": "joint:1",
    "joint:0.8": "joint:0.8",
}
COLUMNS = [
    (name, column) for name, rows in ROWS.items() for column in MODES if any(row[column] is not None for row in rows)
]


def makespan_s(name: str, row: Row, mode: str) -> float:
    ranks, chunks, microbatches = int(row["P"]), int(row["V"]), int(row["n"])
    timing = uniform(ranks * chunks, 1, row["backward"], row["hop"], row["weight"], chunks)
    order = schedule_of(name).order(ranks, chunks, microbatches)
    return simulate(order, timing, parse_mode(mode)).makespan_s


def test_what_is_compared() -> None:
    counts = {name: len(rows) for name, rows in ROWS.items()}
    assert (counts["gpipe"], counts["1f1b"], counts["looped-bfs"], counts["interleaved"]) == (48, 48, 144, 96)
    assert (counts["zb-h1"], counts["zbv"], counts["dualpipev"]) == (72, 72, 54)
    assert len(COLUMNS) == 7 + len(("gpipe", "1f1b", "interleaved")) + len(("interleaved",)) + 2 * len(("dualpipev",))


@pytest.mark.parametrize(("name", "column"), COLUMNS)
def test_equals_the_independent_simulation(name: str, column: str) -> None:
    rows = [row for row in ROWS[name] if row[column] is not None]
    ours = [makespan_s(name, row, MODES[column]) for row in rows]
    assert ours == pytest.approx([row[column] for row in rows], rel=1e-9)


@pytest.mark.parametrize("name", ROWS)
def test_the_bubble_over_the_ideal_step(name: str) -> None:
    for row in ROWS[name]:
        ideal = row["n"] * (1 + row["backward"])
        bubble = makespan_s(name, row, "async") / ideal - 1
        assert bubble == pytest.approx(row["bubble"], abs=5.1e-7)  # 6 decimals


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_free_transfers_block_nobody_where_all_stages_are_equal(name: str) -> None:
    rows = [row for row in ROWS[name] if row["hop"] == 0]
    ours = [makespan_s(name, row, "blocking") for row in rows]
    assert ours == pytest.approx([row["makespan"] for row in rows], rel=1e-9)


@pytest.mark.parametrize(("ranks", "microbatches"), [(3, 4), (4, 4), (5, 9), (8, 32)])
def test_what_blocking_calls_cost(ranks: int, microbatches: int) -> None:
    """Above the makespan with free transfers, in transfers of length t, for P > 2 (interleaved: n > P).

    1F1B (2n + 2P - 5) t; GPipe (4n + 2P - 6) t; interleaved (V n + (V + 1) P - 3) t.
    """
    p, n, v = ranks, microbatches, 3
    for name, chunks, count, transfers in (
        ("1f1b", 1, n, 2 * n + 2 * p - 5),
        ("gpipe", 1, n, 4 * n + 2 * p - 6),
        ("interleaved", v, 4 * p, v * 4 * p + (v + 1) * p - 3),
    ):
        row = {"P": p, "V": chunks, "n": count, "backward": 2.0, "weight": 0.0}
        exposed = makespan_s(name, {**row, "hop": 0.01}, "blocking") - makespan_s(name, {**row, "hop": 0.0}, "async")
        assert exposed == pytest.approx(transfers * 0.01), name


@pytest.mark.parametrize(("ranks", "chunks", "groups"), [(2, 2, 3), (4, 3, 2), (5, 2, 4)])
def test_what_overlap_leaves_exposed(ranks: int, chunks: int, groups: int) -> None:
    """The way through the pipeline and back: 2 (P V - 1) t, however many micro-batches there are."""
    row = {"P": ranks, "V": chunks, "n": groups * ranks, "backward": 2.0, "weight": 0.0}
    free, overlapped = (makespan_s("interleaved", {**row, "hop": hop}, "overlap") for hop in (0.0, 0.01))
    assert overlapped - free == pytest.approx(2 * (ranks * chunks - 1) * 0.01)
