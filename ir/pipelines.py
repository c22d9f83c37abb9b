"""Pipelines by name: how many chunks of the model a rank holds, and on which ranks the stages lie."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

import attrs

from stepgraph.errors import Problem, did_you_mean


@attrs.frozen
class Pipeline:
    """What a schedule asks of the layout.

    least_chunks, most_chunks: virtual stages per rank (0: any number); usual_chunks: what it gets if nobody says more
    than one. v_shaped: the stream goes down the ranks and
    comes back (0 1 2 2 1 0), instead of passing all ranks once per chunk (0 1 2 0 1 2).
    """

    name: str
    title: str
    least_chunks: int = 1
    most_chunks: int = 1
    usual_chunks: int = 1
    v_shaped: bool = False


_ALL = (
    Pipeline("gpipe", "GPipe: all forwards, then all backwards"),
    Pipeline("1f1b", "1F1B: one forward, one backward"),
    Pipeline("interleaved", "interleaved 1F1B: several chunks per rank", 2, 0, 2),
    Pipeline("zb-h1", "ZB-H1: weight gradients fill the bubble", 1, 0),
    Pipeline("zbv", "ZBV: zero bubble, two chunks in a V", 2, 2, 2, True),
    Pipeline("dualpipev", "DualPipeV: forwards paired with backwards, two chunks in a V", 2, 2, 2, True),
    Pipeline("looped-bfs", "looped BFS: chunk after chunk", 1, 0, 2),
)

PIPELINES = MappingProxyType({pipeline.name: pipeline for pipeline in _ALL})
"""Pipelines by the name that `--schedule` takes.

Source: pytorch/pytorch torch/distributed/pipelining/schedules.py; NVIDIA/Megatron-LM
megatron/core/pipeline_parallel/schedules.py; deepseek-ai/DualPipe.
"""


def stages_on_ranks(ranks: int, chunks: int, *, v_shaped: bool = False) -> tuple[int, ...]:
    """The rank of every virtual stage, in the order in which the stream passes them."""
    down = tuple(range(ranks))
    return (*down, *reversed(down)) if v_shaped else down * chunks


def chunk_problems(name: str, chunks: int) -> Iterator[Problem]:
    """Whether a schedule exists (schedule) and runs so many chunks per rank (schedule-chunks)."""
    pipeline = PIPELINES.get(name) if isinstance(name, str) else None
    if pipeline is None:
        word = str(name)[:40]
        is_file = word.endswith(".csv") or "/" in word
        fix = f"`stepgraph pipeline --schedule {word}` runs an order file" if is_file else did_you_mean(word, PIPELINES)
        yield Problem("schedule", "schedule", f"{word!r} is no schedule", ", ".join(PIPELINES), fix)
    elif chunks < pipeline.least_chunks or chunks > pipeline.most_chunks > 0:
        exactly = pipeline.least_chunks == pipeline.most_chunks
        expected = f"vpp {pipeline.least_chunks}{'' if exactly else ' or more'}"
        fix = "schedule interleaved runs several chunks" if chunks > 1 and name != "interleaved" else ""
        yield Problem("schedule-chunks", "vpp", f"{name} with {chunks} chunks per rank", expected, fix)
