"""A pipeline run as a picture: ranks down, time to the right. SVG without any engine, equal for equal input."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median_low
from types import MappingProxyType
from typing import Final

import attrs

from stepgraph.bars import LOWER, WHOLE, Bar
from stepgraph.errors import refuse
from stepgraph.svgparts import box, element, mixed, number, ticks, tooltip, words

MOST_BOXES: Final = 10_000
"""Pictures of more boxes are refused unless somebody says so: viewers become slow and nobody can read them."""

COLOURS: Final = MappingProxyType({"F": "#56b4e9", "B": "#e69f00", "I": "#cc79a7", "W": "#009e73"})
"""Colours of the kinds of computation, told apart also by people who are colour-blind.

Source: Okabe and Ito, Color Universal Design (https://jfly.uni-koeln.de/color/).
"""
MEANINGS: Final = MappingProxyType({"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"})

_TRANSFER: Final = "#8c959f"
_RIM: Final = "#57606a"
_PALEST: Final = 0.55
_LANE: Final = 26.0
_PITCH: Final = 32.0
_CALL: Final = 12.0
_TOP: Final = 74.0
_SWATCH: Final = 14.0
_MARGIN: Final = 16.0
_CHARACTER: Final = 6.2  # width at font size 11, a little more than most fonts need
_NARROWEST, _WIDEST = 560.0, 4800.0
_FONT: Final = "Helvetica, Arial, sans-serif"
_STYLE: Final = (
    "@media (prefers-color-scheme: dark) {.page {fill: #0d1117} .lane {fill: #21262d} .ink {fill: #e6edf3} "
    ".faint {fill: #9198a1} .line {stroke: #6e7681} .hatch {stroke: #9198a1}}"
)
_HATCH: Final = (
    '<pattern id="wait" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path class="hatch" d="M0 0V5" stroke="#6e7781" stroke-width="2"/></pattern>'
)


@attrs.frozen
class Caption:
    """The words of a picture: the title, a line below it, and what the axis says about its numbers."""

    title: str
    note: str = ""
    axis: str = "time (s)"


@attrs.frozen
class _Scale:
    """Where ranks and times lie. Units: pixels, pixels per second."""

    ranks: int
    end_s: float
    left: float
    plot: float

    @property
    def bottom(self) -> float:
        return _TOP + self.ranks * _PITCH

    def x(self, time_s: float) -> float:
        return self.left + (self.plot * (time_s / self.end_s) if self.end_s else 0.0)

    def y(self, rank: int) -> float:
        return _TOP + rank * _PITCH


def to_svg(
    bars: Sequence[Bar], ranks: int, makespan_s: float, caption: Caption, *, most_boxes: int = MOST_BOXES
) -> str:
    """Draw a run: a lane per rank, a box per computation with its micro-batch, thin bars for communication calls.

    Colours tell the kinds of computation apart, paler shades the later chunks of a rank. A call is hatched while it
    waits and grey while it transfers; what is left blank is time in which the rank does neither. Every bar says its
    name, start and end when the pointer rests on it. Texts and background follow a viewer's dark mode.

    Raises: InputError (too-many-boxes).
    """
    check_boxes(len(bars), most_boxes)
    left = _MARGIN + _CHARACTER * len(f"rank {ranks - 1}") + 8
    scale = _Scale(ranks, makespan_s, left, _plot_width(bars, makespan_s))
    chunks = 1 + max((bar.chunk for bar in bars), default=0)
    legend, legend_end = _legend(bars, chunks)
    longest = max(len(caption.title) * 1.35, len(caption.note))
    width = max(scale.left + scale.plot, _MARGIN + longest * _CHARACTER, legend_end) + _MARGIN
    lines = [*_page(width, scale.bottom + 44, caption), *legend, *_axis(scale, caption.axis)]
    return "\n".join([*lines, *_lanes(bars, chunks, scale), "</svg>", ""])


def check_boxes(boxes: int, most: int) -> None:
    """Refuse what would be too many boxes, before work goes into them. Raises: InputError (too-many-boxes)."""
    if boxes > most:
        fix = "draw fewer micro-batches or ranks, or raise --max-boxes"
        raise refuse("too-many-boxes", "picture", f"{boxes} boxes to draw", f"at most {most}", fix)


def _plot_width(bars: Sequence[Bar], makespan_s: float) -> float:
    """So wide that the number of a micro-batch fits into the usual computation, within limits."""
    lengths = [bar.end_s - bar.start_s for bar in bars if bar.letter and bar.end_s > bar.start_s]
    if not lengths or not makespan_s:
        return _NARROWEST
    digits = len(str(max(bar.microbatch for bar in bars)))
    usual = max(16.0, _CHARACTER * digits + 5)
    return min(max(makespan_s / median_low(lengths) * usual, _NARROWEST), _WIDEST)


def _page(width: float, height: float, caption: Caption) -> Iterator[str]:
    """What comes first: the size, the colours of a dark page, the background, the words on top."""
    sizes = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {sizes} font-family="{_FONT}" font-size="11">'
    yield tooltip(caption.title)
    yield f"<style>{_STYLE}</style>"
    yield f"<defs>{_HATCH}</defs>"
    yield element("rect", class_="page", width="100%", height="100%", fill="#ffffff")
    yield words(caption.title, _MARGIN, 22, class_="ink", fill="#1f2328", font_size="14", font_weight="bold")
    if caption.note:
        yield words(caption.note, _MARGIN, 40, class_="ink", fill="#1f2328")


def _legend(bars: Sequence[Bar], chunks: int) -> tuple[list[str], float]:
    """Swatches with words, of what is drawn only, each in the shades of the chunks; and where the row ends."""
    letters = {bar.letter for bar in bars}
    shown = [(MEANINGS[letter], _shades(letter, chunks)) for letter in COLOURS if letter in letters]
    calls = [bar for bar in bars if not bar.letter]
    if any(bar.end_s - bar.start_s > bar.wait_s for bar in calls):
        shown.append(("transfer", [_TRANSFER]))
    if any(bar.wait_s for bar in calls):
        shown.append(("waiting", ["url(#wait)"]))
    remarks = ["paler: later chunks", "blank: idle"] if chunks > 1 else ["blank: idle"]
    lines, x = [], _MARGIN
    for meaning, fills in (*shown, *((remark, []) for remark in remarks)):
        for fill in fills:
            lines.append(box(x, 50, _SWATCH, 10, fill=fill, stroke=_RIM, stroke_width=0.5))
            x += _SWATCH
        x += 5 if fills else 0
        lines.append(words(meaning, x, 59, class_="faint", fill="#57606a"))
        x += len(meaning) * _CHARACTER + 12
    return lines, x


def _shades(letter: str, chunks: int) -> list[str]:
    """The shades of a kind, chunk by chunk; of many chunks the first and the last."""
    some = range(chunks) if chunks <= 4 else (0, chunks - 1)
    return [mixed(COLOURS[letter], _paleness(chunk, chunks)) for chunk in some]


def _axis(scale: _Scale, label: str) -> Iterator[str]:
    """Lanes, lines through them at round times, the times below, and what they are."""
    for rank in range(scale.ranks):
        y = scale.y(rank)
        yield words(f"rank {rank}", scale.left - 8, y + 17, class_="ink", fill="#1f2328", text_anchor="end")
        yield box(scale.left, y, scale.plot, _LANE, class_="lane", fill="#f1f3f5")
    for tick in ticks(scale.end_s, round(scale.plot / 60)):
        x = scale.x(tick)
        line = f"M{number(x)} {number(_TOP - 4)}V{number(scale.bottom)}"
        yield element("path", class_="line", d=line, stroke="#afb8c1", stroke_width=0.5)
        yield words(f"{tick:.6g}", x, scale.bottom + 13, class_="faint", fill="#57606a", text_anchor="middle")
    yield words(label, scale.left, scale.bottom + 32, class_="faint", fill="#57606a")


def _lanes(bars: Sequence[Bar], chunks: int, scale: _Scale) -> Iterator[str]:
    """One group per rank, its bars in time."""
    by_rank: dict[int, list[Bar]] = defaultdict(list)
    for bar in bars:
        by_rank[bar.rank].append(bar)
    for rank in range(scale.ranks):
        yield f'<g class="rank" id="rank{rank}">'
        for bar in by_rank[rank]:
            yield _computation(bar, chunks, scale) if bar.letter else _call(bar, scale)
        yield "</g>"


def _computation(bar: Bar, chunks: int, scale: _Scale) -> str:
    """A box in the colour of its kind, with the number of its micro-batch where that fits."""
    x, width = scale.x(bar.start_s), scale.x(bar.end_s) - scale.x(bar.start_s)
    height = _LANE if bar.part == WHOLE else _LANE / 2
    y = scale.y(bar.rank) + (height if bar.part == LOWER else 0.0)
    fill = mixed(COLOURS[bar.letter], _paleness(bar.chunk, chunks))
    drawn = box(x, y, width, height, class_=bar.letter, fill=fill, stroke=_RIM, stroke_width=0.5)
    which = f"{bar.microbatch}"
    fits = len(which) * _CHARACTER + 2 <= width
    label = words(which, x + width / 2, y + height / 2 + 4, fill="#0d1117", text_anchor="middle") if fits else ""
    return f"<g>{_told(bar)}{drawn}{label}</g>"


def _call(bar: Bar, scale: _Scale) -> str:
    """A thin bar: hatched while it waits, then grey."""
    times = (bar.start_s, min(bar.start_s + bar.wait_s, bar.end_s), bar.end_s)
    begins, runs, ends = (scale.x(time_s) for time_s in times)
    y = scale.y(bar.rank) + (_LANE - _CALL) / 2
    drawn = [
        box(left, y, right - left, _CALL, class_=name, fill=fill, stroke=_RIM, stroke_width=0.3)
        for name, fill, left, right in (("wait", "url(#wait)", begins, runs), ("transfer", _TRANSFER, runs, ends))
        if right > left
    ]
    return f"<g>{_told(bar)}{''.join(drawn)}</g>"


def _told(bar: Bar) -> str:
    """`4B0: 12 to 14`; of a call also how long it waits."""
    wait = f", of which {bar.wait_s:.6g} wait" if bar.wait_s else ""
    return tooltip(f"{bar.name}: {bar.start_s:.6g} to {bar.end_s:.6g}{wait}")


def _paleness(chunk: int, chunks: int) -> float:
    """The share of white in a chunk's colours: none in the first chunk, most in the last."""
    return _PALEST * chunk / (chunks - 1) if chunks > 1 else 0.0
