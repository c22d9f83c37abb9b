"""Gradient buckets, parameter gathers and rings: what the tasks expose is what the closed forms say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.passes.overlap.gradients import (
    bucketed_exposed_s,
    bucketed_tasks,
    buckets_in_backward_order,
    gather_exposed_s,
    sharded_backward_exposed_s,
    staged_exposed_s,
    two_buffer_exposed_s,
)
from stepgraph.passes.overlap.rings import ring_backward_exposed_s, ring_forward_exposed_s, ring_forward_tasks
from stepgraph.passes.overlap.streams import schedule

TIME = st.floats(0, 10)
PAIRS = st.lists(st.tuples(TIME, TIME), min_size=1, max_size=8)


@given(PAIRS)
def test_gradient_buckets(pairs: list[tuple[float, float]]) -> None:
    b, c = [b for b, _ in pairs], [c for _, c in pairs]
    longest = max(sum(b[: k + 1]) + sum(c[k:]) for k in range(len(b)))
    assert bucketed_exposed_s(b, c) == pytest.approx(longest - sum(b), abs=1e-9)


@given(st.integers(1, 9), TIME, TIME)
def test_equal_gradient_buckets(n: int, b: float, c: float) -> None:
    assert bucketed_exposed_s([b] * n, [c] * n) == pytest.approx(max(c, n * c - (n - 1) * b), abs=1e-9)


@given(PAIRS, TIME)
def test_backward_after_the_last_bucket_hides_more(pairs: list[tuple[float, float]], rest: float) -> None:
    b, c = [b for b, _ in pairs], [c for _, c in pairs]
    assert bucketed_exposed_s([*b, rest], c) == pytest.approx(max(0, bucketed_exposed_s(b, c) - rest), abs=1e-9)


def test_buckets_contend_for_multiprocessors_when_told() -> None:
    # 8 of a collective beside the second 10 of compute, kappa = 132/116: 10 + 8 (1 - 116/132); then the last 3
    timeline = schedule(bucketed_tasks([10.0, 10.0], [8.0, 3.0]), 132)
    assert timeline.slowdown_s == pytest.approx(8 * 16 / 132)
    assert timeline.makespan_s == pytest.approx(10 + 10 + 8 * 16 / 132 + 3)


@given(PAIRS)
def test_one_bucket_of_look_ahead(pairs: list[tuple[float, float]]) -> None:
    c, f = [c for c, _ in pairs], [f for _, f in pairs]
    form = c[0] + sum(max(0, after - before) for after, before in zip(c[1:], f[:-1], strict=True))
    assert gather_exposed_s(c, f) == pytest.approx(form, abs=1e-9)


@given(st.integers(2, 9), TIME, TIME, TIME)
def test_gathers_and_reductions_on_one_communicator(units: int, g: float, b: float, r: float) -> None:
    form = g + max(0, g - b) + (units - 2) * max(0, g + r - b) + max(0, r - b) + r
    assert sharded_backward_exposed_s([g] * units, [b] * units, [r] * units) == pytest.approx(form, abs=1e-9)
    assert sharded_backward_exposed_s([g], [b], [r]) == pytest.approx(g + r, abs=1e-9)


@given(PAIRS)
def test_two_buffers(pairs: list[tuple[float, float]]) -> None:
    b, c = [b for b, _ in pairs], [c for _, c in pairs]
    form = c[-1] + sum(max(0, first - then) for first, then in zip(c[:-1], b[1:], strict=True))
    assert two_buffer_exposed_s(b, c) == pytest.approx(form, abs=1e-9)


@given(PAIRS)
def test_two_buffers_never_expose_less_than_buckets_without_end(pairs: list[tuple[float, float]]) -> None:
    b, c = [b for b, _ in pairs], [c for _, c in pairs]
    assert two_buffer_exposed_s(b, c) >= bucketed_exposed_s(b, c) - 1e-9


@given(st.integers(1, 8), TIME, TIME)
def test_a_ring_of_context_parallel_ranks(cp: int, a: float, c: float) -> None:
    assert ring_forward_exposed_s(cp, a, c) == pytest.approx((cp - 1) * max(0, c - a), abs=1e-9)
    backward = (cp - 2) * max(0, 2 * c - a) + 2 * max(0, c - a) if cp > 1 else 0.0
    assert ring_backward_exposed_s(cp, a, c) == pytest.approx(backward, abs=1e-9)
    assert schedule(ring_forward_tasks(cp, a, c)).compute_s == pytest.approx(cp * a)


def test_a_pipeline_exposes_the_first_stage_or_what_a_later_bubble_cannot_hold() -> None:
    # stages 1 to 3 end 2, 4 and 6 before stage 0 and reduce for 5 each: 3 is left of the first
    assert staged_exposed_s(1.0, [5.0, 5.0, 5.0], [2.0, 4.0, 6.0]) == 3.0
    assert staged_exposed_s(4.0, [5.0], [2.0]) == 4.0
    assert staged_exposed_s(0.0, [], []) == 0.0


def test_buckets_are_filled_from_the_end_of_the_model() -> None:
    # four layers of 40, ready 4 3 2 1 in backward; buckets of 70 close once they hold 80
    layers = [(40, 4.0), (40, 3.0), (40, 2.0), (40, 1.0)]
    assert buckets_in_backward_order(layers, 70) == [(80, 2.0), (80, 4.0)]
    assert buckets_in_backward_order(layers, 100) == [(120, 3.0), (40, 4.0)]
    assert buckets_in_backward_order(layers, 40) == [(40, 1.0), (40, 2.0), (40, 3.0), (40, 4.0)]
    assert buckets_in_backward_order(layers, None) == [(160, 4.0)]
    assert buckets_in_backward_order([], 40) == []
    # a tied table stands first in the model, but the head's gradient of it is early: the bucket waits for the last
    assert buckets_in_backward_order([(10, 5.0), (40, 9.0)], 100) == [(50, 9.0)]


@given(st.lists(st.tuples(st.integers(1, 50), TIME), max_size=20), st.integers(1, 200))
def test_buckets_keep_every_element_and_all_but_the_last_are_full(pieces: list[tuple[int, float]], size: int) -> None:
    buckets = buckets_in_backward_order(pieces, size)
    assert sum(count for count, _ in buckets) == sum(count for count, _ in pieces)
    assert all(size <= count < size + 50 for count, _ in buckets[:-1])
    assert max((ready for _, ready in buckets), default=0) == max((ready for _, ready in pieces), default=0)


def test_lengths_that_do_not_fit_are_bugs_of_the_caller() -> None:
    with pytest.raises(ValueError, match="3 pieces of backward for 1 buckets"):
        bucketed_exposed_s([1.0, 1.0, 1.0], [1.0])
    with pytest.raises(ValueError, match="1 and 2 times"):
        gather_exposed_s([1.0], [1.0, 1.0])
    assert gather_exposed_s([], []) == bucketed_exposed_s([], []) == two_buffer_exposed_s([], []) == 0
    with pytest.raises(ValueError, match="buckets of 0 elements"):
        buckets_in_backward_order([(1, 0.0)], 0)
