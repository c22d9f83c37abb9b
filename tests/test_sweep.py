"""A sweep over micro-batch sizes: costs per micro-batch, what grows too fast, and where the fastest size changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from stepgraph import sweeprun
from stepgraph.cli import main
from stepgraph.errors import InputError
from stepgraph.flips import MARGIN, find_flips
from stepgraph.growth import NAMES, MicroBatchCost, faster_than_linear
from stepgraph.hwtargets.reading import load_target
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import lower
from stepgraph.passes.base import setting
from stepgraph.passes.iteration import cost_step, iterate
from stepgraph.prediction import predict
from stepgraph.sweep import Sweep, regime_of
from stepgraph.sweeprun import sweep_micro_batch

EXPERTS = Layout(dp=32, pp=16, ep=8)
DENSE = Layout(tp=2, pp=4, seq=2048)
LINE = ("llama-3-8b", "--tp", "2", "--pp", "4", "--seq", "2048", "--sweep-micro-batch")


@cache
def experts(global_batch: int) -> Sweep:
    """The layout of the source's case study, on a model of about its kind."""
    return sweep_micro_batch("qwen3-30b-a3b", attrs.evolve(EXPERTS, global_batch=global_batch), "b200")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ("predict", *arguments))


def run_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments: str) -> str:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    return result.stderr


# What a micro-batch costs


def test_costs_of_a_micro_batch_times_n_and_what_runs_once_are_the_step() -> None:
    sweep = sweep_micro_batch("llama-3-8b", attrs.evolve(DENSE, dp=2, global_batch=64), "h100")
    for size in sweep.sizes:
        assert size.n_microbatches == 64 // (2 * size.micro_batch)
        once = size.per_step_s.dp + size.per_step_s.optimizer
        assert size.n_microbatches * size.per_micro_batch_s.total + once == pytest.approx(size.step_time_s)


@pytest.mark.parametrize("micro_batch", [1, 8])
def test_a_size_is_what_predict_says_of_the_same_rank(micro_batch: int) -> None:
    sweep = sweep_micro_batch("llama-3-8b", attrs.evolve(DENSE, global_batch=32), "h100")
    (size,) = (size for size in sweep.sizes if size.micro_batch == micro_batch)
    layout = attrs.evolve(DENSE, global_batch=32, micro_batch=micro_batch)
    p = predict("llama-3-8b", layout, "h100", rank=sweep.best.rank)
    n, b, cost = 32 // micro_batch, p.buckets_s, size.per_micro_batch_s
    assert (size.step_time_s, size.mfu_active, size.bubble) == (p.step_time_s, p.mfu.active, p.bubble)
    assert cost.compute == pytest.approx((b.gemm + b.attention + b.hbm) / n)
    assert cost.tp == pytest.approx(b.tp / n)
    assert (cost.ep, cost.cp) == (0, 0)
    assert cost.pp == pytest.approx((b.pp_transfer + b.pp_wait) / n)
    assert cost.idle == pytest.approx((b.launch + b.idle) / n)
    assert (size.per_step_s.dp, size.per_step_s.optimizer) == (b.dp, b.optimizer)


@pytest.mark.parametrize("microbatches", [1, 3, 8, 33])
def test_a_costed_step_takes_any_number_of_micro_batches(microbatches: int) -> None:
    program = lower(load_model("llama-3-8b"), DENSE)
    chosen = setting(load_target("h100"))
    assert cost_step(program, chosen).at(microbatches) == iterate(
        attrs.evolve(program, microbatches=microbatches), chosen
    )


# What grows faster than the micro-batch


def cost(**given: float) -> MicroBatchCost:
    return MicroBatchCost(**({"compute": 100.0} | dict.fromkeys(NAMES[1:], 0.0) | given))


def test_a_made_up_cost_that_grows_faster_than_linear_is_flagged() -> None:
    """ep 10 -> 25 is 2.5 times for 2 times the sequences; compute 100 -> 200 is 2; tp 10 -> 15 amortises something."""
    grown = faster_than_linear(2, cost(ep=10.0, tp=10.0), 4, cost(compute=200.0, ep=25.0, tp=15.0))
    assert [(g.cost, g.since, g.times, g.linear) for g in grown] == [("ep", 2, 25 / 10, 4 / 2)]
    assert "protocol" in grown[0].meaning and "load balance" in grown[0].meaning


def test_waiting_for_the_pipeline_is_told_from_a_threshold() -> None:
    (grown,) = faster_than_linear(1, cost(pp=10.0), 2, cost(compute=200.0, pp=40.0))
    assert "fill and drain" in grown.meaning and "protocol" not in grown.meaning


@pytest.mark.parametrize(("after", "flagged"), [(3 * 1.01, False), (3 * 1.03, True)])
def test_two_percent_above_linear_are_tolerated(after: float, flagged: bool) -> None:
    grown = faster_than_linear(1, cost(tp=1.0), 3, cost(compute=300.0, tp=after))
    assert [g.cost for g in grown] == (["tp"] if flagged else [])


def test_what_is_too_small_to_see_is_not_flagged_and_what_was_nothing_has_no_ratio() -> None:
    assert faster_than_linear(1, cost(cp=0.01), 2, cost(compute=200.0, cp=0.1)) == ()  # 0.1 of 200.1 is below 1/1000
    (grown,) = faster_than_linear(1, cost(), 2, cost(compute=200.0, cp=1.0))
    assert (grown.cost, grown.times) == ("cp", None)


def test_a_protocol_that_gets_worse_with_size_is_flagged_on_the_real_graphs() -> None:
    """A micro-batch of one sequence gathers 4096 x 4096 bf16 = 32 MiB, of two 64 MiB: a threshold lies between."""
    target = load_target("h100")
    worse = attrs.evolve(target, scale_up=attrs.evolve(target.scale_up, alpha=((48 * 2.0**20, 0.9), (inf, 0.3))))
    layout = Layout(tp=8, seq=4096, global_batch=8)
    grown = [size.faster_than_linear for size in sweep_micro_batch("llama-3-8b", layout, worse).sizes]
    assert [[(g.cost, g.since) for g in one] for one in grown] == [[], [("tp", 1)], [], []]
    assert 2 * 2 < (grown[1][0].times or 0) < 2 * 0.9 / 0.3  # start-up costs do not grow
    usual = sweep_micro_batch("llama-3-8b", layout, target)
    assert [size.faster_than_linear for size in usual.sizes] == [()] * 4


# Which size is the fastest


def test_the_source_case_reverses_with_the_global_batch() -> None:
    """512 GPUs, pp 16, ep 8, dp 32: n = 512/32 = 16 < 2P starves, so 1 wins; n = 8192/32 = 256 does not."""
    starved, full = experts(512), experts(8192)
    assert [size.n_microbatches for size in starved.sizes] == [16, 8, 4, 2]
    assert {size.regime for size in starved.sizes} == {"starved"}
    assert starved.best_micro_batch == 1
    assert [size.n_microbatches for size in full.sizes] == [256, 128, 64, 32]
    assert [size.regime for size in full.sizes] == ["comfortable"] * 3 + ["tolerable"]
    assert full.best_micro_batch > 1


@cache
def best_by_predict(global_batch: int) -> int:
    layouts = {b: attrs.evolve(EXPERTS, micro_batch=b, global_batch=global_batch) for b in (1, 2, 4, 8)}
    times = {b: predict("qwen3-30b-a3b", layout, "b200").step_time_s for b, layout in layouts.items()}
    return min(times, key=lambda b: times[b])


@pytest.mark.parametrize("global_batch", [512, 8192])
def test_a_flip_is_seen_by_predicting_both_sides_of_it(global_batch: int) -> None:
    """Valid global batches are the multiples of dp x 8 = 256."""
    sweep = experts(global_batch)
    found = [flip for flip in (sweep.flips.below, sweep.flips.above) if flip]
    assert found
    for flip in found:
        towards = 256 if flip.global_batch < global_batch else -256
        assert flip.global_batch % 256 == 0
        assert best_by_predict(flip.global_batch) == flip.after
        assert best_by_predict(flip.global_batch + towards) == flip.before == sweep.best_micro_batch


def lines(starts: Sequence[int], slopes: Sequence[int]) -> Callable[[int], tuple[float, ...]]:
    return lambda units: tuple(start + slope * units for start, slope in zip(starts, slopes, strict=True))


@given(
    st.lists(st.tuples(st.integers(1, 10_000), st.integers(1, 50)), min_size=2, max_size=4),
    st.integers(1, 60),
)
def test_on_straight_lines_the_flips_are_the_nearest_ones(sizes: list[tuple[int, int]], asked: int) -> None:
    step_times = lines(*zip(*sizes, strict=True))
    times = step_times(asked)
    best = times.index(min(times))

    def other_wins(units: int) -> bool:
        here = step_times(units)
        return min(here) < here[best] * (1 - MARGIN)

    flips = find_flips(range(len(sizes)), best, step_times, 10 * asked, 10, 8)
    below = next((units for units in range(asked - 1, 0, -1) if other_wins(units)), None)
    above = next((units for units in range(asked + 1, 8 * asked + 1) if other_wins(units)), None)
    for flip, units in ((flips.below, below), (flips.above, above)):
        assert (flip and flip.global_batch) == (units and 10 * units)
        if flip and units:
            assert step_times(units)[flip.after] == min(step_times(units))
    assert (flips.lowest, flips.highest) == (10, 80 * asked)


def test_on_straight_lines_a_bracket_takes_two_more_steps() -> None:
    """1000.5 + u against 2 u: equal at 1000.5, so 1001. The grid sees 2 ... 1024, the bracket 1000 and 1001."""
    asked: list[int] = []

    def step_times(units: int) -> tuple[float, ...]:
        asked.append(units)
        return (1000.5 + units, 2.0 * units)

    flips = find_flips((2, 1), 1, step_times, 1, 1, 4096)
    assert flips.above is not None and flips.above.global_batch == 1001
    assert set(asked) == {2**i for i in range(1, 11)} | {1000, 1001}


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=70, max_size=70), st.integers(1, 30))
def test_whatever_the_times_a_flip_has_the_best_size_beside_it(steps: list[tuple[int, int]], asked: int) -> None:
    best = steps[asked].index(min(steps[asked]))
    flips = find_flips((1, 2), best, lambda units: steps[units], asked, 1, 2)
    for flip, towards in ((flips.below, 1), (flips.above, -1)):
        if flip is not None:
            assert steps[flip.global_batch][1 - best] < steps[flip.global_batch][best]
            assert steps[flip.global_batch + towards][best] <= steps[flip.global_batch + towards][1 - best]


def test_counts_that_cannot_run_are_passed_over() -> None:
    """Size 0 takes 10 + u, size 1 takes 2 u: equal at 10; odd counts of units cannot run, so 8 and 12 are the pair."""
    flips = find_flips((1, 2), 1, lambda u: None if u % 2 else (10.0 + u, 2.0 * u), 8, 1, 4)
    assert flips.above is not None
    assert (flips.above.before, flips.above.after) == (2, 1)
    assert 10 < flips.above.global_batch <= 16


@pytest.mark.parametrize(
    ("n", "ranks", "chunks", "regime"),
    [
        (1, 1, 1, "no pipeline"),
        (31, 16, 1, "starved"),
        (32, 16, 1, "tolerable"),
        (63, 16, 1, "tolerable"),
        (64, 16, 1, "comfortable"),
        (16, 16, 2, "tolerable"),  # (P - 1)/(n V) = 15/32
    ],
)
def test_regimes(n: int, ranks: int, chunks: int, regime: str) -> None:
    assert regime_of(n, ranks, chunks) == regime


# What cannot be


def test_a_size_that_does_not_fit_the_batch_is_shown_with_its_reason() -> None:
    found = run_json(*LINE, "1,4,8", "--global-batch", "12")
    assert [entry["micro_batch"] for entry in found["sweep"]] == [1, 4, 8]
    assert "12 sequences are not a multiple of dp * micro_batch = 1 * 8 = 8" in found["sweep"][2]["refused"]
    assert ["refused" in entry for entry in found["sweep"]] == [False, False, True]
    shown = run(*LINE, "1,4,8", "--global-batch", "12").stdout
    assert "refused: micro-batch 8: global_batch: 12 sequences" in shown


def test_a_layout_that_no_size_can_save_is_refused_once() -> None:
    message = refused("llama-3-8b", "--tp", "3", "--sweep-micro-batch")
    assert message.count("[tp-heads]") == 1


@pytest.mark.parametrize("size", ["--dp", "--pp", "--global-batch"])
def test_a_size_of_nothing_is_refused_as_by_predict(size: str) -> None:
    message = refused("llama-3-8b", size, "0", "--sweep-micro-batch")
    assert "[layout-value]" in message and message.count("error:") == 1


@pytest.mark.parametrize("sizes", ["0", "1,1", "1,,2", "x", "", "1.5", "99999999999"])
def test_what_is_no_list_of_sizes_is_refused(sizes: str) -> None:
    assert "[sweep-sizes]" in refused("llama-3-8b", f"--sweep-micro-batch={sizes}")


@pytest.mark.parametrize("sizes", [(), (True,), (1.5,)])
def test_python_callers_are_refused_too(sizes: Any) -> None:
    with pytest.raises(InputError, match="sweep-sizes"):
        sweep_micro_batch("llama-3-8b", Layout(), "h100", sizes)


def test_an_option_before_the_config_says_what_to_do() -> None:
    assert "write --sweep-micro-batch=1,2,4,8" in refused("--sweep-micro-batch", "llama-3-8b")


@pytest.mark.parametrize("option", [("--micro-batch", "1"), ("--rank", "0")])
def test_options_that_the_sweep_decides_are_refused_when_they_are_given(option: tuple[str, str]) -> None:
    assert f"leave out {option[0]}".casefold() in refused(*LINE, *option).casefold()


# What is printed


def test_without_a_global_batch_every_size_is_possible() -> None:
    found = run_json(*LINE)
    assert found["global_batch"] == 2 * 4 * 8  # gpus x the largest size
    assert [entry["micro_batch"] for entry in found["sweep"]] == [1, 2, 4, 8]
    assert found["notes"][0].startswith("global_batch: 64 sequences, 8 per GPU")


def test_only_communicators_that_occur_have_a_column() -> None:
    lines = run(*LINE, "--global-batch", "64").stdout.splitlines()
    (header,) = (line for line in lines if line.startswith("micro-batch") and "in all" in line)
    assert header.split()[1:5] == ["compute", "tp", "pp", "idle"]


def test_the_nearest_flip_is_the_one_in_the_json() -> None:
    sweep = experts(8192)
    found = sweep.to_json()
    assert found["flip_below"] is not None and found["flip_above"] is not None
    nearest = min(
        (flip for flip in (sweep.flips.below, sweep.flips.above) if flip), key=lambda f: abs(f.global_batch - 8192)
    )
    assert found["flip"] == {"global_batch": nearest.global_batch, "from": nearest.before, "to": nearest.after}


def test_one_size_alone_flips_nowhere() -> None:
    found = run_json(*LINE, "2")
    assert (found["flip"], found["best_micro_batch"]) == (None, 2)
    assert "flips" not in run(*LINE, "2").stdout


def test_a_search_that_did_not_happen_is_not_called_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 stages x (8 + 4 + 2 + 1) micro-batches are 60 slots; the smallest step of all sizes is 8 sequences."""
    arguments = (*LINE, "--schedule", "gpipe", "--global-batch", "8")  # no steady state to skip
    assert "below: no smaller global batch allows all sizes" in run(*arguments).stdout
    monkeypatch.setattr(sweeprun, "MOST_SLOTS", 4 * 60 - 1)
    assert "above: not searched" in run(*arguments).stdout


def test_fusions_reach_the_sweep_and_its_flips() -> None:
    """Unfused the flip lies elsewhere, so it is the fused programs that were searched."""
    layout = attrs.evolve(EXPERTS, global_batch=1024)
    fused, plain = (
        sweep_micro_batch("qwen3-30b-a3b", layout, "b200", (1, 2), fusions=name).flips.above
        for name in ("basic", "none")
    )
    assert fused and plain and fused.global_batch != plain.global_batch

    def fused_s(micro_batch: int, global_batch: int) -> float:
        asked = attrs.evolve(layout, micro_batch=micro_batch, global_batch=global_batch)
        return predict("qwen3-30b-a3b", asked, "b200", fusions="basic").step_time_s

    assert fused_s(fused.after, fused.global_batch) < fused_s(fused.before, fused.global_batch)
    before = fused.global_batch - 64  # dp x 2
    assert fused_s(fused.before, before) <= fused_s(fused.after, before) * (1 + MARGIN)


def test_progress_is_told_only_of_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    layout = attrs.evolve(DENSE, global_batch=8)
    sweep_micro_batch("llama-3-8b", layout, "h100", (1, 2), progress=told.append)
    assert told == []
    monkeypatch.setattr(sweeprun, "SLOT_S", 1.0)
    sweep_micro_batch("llama-3-8b", layout, "h100", (1, 2), progress=told.append)
    assert told[:2] == ["micro-batch 1", "micro-batch 2"]


def fields(found: object) -> set[str]:
    """Every key at any depth."""
    if isinstance(found, list):
        return set().union(*map(fields, found))
    return set(found).union(*map(fields, found.values())) if isinstance(found, dict) else set()


def test_every_field_of_the_json_is_documented() -> None:
    docs = Path(__file__).parents[1] / "docs"
    text = "".join((docs / name).read_text(encoding="utf-8") for name in ("sweep.md", "json.md"))
    found = run_json(*LINE, "1,8,16", "--global-batch", "40")
    assert {name for name in fields(found) if f"`{name}`" not in text} == set()
