"""Pictures of pipeline runs: as SVG and as lines of text."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.bars import LOWER, UPPER, WHOLE, Bar, bars_of
from stepgraph.errors import InputError
from stepgraph.passes.pipeline.actions import BACKWARD, FORWARD, Order
from stepgraph.passes.pipeline.events import Event
from stepgraph.passes.pipeline.modes import parse_mode
from stepgraph.passes.pipeline.schedules import SCHEDULES, schedule_of
from stepgraph.passes.pipeline.simulation import simulate
from stepgraph.passes.pipeline.timing import uniform
from stepgraph.svgparts import element, escaped, mixed, number, ticks
from stepgraph.textlanes import text_lanes
from stepgraph.timeline import COLOURS, Caption, to_svg

SVG = "{http://www.w3.org/2000/svg}"
STEP = 0.02  # coordinates have two decimals, and a right end is the sum of two of them


def order_of(name: str, ranks: int = 4, microbatches: int = 8) -> Order:
    return schedule_of(name).order(ranks, chunks_of(name), microbatches)


def chunks_of(name: str) -> int:
    return schedule_of(name).chunks or (2 if name in ("interleaved", "looped-bfs") else 1)


def drawn(order: Order, mode: str = "async", p2p: float = 0.0) -> tuple[list[Bar], float]:
    """The bars of an order with forward 1, backward 2, half of it for weights, per rank; and the makespan."""
    timing = uniform(len(order.stage_rank), 1.0, 2.0, p2p, 1.0, order.chunks)
    run = simulate(order, timing, parse_mode(mode), events=True)
    return list(bars_of(run.events, order)), run.makespan_s


def svg_of(bars: list[Bar], ranks: int, makespan_s: float, title: str = "run") -> ElementTree.Element:
    return ElementTree.fromstring(to_svg(bars, ranks, makespan_s, Caption(title)))


def lanes_of(root: ElementTree.Element) -> list[list[ElementTree.Element]]:
    """The groups of the bars, rank by rank."""
    return [list(lane) for lane in root.findall(f"{SVG}g[@class='rank']")]


def span(rect: ElementTree.Element) -> tuple[float, float]:
    start = float(rect.attrib["x"])
    return start, start + float(rect.attrib["width"])


def rects(bar: ElementTree.Element) -> list[ElementTree.Element]:
    return bar.findall(f"{SVG}rect")


def bar(start: float, end: float, *, rank: int = 0, microbatch: int = 0, letter: str = "F", name: str = "0F0") -> Bar:
    return Bar(rank, letter, name, 0, microbatch, start, end)


# one stage per rank, or Megatron-LM's own interleaving: other orders lock in blocking calls
RUNS = [(name, "async", 0.1) for name in SCHEDULES] + [(name, "joint:0.8", 0.0) for name in SCHEDULES]
RUNS += [(name, "blocking", 0.1) for name in ("gpipe", "1f1b", "interleaved", "zb-h1")]


@pytest.mark.parametrize(("name", "mode", "p2p"), RUNS)
def test_every_action_is_a_box_in_its_lane_and_no_two_overlap(name: str, mode: str, p2p: float) -> None:
    order = order_of(name)
    bars, makespan_s = drawn(order, mode, p2p)
    root = svg_of(bars, 4, makespan_s)
    lanes = lanes_of(root)
    assert len(lanes) == 4
    for lane, slots in zip(lanes, order.ranks, strict=True):
        boxes = [rect for one in lane for rect in rects(one) if rect.attrib["class"] in "FBIW"]
        assert len(boxes) == sum(map(len, slots))
        spans = sorted({span(rect) for one in lane for rect in rects(one)})  # the halves of a pair have one span
        assert all(before[1] <= after[0] + STEP for before, after in pairwise(spans))


@pytest.mark.parametrize("mode", ["async", "blocking"])
def test_the_last_box_ends_where_the_lanes_end(mode: str) -> None:
    bars, makespan_s = drawn(order_of("1f1b"), mode, 0.1)
    root = svg_of(bars, 4, makespan_s)
    left, right = span(next(rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "lane"))
    spans = [span(rect) for lane in lanes_of(root) for one in lane for rect in rects(one)]
    assert min(start for start, _ in spans) == pytest.approx(left, abs=STEP)
    assert max(end for _, end in spans) == pytest.approx(right, abs=STEP)
    assert right <= float(root.attrib["width"])


def test_boxes_lie_to_scale_and_say_what_they_are() -> None:
    """1F1B on two ranks: rank 1 runs F0 from 1 to 2 and B0 from 2 to 4 of 9 = (2 + 2 - 1) (1 + 2)."""
    bars, makespan_s = drawn(order_of("1f1b", 2, 2))
    assert makespan_s == (2 + 2 - 1) * (1 + 2)
    root = svg_of(bars, 2, makespan_s)
    left, right = span(next(rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "lane"))
    told = {one.findtext(f"{SVG}title"): one for one in lanes_of(root)[1]}
    backward = told["1B0: 2 to 4"]
    expected = tuple(left + (right - left) * time / 9 for time in (2, 4))
    assert span(rects(backward)[0]) == pytest.approx(expected, abs=STEP)
    assert backward.findtext(f"{SVG}text") == "0"
    assert {"1F0: 1 to 2", "1F1: 4 to 5", "1B1: 5 to 7"} <= set(told)


def test_kinds_and_chunks_have_colours_of_their_own() -> None:
    bars, makespan_s = drawn(order_of("dualpipev"))
    groups = [one for lane in lanes_of(svg_of(bars, 4, makespan_s)) for one in lane]
    fills = {(rect.attrib["class"], rect.attrib["fill"]) for one in groups for rect in rects(one)}
    computed = {(letter, fill) for letter, fill in fills if letter in COLOURS}
    assert len(computed) == 4 * 2  # F, B, I and W in two chunks
    assert len({fill for _, fill in computed}) == 8


def luminance(colour: str) -> float:
    """Source: W3C, Web Content Accessibility Guidelines 2.1, relative luminance."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("letter", COLOURS)
def test_numbers_can_be_read_on_their_boxes(letter: str) -> None:
    """Contrast of at least 4.5, as WCAG asks of text; shades only get paler."""
    assert (luminance(COLOURS[letter]) + 0.05) / (luminance("#0d1117") + 0.05) >= 4.5


def test_a_pair_that_runs_as_one_op_is_two_halves_one_above_the_other() -> None:
    bars, makespan_s = drawn(order_of("dualpipev"), "joint:1")
    halves = [one for one in bars if one.part != WHOLE]
    assert [one.part for one in halves] == [UPPER, LOWER] * (len(halves) // 2)
    assert {one.letter for one in halves if one.part == UPPER} == {"F"}
    first, second = halves[:2]
    assert (first.start_s, first.end_s) == (second.start_s, second.end_s)
    told = {one.findtext(f"{SVG}title"): rects(one)[0].attrib for one in lanes_of(svg_of(bars, 4, makespan_s))[0]}
    upper, lower = (
        next(rect for text, rect in told.items() if text and text.startswith(half.name)) for half in halves[:2]
    )
    assert float(upper["y"]) + float(upper["height"]) == float(lower["y"])
    assert upper["height"] == lower["height"] == "13"


def test_the_forward_of_a_pair_comes_first_however_its_slot_is_written() -> None:
    order = Order((0,), ((((BACKWARD, 0, 0), (FORWARD, 0, 1)),),))
    event = Event(0, "forward_backward", "compute", 0, 1, 0.0, 3.0)
    assert [(one.name, one.part) for one in bars_of([event], order)] == [("0F1", UPPER), ("0B0", LOWER)]


def test_calls_that_take_no_time_are_left_out() -> None:
    bars, _ = drawn(order_of("interleaved"), "blocking", 0.0)
    calls = [one for one in bars if not one.letter]
    assert calls
    assert all(one.end_s > one.start_s for one in calls)


def test_a_call_is_hatched_while_it_waits_and_grey_while_it_transfers() -> None:
    call = Bar(0, "", "recv_forward", 0, 0, 0.0, 4.0, wait_s=3.0)
    ((drawn_call,),) = lanes_of(svg_of([call], 1, 4.0))
    wait, transfer = rects(drawn_call)
    assert (wait.attrib["class"], transfer.attrib["class"]) == ("wait", "transfer")
    assert float(wait.attrib["width"]) == pytest.approx(3 * float(transfer.attrib["width"]), abs=STEP)
    assert drawn_call.findtext(f"{SVG}title") == "recv_forward: 0 to 4, of which 3 wait"


def test_a_number_is_left_out_where_it_does_not_fit() -> None:
    short, long = bar(0, 0.01, microbatch=7), bar(1, 2, microbatch=8)
    lane = lanes_of(svg_of([short, long, bar(2, 3)], 1, 3.0))[0]
    assert [one.findtext(f"{SVG}text") for one in lane] == [None, "8", "0"]


def test_names_are_escaped_and_what_xml_forbids_is_replaced() -> None:
    root = svg_of([bar(0, 1, name='<"&\x01')], 1, 1.0, title="a<b>&\"'\x00\ud800.csv")
    assert root.findtext(f"{SVG}title") == "a<b>&\"'\ufffd\ufffd.csv"
    assert lanes_of(root)[0][0].findtext(f"{SVG}title") == '<"&\ufffd: 0 to 1'


def test_too_many_boxes_are_refused() -> None:
    with pytest.raises(InputError, match="too-many-boxes"):
        to_svg([bar(0, 1)] * 3, 1, 1.0, Caption("run"), most_boxes=2)


def test_a_run_that_takes_no_time_is_a_picture_too() -> None:
    assert len(lanes_of(svg_of([bar(0, 0)], 1, 0.0))[0]) == 1
    assert lanes_of(svg_of([], 2, 0.0)) == [[], []]


def test_the_same_run_is_the_same_text() -> None:
    first, second = (to_svg(*picture(), Caption("run")) for picture in (small, small))
    assert first == second


def small() -> tuple[list[Bar], int, float]:
    bars, makespan_s = drawn(order_of("zbv", 2, 3), "async", 0.1)
    return bars, 2, makespan_s


@given(st.floats(1e-12, 1e12), st.integers(1, 50))
def test_ticks_are_round_and_few(end: float, most: int) -> None:
    found = list(ticks(end, most))
    assert found[0] == 0.0
    assert len(found) <= most + 1
    assert found[-1] <= end * (1 + 1e-9) < found[-1] + 2.5 * end / most + end * 1e-6 or most == 1
    if len(found) > 1:
        assert f"{found[1]:e}"[:8] in ("1.000000", "2.000000", "5.000000")


@pytest.mark.parametrize(
    ("value", "shown"), [(3.0, "3"), (3.10, "3.1"), (3.14159, "3.14"), (-0.001, "0"), (100.0, "100")]
)
def test_coordinates_are_short(value: float, shown: str) -> None:
    assert number(value) == shown


def test_elements_are_written_with_their_attributes() -> None:
    assert element("g", "<a/>", class_='x"<', stroke_width=0.5) == '<g class=\'x"&lt;\' stroke-width="0.5"><a/></g>'
    assert escaped("a\tb&") == "a\tb&amp;"
    assert (mixed("#204060", 0.0), mixed("#204060", 1.0)) == ("#204060", "#ffffff")
    assert mixed("#000000", 0.5) == "#808080"


def test_lines_of_text_show_times_to_scale() -> None:
    """Two columns are one unit of time: forward takes 1, backward 2."""
    bars, makespan_s = drawn(order_of("1f1b", 2, 3))
    assert text_lanes(bars, 2, makespan_s) == (
        "F0F1....B0==F2B1==..B2==",
        "..F0B0==F1B1==F2B2==....",
    )


def test_odd_chunks_are_in_lower_case_in_lines_of_text() -> None:
    bars, makespan_s = drawn(order_of("zbv", 2, 1))
    assert text_lanes(bars, 2, makespan_s) == (
        "F0....f0i0w0....I0W0",
        "..F0f0....i0w0I0W0..",
    )


def test_a_pair_stands_one_after_the_other_in_lines_of_text() -> None:
    pair = [Bar(0, "F", "0F1", 0, 1, 0.0, 2.0, part=UPPER), Bar(0, "B", "1B0", 1, 0, 0.0, 2.0, part=LOWER)]
    assert text_lanes(pair, 1, 2.0) == ("F1b0",)


def test_a_number_fits_wherever_its_box_begins() -> None:
    """Three columns per unit: the second begins at 3.75, which is 4, the third at 7.5, which is 8."""
    bars = [bar(start, start + 1, microbatch=10) for start in (0.0, 1.25, 2.5)]
    assert text_lanes(bars, 1, 3.5) == ("F10.F10.F10",)


@pytest.mark.parametrize(
    ("bars", "ranks", "makespan_s"),
    [
        ([bar(0, 1), bar(1, 101)], 1, 101.0),  # 2 columns x 101
        ([bar(0, 1)], 17, 1.0),
        ([], 2, 0.0),
        ([bar(0, 0)], 1, 0.0),
    ],
)
def test_what_does_not_fit_is_not_shown_in_text(bars: list[Bar], ranks: int, makespan_s: float) -> None:
    assert text_lanes(bars, ranks, makespan_s) == ()


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.25, 1)), min_size=1, max_size=8))
def test_lines_of_text_show_every_computation_once(gaps: list[tuple[float, float]]) -> None:
    bars, clock = [], 0.0
    for which, (gap, length) in enumerate(gaps):
        bars.append(bar(clock + gap, clock + gap + length, microbatch=which))
        clock += gap + length
    (line,) = text_lanes(bars, 1, clock)
    assert re.findall("F([0-9]+)", line) == [str(which) for which in range(len(bars))]
