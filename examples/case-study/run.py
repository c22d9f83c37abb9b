"""A measured case: an 18B-active mixture of experts on 512 B200, predicted from twelve numbers of its profile.

    python examples/case-study/run.py [--json] [--jitter 0.1 --seed 0]

Five constants are fitted to what rank 0 computes, exchanges between experts, idles and launches at a global batch of
8192. Steps, pipeline communication and everything at 512 are predicted. docs/case-study.md tells what it means.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import attrs
import numpy as np
from rich.table import Table

import stepgraph
from stepgraph.errors import refuse
from stepgraph.hwtargets.target import EtaConstants
from stepgraph.ir.program import Program
from stepgraph.passes import fuse, fusion
from stepgraph.passes.base import setting
from stepgraph.passes.iteration import CostedStep, Iteration, cost_step
from stepgraph.passes.pipeline.jitter import jittered
from stepgraph.passes.pipeline.modes import parse_mode
from stepgraph.passes.pipeline.schedules import schedule_of
from stepgraph.tables import new_console, new_table, show_table

# What is assumed: the model (config.json), the layout, the software, and what a step does once.

MODEL = stepgraph.load_model(Path(__file__).with_name("config.json"))
LAYOUT = stepgraph.Layout(pp=16, ep=8, dp=32, seq=8192, recompute="full", schedule="1f1b", zero=1)
B200 = stepgraph.load_target("b200")
PROFILE, ETA = "reference", "constant"  # one kernel per op; one efficiency for all matmuls and attention
OVERLAP, LAUNCH = "none", "additive"  # collectives are exposed; every kernel costs a gap on the device
P2P = "blocking"  # Megatron-LM's batched calls
STRAGGLER_S = 8.7  # of the source's run at mbs 2
DP_TERM_S = fmean((2.117, 10.864 - STRAGGLER_S, 1.789))
"""Declared, not fitted: the source's DP bucket at 8192 without the straggler, for all that a step does once."""

LOSS_BYTES_PER_S = 0.3246 * 8000e9
"""Source: MooreThreads/SimuMax@e691807 configs/system/b200_bf16_ceperm.json, `ce`: forward of the unfused loss."""


@fusion(phase="forward", efficiency=LOSS_BYTES_PER_S / B200.hbm.effective_bytes_per_s)
def unfused_loss(op: Any, logits: Any, labels: Any) -> object:
    """Joins nothing and saves no byte: the loss alone, at the rate that its 18 kernels were seen to reach."""
    found: object = op.cross_entropy(logits, labels)
    return found


FUSIONS = (unfused_loss,)

# What was measured. The fit sees OBSERVED; SOURCE is only printed beside the predictions.


@attrs.frozen
class Observed:
    """Four numbers of one profile of rank 0 at a global batch of 8192."""

    mbs: int
    compute_s: float
    a2a_s: float
    idle_s: float
    kernels: float


OBSERVED = (
    Observed(1, 32.8, 3.639, 5.3, 383e3),
    Observed(2, 29.3, 3.729, 2.4, 182e3),
    Observed(4, 29.2, 3.187, 1.6, 94e3),
)
"""Source: How to Think About Asymptotic Times in Transformer Forward Passes, section 9."""


@attrs.frozen
class Measured:
    """What the source says of one run's step and pipeline; the step without the straggler."""

    gbs: int
    mbs: int
    step_s: float
    pp_total_s: float
    pp_send_s: float | None = None
    pp_recv_s: float | None = None
    longest_recv_s: float | None = None


SOURCE = (
    Measured(8192, 1, 69.8, 24.284, 21.574, 2.710),
    Measured(8192, 2, 63.5, 24.906, 20.612, 4.294),
    Measured(8192, 4, 65.1, 28.489, 20.850, 7.639),
    Measured(512, 1, 8.2, 4.0, longest_recv_s=0.261),
    Measured(512, 2, 9.1, 5.6, longest_recv_s=3.720),
    Measured(512, 4, 12.6, 9.3, longest_recv_s=7.837),
)
"""Source: as above, sections 9 and 10."""

# What is asked of stepgraph. All that depends on how it costs and simulates stands here.


def iteration(gbs: int, mbs: int, eta: float, alpha: float, gap_s: float) -> tuple[Program, CostedStep, Iteration]:
    """The program of a run, and its step on a B200 with these constants."""
    lowered = stepgraph.lower(MODEL, attrs.evolve(LAYOUT, global_batch=gbs, micro_batch=mbs))
    program, _ = fuse(lowered, FUSIONS)
    target = attrs.evolve(
        B200,
        eta_constant=EtaConstants(gemm=eta, families=()),
        scale_up=attrs.evolve(B200.scale_up, alpha=((inf, alpha),)),
        launch=attrs.evolve(B200.launch, gap_s=gap_s),
    )
    step = cost_step(program, setting(target, PROFILE, ETA, LAUNCH, overlap=OVERLAP, p2p=P2P))
    return program, step, step.at(program.microbatches)


@attrs.frozen
class Side:
    """Rank 0's calls of one side, as a profile lists them: seconds in all, of those on the link, and the longest call."""

    total_s: float
    transfer_s: float
    longest_s: float


def sides(run: Iteration) -> tuple[Side, Side]:
    """Sends and receives. A batched call that does both is listed as the send that it begins with."""
    rank = run.pipeline.ranks[0]
    return (
        Side(rank.send_s, rank.transfer_send_s, rank.longest_send_s),
        Side(rank.recv_s, rank.transfer_recv_s, rank.longest_recv_s),
    )


def noisy(step: CostedStep, microbatches: int, jitter: float, seed: int) -> tuple[float, float, float, float]:
    """One step in which every op of the pipeline is a little off: its end, rank 0's sends, receives, longest receive."""
    order = schedule_of(step.how.schedule).order(step.how.ranks, step.how.chunks, microbatches)
    found = jittered(order, step.timing, parse_mode(P2P), relative=jitter, seed=seed, runs=1)
    return found.makespan.mean_s, found.send[0].mean_s, found.recv[0].mean_s, found.longest_recv[0].mean_s


# The fit: five constants by least squares on relative errors.


@attrs.frozen
class Constants:
    """What is fitted; `MEANINGS` says what each stands for."""

    eta_inf: float
    half_mbs: float
    a2a_alpha: float
    kappa: float
    gap_s: float

    def eta(self, mbs: int) -> float:
        """Efficiency of matmuls and attention with mbs sequences: eta_inf / (1 + half_mbs / mbs)."""
        return self.eta_inf / (1 + self.half_mbs / mbs)


MEANINGS = (
    ("eta_inf", 0.2, 0.9, "efficiency of every matmul and attention, long micro-batches"),
    ("half_mbs", 0.0, 1.0, "sequences at which it falls to half of that"),
    ("a2a_alpha", 0.2, 0.9, "part of the scale-up bandwidth that an all-to-all reaches"),
    ("kappa", 1.0, 6.0, "kernels of the real software per kernel counted"),
    ("gap_s", 1e-6, 3e-5, "idle seconds per kernel"),
)
ETA_BOUNDS = (0.2, 0.9)


def fit(observed: Sequence[Observed]) -> Constants:
    """The constants that the twelve numbers ask for. Raises: InputError where one leaves its bounds.

    compute = matmuls(eta) + HBM, all-to-alls = start + wire / alpha, kernels = kappa counted, idle = gap kernels.
    """
    compute, a2a, idle, kernels = np.array([attrs.astuple(seen)[1:] for seen in observed]).T
    sizes = np.array([seen.mbs for seen in observed])
    full = [iteration(8192, seen.mbs, 1.0, 1.0, 0.0) for seen in observed]
    half = [iteration(8192, seen.mbs, 1.0, 0.5, 0.0) for seen in observed]
    matmul, hbm, ep = (np.array([bucket(run, *names) for *_, run in full]) for names in BUSY)
    wire = np.array([bucket(run, "ep") for *_, run in half]) - ep  # linear in 1 / alpha
    counted = np.array([counted_kernels(program, run) for program, _, run in full])
    inverse_eta, slope = least_squares((matmul, matmul / sizes), hbm, compute)
    (inverse_alpha,) = least_squares((wire,), ep - wire, a2a)
    (kappa,) = least_squares((counted,), 0.0, kernels)
    (gap_s,) = least_squares((kappa * counted,), 0.0, idle)
    return bounded(Constants(1 / inverse_eta, slope / inverse_eta, 1 / inverse_alpha, kappa, gap_s))


BUSY = (("gemm", "attention"), ("hbm", "optimizer"), ("ep",))
"""Buckets of rank 0's kernels: matmuls, the rest of compute, exchanges between experts."""


def bucket(run: Iteration, *names: str) -> float:
    """Seconds of some buckets of rank 0's step together."""
    return float(sum(getattr(run.buckets[0], name) for name in names))


def counted_kernels(program: Program, run: Iteration) -> int:
    """Kernels that rank 0 is counted to launch in a step."""
    return program.microbatches * run.stages[0].micro_batch.kernels + run.stages[0].step.kernels


def least_squares(terms: Sequence[np.ndarray], rest: np.ndarray | float, measured: np.ndarray) -> list[float]:
    """x that minimizes the sum of ((terms x + rest) / measured - 1)^2."""
    found: list[float] = np.linalg.lstsq(np.column_stack(terms) / measured[:, None], 1 - rest / measured)[0].tolist()
    return found


def bounded(found: Constants) -> Constants:
    """The constants, if all lie inside their bounds. Raises: InputError."""
    values = [(name, getattr(found, name), low, high) for name, low, high, _ in MEANINGS]
    values += [(f"eta({seen.mbs})", found.eta(seen.mbs), *ETA_BOUNDS) for seen in OBSERVED]
    for name, value, low, high in values:
        if not low < value < high:
            raise refuse("case-study-bounds", name, f"the fit gives {value:.4g}", f"between {low:g} and {high:g}")
    return found


# Predictions, and what was measured beside them.


@attrs.frozen
class Row:
    """One run, predicted: the fields of --json. Range of the step: with the lowered DP traffic, with the DP term."""

    gbs: int
    mbs: int
    step_s: float
    step_range_s: tuple[float, float]
    pp_send_s: float
    pp_recv_s: float
    pp_total_s: float
    longest_recv_s: float
    a2a_call_s: float
    a2a_calls: int
    kernels: float
    idle_s: float
    compute_s: float
    uniform_closed_form_s: float


@attrs.frozen
class Prediction:
    """A run predicted: its row, and what explains it. stage_s: forward and backward of a micro-batch on each stage."""

    row: Row
    send: Side
    recv: Side
    stage_s: tuple[float, ...]


def predict(found: Constants, gbs: int, mbs: int, jitter: float = 0.0, seed: int = 0) -> Prediction:
    """Predict one run; jitter varies every op of the pipeline by that share."""
    program, step, run = iteration(gbs, mbs, found.eta(mbs), found.a2a_alpha, found.kappa * found.gap_s)
    send, recv = sides(run)
    end_s = run.pipeline.makespan_s
    if jitter:
        end_s, send_s, recv_s, longest_s = noisy(step, program.microbatches, jitter, seed)
        send = attrs.evolve(send, total_s=send_s)
        recv = attrs.evolve(recv, total_s=recv_s, longest_s=longest_s)
    n, stages = program.microbatches, len(program.stages)
    calls = sum(
        run.count * sum(op.kind == "all_to_all" for op in program[run.template].ops) for run in program.stages[0].runs
    )
    step_s, once_s = end_s + DP_TERM_S, run.step_s - run.pipeline.makespan_s
    row = Row(
        gbs=gbs,
        mbs=mbs,
        step_s=step_s,
        step_range_s=(end_s + once_s, step_s),
        pp_send_s=send.total_s,
        pp_recv_s=recv.total_s,
        pp_total_s=send.total_s + recv.total_s,
        longest_recv_s=recv.longest_s,
        a2a_call_s=bucket(run, "ep") / n / calls,
        a2a_calls=calls,
        kernels=found.kappa * counted_kernels(program, run),
        idle_s=bucket(run, "launch"),
        compute_s=bucket(run, *BUSY[0], *BUSY[1]),
        uniform_closed_form_s=(n + stages - 1) * run.stages[0].micro_batch.time_s + DP_TERM_S,
    )
    return Prediction(row, send, recv, tuple(stage.micro_batch.time_s for stage in run.stages))


def beside(ours: float, source: float | None, digits: int = 2) -> str:
    """Ours, the source's and how far apart."""
    return f"{ours:.{digits}f}" if source is None else f"{ours:.{digits}f} / {source:g} {ours / source - 1:+.0%}"


def lines_of(run: Prediction, source: Measured, seen: Observed | None) -> Iterator[tuple[str, str]]:
    """One column of the tables: what is compared, and ours / the source's with the difference."""
    row = run.row
    n = row.gbs // (LAYOUT.dp * row.mbs)
    transfer_s = run.send.transfer_s + run.recv.transfer_s
    yield "step s, declared DP term", beside(row.step_s, source.step_s)
    yield "step s, lowered DP traffic", beside(row.step_range_s[0], source.step_s)
    yield "step s, (n + P - 1) t of rank 0", beside(row.uniform_closed_form_s, source.step_s)
    yield "PP send s", beside(row.pp_send_s, source.pp_send_s)
    yield "PP recv s", beside(row.pp_recv_s, source.pp_recv_s)
    yield "PP total s", beside(row.pp_total_s, source.pp_total_s)
    yield "  of it transfer s", f"{transfer_s:.2f}"
    yield "  of it waiting s", f"{row.pp_total_s - transfer_s:.2f} = {1 - transfer_s / row.pp_total_s:.0%}"
    yield "longest recv s", beside(row.longest_recv_s, source.longest_recv_s)
    yield "compute s *", beside(row.compute_s, seen.compute_s if seen else None)
    a2a_ms = round(seen.a2a_s / n / row.a2a_calls * 1e3, 2) if seen else None
    yield "A2A ms per call *", beside(row.a2a_call_s * 1e3, a2a_ms)
    yield "idle s *", beside(row.idle_s, seen.idle_s if seen else None)
    yield "kernels, thousands *", beside(row.kernels / 1e3, seen.kernels / 1e3 if seen else None, 0)


def compared(runs: Sequence[Prediction], observed: Sequence[Observed | None]) -> Table:
    """The source's table of one global batch, ours beside it."""
    table = new_table(f"GBS {runs[0].row.gbs}, ours / source", *(f"mbs {run.row.mbs}" for run in runs))
    sources = [next(s for s in SOURCE if (s.gbs, s.mbs) == (run.row.gbs, run.row.mbs)) for run in runs]
    columns = [list(lines_of(*column)) for column in zip(runs, sources, observed, strict=True)]
    for cells in zip(*columns, strict=True):
        table.add_row(cells[0][0], *(text for _, text in cells))
    return table


def constants_table(found: Constants) -> Table:
    """What was fitted, and inside which bounds."""
    table = new_table("constant", "fitted", "bounds", "what it is")
    table.columns[-1].justify = "left"
    for name, low, high, meaning in MEANINGS:
        table.add_row(name, f"{getattr(found, name):.3g}", f"{low:g} to {high:g}", meaning)
    return table


def remarks(found: Constants, runs: Sequence[Prediction]) -> Iterator[str]:
    """What the tables have no room for."""
    etas = ", ".join(f"{found.eta(seen.mbs):.3f}" for seen in OBSERVED)
    yield f"{len(MEANINGS)} constants for {4 * len(OBSERVED)} numbers (rows with *, GBS 8192); eta at mbs 1, 2, 4: {etas} (bounds {ETA_BOUNDS})"
    with_straggler = beside(runs[1].row.step_s + STRAGGLER_S, 72.1)
    yield f"GBS 8192, mbs 2 with the {STRAGGLER_S} s straggler: step {with_straggler}"
    for run in runs[:3]:
        first, middle, last = (1e3 * run.stage_s[stage] for stage in (0, 1, -1))
        extra = (last - first) / run.row.mbs
        yield f"mbs {run.row.mbs}: a micro-batch takes {first:.0f} ms on stage 0, {middle:.0f} on a middle one, {last:.0f} on the last: {last / first:.2f} x, {extra:.0f} ms more per 8192 tokens"
    for source in SOURCE[3:]:
        longest = [predict(found, source.gbs, source.mbs, 0.1, seed).row.longest_recv_s for seed in range(8)]
        spread = f"{min(longest):.2f} to {max(longest):.2f}, mean {beside(fmean(longest), source.longest_recv_s)}"
        yield f"longest recv at GBS 512, mbs {source.mbs}, with 10 % jitter on every op, seeds 0 to 7: {spread}"


def main() -> None:
    """Fit, predict, and print tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="rows of predictions only")
    parser.add_argument("--jitter", type=float, default=0.0, help="share by which every op of the pipeline varies")
    parser.add_argument("--seed", type=int, default=0, help="of the jitter")
    said = parser.parse_args()
    if not 0 <= said.jitter <= 0.5 or said.seed < 0:
        parser.error("--jitter is between 0 and 0.5, --seed not negative")
    found = fit(OBSERVED)
    runs = [predict(found, source.gbs, source.mbs, said.jitter, said.seed) for source in SOURCE]
    if said.json:
        print(json.dumps([attrs.asdict(run.row) for run in runs], indent=2))
        return
    console = new_console()
    names = ", ".join(rule.name for rule in FUSIONS)
    noise = f"; every op varies by {said.jitter:.0%}, seed {said.seed}" if said.jitter else ""
    print(
        f"profile {PROFILE}, eta {ETA}, fusions {names}, overlap {OVERLAP}, launch {LAUNCH}; DP term {DP_TERM_S:.2f} s, declared{noise}\n"
    )
    for table in (constants_table(found), compared(runs[:3], OBSERVED), compared(runs[3:], (None,) * 3)):
        show_table(console, table)
        print()
    print("\n".join(remarks(found, runs)))


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # a reader that has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
