"""FSDP prefetch and a context-parallel ring on graphs written by hand: no lowering makes them yet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepgraph
from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.tensor import Axis, Kind, Placement, Tensor
from stepgraph.passes.base import setting
from stepgraph.passes.overlap.gradients import gather_exposed_s, sharded_backward_exposed_s
from stepgraph.passes.overlap.policies import parse_policy
from stepgraph.passes.overlap.rings import ring_forward_exposed_s
from stepgraph.passes.overlap.templates import Scheduled, schedule_phase

H100 = setting(stepgraph.load_target("h100"))
DP, CP = Axis("dp", 4, 1), Axis("cp", 4, 1)
times = st.lists(st.floats(0, 10, allow_subnormal=False), min_size=2, max_size=6)


def plain(name: str, dims: str = "bd", kind: Kind = Kind.ACT) -> Tensor:
    return Tensor(name, dims, (8,) * len(dims), kind=kind)


def whole(name: str) -> Tensor:
    """A parameter as a unit computes with it."""
    return Tensor(name, "df", (8, 8), kind=Kind.PARAM)


def forward_units(count: int) -> Graph:
    """x -> unit 0 -> unit 1 ...: each gathers its weight over data ranks, then multiplies."""
    ops: list[Op] = []
    stream = plain("x")
    for k in range(count):
        part = attrs.evolve(whole(f"w{k}"), place=(Placement(DP, 0),))
        ops.append(Op(f"gather{k}", "all_gather", (part,), (whole(f"gather{k}"),), group=(DP,)))
        out = Tensor(f"unit{k}", "bf", (8, 8))
        ops.append(Op(f"unit{k}", "linear", (stream, whole(f"gather{k}")), (out,)))
        stream = attrs.evolve(out, dims="bd")
    return Graph("units", tuple(ops), (stream,))


def backward_units(count: int) -> Graph:
    """The same in backward: gather, the unit's gradients in one op, reduce-scatter."""
    ops: list[Op] = []
    grad = plain("dy", "bf", Kind.GRAD)
    for k in range(count):
        part = attrs.evolve(whole(f"w{k}"), place=(Placement(DP, 0),))
        pending = Tensor(f"unit{k}", "df", (8, 8), kind=Kind.GRAD, place=(Placement(DP, None),))
        reduced = attrs.evolve(pending, name=f"reduce{k}", place=(Placement(DP, 0),))
        ops += [
            Op(f"gather{k}", "all_gather", (part,), (whole(f"gather{k}"),), phase=Phase.BACKWARD, group=(DP,)),
            Op(f"unit{k}", "linear_dx", (grad, whole(f"gather{k}")), (pending,), phase=Phase.BACKWARD, role="dx"),
            Op(f"reduce{k}", "reduce_scatter", (pending,), (reduced,), phase=Phase.BACKWARD, group=(DP,)),
        ]
        grad = attrs.evolve(pending, dims="bf", place=())
    return Graph("units", tuple(ops), ())


def ring(steps: int) -> Graph:
    """Step k attends to the keys that are here; message k + 1 is made of those of message k."""
    ops: list[Op] = []
    keys = plain("keys")
    for k in range(steps):
        ops.append(Op(f"attend{k}", "add", (plain("q"), keys), (plain(f"attend{k}"),)))
        if k + 1 < steps:
            message = plain(f"message{k + 1}")
            ops.append(Op(message.name, "all_gather", (keys,), (message,), group=(CP,)))
            keys = message
    return Graph("ring", tuple(ops), ())


def run(graph: Graph, phase: Phase, policy: str, seconds: Sequence[float]) -> Scheduled:
    free = attrs.evolve(parse_policy(policy), contention=False)
    return schedule_phase(graph, phase, seconds, free, H100)


@given(times, times)
def test_units_are_gathered_one_ahead(collective: list[float], compute: list[float]) -> None:
    """c_0 + sum of max(0, c_(k+1) - f_k); without the policy, the sum of all."""
    count = min(len(collective), len(compute))
    pairs = list(zip(collective[:count], compute[:count], strict=True))
    seconds = [own for pair in pairs for own in pair]
    graph = forward_units(count)
    (dp,) = run(graph, Phase.FORWARD, "fsdp-prefetch", seconds).communicators
    expected = pairs[0][0] + sum(max(0.0, c - f) for (_, f), (c, _) in pairwise(pairs))
    assert dp.name == "dp"
    assert dp.total_s == pytest.approx(sum(collective[:count]))
    assert dp.exposed_s == pytest.approx(expected, abs=1e-9)
    assert expected == pytest.approx(gather_exposed_s(collective[:count], compute[:count]), abs=1e-9)
    assert run(graph, Phase.FORWARD, "none", seconds).seconds == pytest.approx(sum(seconds))


@given(st.integers(2, 6), *[st.floats(0, 10, allow_subnormal=False)] * 3)
def test_gathers_and_reductions_share_a_communicator(count: int, gather: float, backward: float, reduce: float) -> None:
    """g + max(0, g - b) + (L - 2) max(0, g + r - b) + max(0, r - b) + r for L equal units."""
    graph = backward_units(count)
    (dp,) = run(graph, Phase.BACKWARD, "fsdp-prefetch", [gather, backward, reduce] * count).communicators
    between = (count - 2) * max(0.0, gather + reduce - backward)
    ends = gather + max(0.0, gather - backward) + max(0.0, reduce - backward) + reduce
    assert dp.exposed_s == pytest.approx(ends + between, abs=1e-9)
    form = sharded_backward_exposed_s([gather] * count, [backward] * count, [reduce] * count)
    assert dp.exposed_s == pytest.approx(form, abs=1e-9)


@given(st.integers(2, 6), *[st.floats(0, 10, allow_subnormal=False)] * 2)
def test_a_ring_passes_keys_beside_attention(steps: int, attention: float, transfer: float) -> None:
    """(cp - 1) max(0, c - a); without the policy (cp - 1) c."""
    seconds = [attention, transfer] * (steps - 1) + [attention]
    graph = ring(steps)
    (cp,) = run(graph, Phase.FORWARD, "cp-ring", seconds).communicators
    assert cp.name == "cp"
    assert cp.exposed_s == pytest.approx((steps - 1) * max(0.0, transfer - attention), abs=1e-9)
    assert cp.exposed_s == pytest.approx(ring_forward_exposed_s(steps, attention, transfer), abs=1e-9)
    (all_of_it,) = run(graph, Phase.FORWARD, "none", seconds).communicators
    assert all_of_it.exposed_s == pytest.approx((steps - 1) * transfer, abs=1e-9)
