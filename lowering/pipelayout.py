"""The layout notation of a pipeline: `Et*4|(t*4|)*14tmL` says what every virtual stage holds.

    E embedding   t transformer layer   m MTP layer   L loss (the head)
    |  ends a stage     X*n  one sign n times     (...)*n  a group n times, its inner | included     ,  means nothing

Stage v runs on rank v % pp, or down the ranks and back where the schedule is V-shaped. A stage may hold nothing: it passes the stream on. A group stands in no other group.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise

import attrs

from stepgraph.errors import InputError, Problem
from stepgraph.lowering.layoutsigns import MAX_SIGNS, WHERE, Reader, Sign, placed

MAX_PERIOD = 8


@attrs.frozen
class StageSpec:
    """What one virtual stage holds, in this order: the embedding, transformer layers, MTP layers, the head."""

    embedding: bool = False
    layers: int = 0
    mtp: int = 0
    head: bool = False


@attrs.frozen
class PipelineSplit:
    """What each of the pp * vpp virtual stages holds, in the order in which the stream passes them."""

    stages: tuple[StageSpec, ...]

    @property
    def layers(self) -> int:
        """Transformer layers of all stages."""
        return sum(stage.layers for stage in self.stages)

    @property
    def mtp(self) -> int:
        """Multi-token-prediction layers of all stages."""
        return sum(stage.mtp for stage in self.stages)


def parse_layout(text: str) -> PipelineSplit:
    """Read the notation. E opens the first stage, L closes the last; m stands after every t, all m in one stage.

    Raises: InputError with every problem, each with its character: layout-value, pipeline-syntax, pipeline-order.
    Source: NVIDIA/Megatron-LM megatron/core/transformer/pipeline_parallel_layer_layout.py.
    """
    split, problems = read_layout(text)
    if split is None or problems:
        raise InputError(problems)
    return split


def read_layout(text: str) -> tuple[PipelineSplit | None, list[Problem]]:
    """What the notation says and what is wrong with it; None when signs make no sense, so that counts would not."""
    if not isinstance(text, str):
        what = f"{str(text)[:40]!r} is not a text"
        return None, [Problem("layout-value", WHERE, what, "stages in the notation", "for two stages: 'Et*4|t*4L'")]
    reader = Reader(text)
    signs = reader.items()
    if len(signs) > MAX_SIGNS:
        reader.complain(0, f"the whole says more than {MAX_SIGNS} signs", "the stages of one model")
    if reader.problems:
        return None, reader.problems
    return _split(signs), list(_order_problems(text, signs))


def describe(split: PipelineSplit) -> str:
    """The notation of a split, with repetitions where they are shorter; `parse_layout` gives the split back."""
    stages = [_stage_text(stage) + "|" for stage in split.stages]
    stages[-1:] = [stage.removesuffix("|") for stage in stages[-1:]]
    text, start = "", 0
    while start < len(stages):
        period, times = _best_repetition(stages, start)
        unit = "".join(stages[start : start + period])
        text += f"({unit})*{times}" if times > 1 else unit
        start += period * times
    return text


def _stage_text(stage: StageSpec) -> str:
    return "E" * stage.embedding + _many("t", stage.layers) + _many("m", stage.mtp) + "L" * stage.head


def _many(letter: str, count: int) -> str:
    return f"{letter}*{count}" if count > 2 else letter * count


def _best_repetition(stages: list[str], start: int) -> tuple[int, int]:
    """Period and times of the repetition that begins here and saves most; (1, 1) when none is shorter."""
    best, saved = (1, 1), 0
    for period in range(1, min(MAX_PERIOD, len(stages) - start) + 1):
        unit, times = stages[start : start + period], 1
        while stages[start + period * times : start + period * (times + 1)] == unit:
            times += 1
        length = sum(map(len, unit))
        if length * (times - 1) - len(f"()*{times}") > saved:
            best, saved = (period, times), length * (times - 1) - len(f"()*{times}")
    return best


def _split(signs: list[Sign]) -> PipelineSplit:
    stages = [StageSpec()]
    for bar, group in groupby(signs, lambda found: found.sign == "|"):
        written = [found.sign for found in group]
        if bar:
            stages += [StageSpec()] * len(written)
            continue
        stages[-1] = StageSpec("E" in written, written.count("t"), written.count("m"), "L" in written)
    return PipelineSplit(tuple(stages))


def _order_problems(text: str, signs: list[Sign]) -> Iterator[Problem]:
    """Where E, L and m must not be."""
    yield from _end_problems(text, signs, "E", "first", "the embedding begins the first stage")
    yield from _end_problems(text, signs[::-1], "L", "last", "the loss ends the last stage")
    later = [found for found in signs if found.sign in "tm"]
    early = [found for found, after in pairwise(later) if found.sign == "m" and after.sign == "t"]
    if early:
        yield _order(text, early[0].at, "m stands before a t", "m after every t", "move m to just before L")
    stages = [sum(other.sign == "|" for other in signs[:i]) for i, found in enumerate(signs) if found.sign == "m"]
    if len(set(stages)) > 1 and not early:
        at = [found.at for found in signs if found.sign == "m"][-1]
        yield _order(text, at, "m stands in several stages", "all m in one stage", "move them together: mmL")


def _end_problems(text: str, signs: list[Sign], letter: str, end: str, why: str) -> Iterator[Problem]:
    """E seen from the front or L seen from the back: at the very end, and nowhere else."""
    places = [found.at for found in signs if found.sign == letter]
    expected = f"{letter} once, as the {end} sign: {why}"
    verb = "begin" if end == "first" else "end"
    if not places:
        yield _order(text, 0, f"there is no {letter}", expected, f"{verb} with {letter}")
        return
    if signs[0].sign != letter:
        yield _order(text, signs[0].at, f"the {end} sign is {signs[0].sign!r}", expected, f"{verb} with {letter}")
    if len(places) > 1:
        yield _order(text, places[1], f"{letter} stands {len(places)} times", expected, "leave the others out")


def _order(text: str, at: int, what: str, expected: str, fix: str) -> Problem:
    return Problem("pipeline-order", WHERE, placed(text, at, what), expected, fix)
