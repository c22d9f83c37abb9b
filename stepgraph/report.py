"""What a prediction says: typed numbers of one training step."""

from __future__ import annotations

import attrs

from stepgraph.lowering.layout import Layout
from stepgraph.passes.buckets import Buckets
from stepgraph.passes.exchanges import Exchange
from stepgraph.passes.modelflops import Mfu, Params


@attrs.frozen
class Bubble:
    """Pipeline time over work of the busiest rank, minus one. closed_form: (P - 1) / n."""

    closed_form: float
    simulated: float


@attrs.frozen
class BackwardOverForward:
    """Backward seconds over forward seconds, whole model, by rule; None where there is no forward time."""

    gemm: float | None
    attention: float | None
    hbm: float | None
    communication: float | None
    total: float | None


@attrs.frozen
class Exposure:
    """Seconds of one communicator per step on one rank: total = hidden (under computation) + exposed."""

    total: float
    hidden: float
    exposed: float


@attrs.frozen
class Communication:
    """Every communicator of a rank. pp: transfers only; waiting for other stages is no communication."""

    tp: Exposure
    ep: Exposure
    cp: Exposure
    dp: Exposure
    pp: Exposure


@attrs.frozen
class StageReport:
    """One pipeline rank: what it runs, its seconds per micro-batch and per step, and where they go.

    runs: its chunks, with bars between them. wait_send_s, wait_recv_s: waiting in calls that end with a send or with a
    receive; longest_wait_s: the longest of those. peak_micro_batches: the most micro-batches whose activations it holds.
    """

    stage: int
    runs: str
    forward_s: float
    backward_s: float
    step_s: float
    kernels_forward: int
    kernels_backward: int
    wait_send_s: float
    wait_recv_s: float
    longest_wait_s: float
    peak_micro_batches: float
    buckets_s: Buckets


@attrs.frozen
class Prediction:
    """The step of one training run.

    rank: whose buckets, roofline, kernels, host_wait_s and communication are shown; host_wait_s is the part of the bucket
    `launch` in which the device waits for its host. launch, cuda_graphs, overlap, p2p_mode: how
    software runs the step. fusions: names of the fusion rules that were given, in order.
    """

    model: str
    target: str
    gpus: int
    layout: Layout
    profile: str
    eta: str
    step_time_s: float
    step_time_closed_form_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: Mfu
    n_microbatches: int
    bubble: Bubble
    rank: int
    buckets_s: Buckets
    roofline_s: float
    params: Params
    kernels_per_rank: int
    backward_over_forward: BackwardOverForward
    host_wait_s: float
    launch: str
    cuda_graphs: bool
    overlap: str
    p2p_mode: str
    communication_s: Communication
    stages: tuple[StageReport, ...]
    all_to_alls: tuple[Exchange, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    fusions: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Plain numbers, strings, lists and dictionaries, ready for `json.dumps`; `fusions` only where there are any."""
        found = attrs.asdict(self)
        if not self.fusions:
            del found["fusions"]
        return found
