"""What `stepgraph pipeline` found, as JSON fields and as a picture."""

from __future__ import annotations

from typing import Any

from stepgraph.commands.pipelinerun import Answer, Case
from stepgraph.passes.pipeline.accounts import RankRun
from stepgraph.timeline import Caption, to_svg


def as_fields(found: Answer) -> dict[str, Any]:
    """The JSON of the command; docs/pipeline.md explains every field."""
    case = found.case
    fields: dict[str, Any] = {
        "schedule": case.name,
        "pp": case.pp,
        "vpp": case.vpp,
        "micro_batches": case.micro_batches,
        "tf": case.tf,
        "tb": case.tb,
        "tw": case.tw,
        "p2p": case.p2p,
        "mode": str(case.mode),
        "makespan": found.run.makespan_s,
        "bubble_over_ideal": found.bubble,
        "peak_activations": list(found.peaks),
        "ranks": [_rank_fields(rank) for rank in found.run.ranks],
    }
    if found.jitter is not None:
        fields["jitter"] = {"mean": found.jitter.mean_s, "low": found.jitter.low_s, "high": found.jitter.high_s}
    return fields


def picture_of(found: Answer, most_boxes: int) -> str:
    """The run as SVG. Raises: InputError (too-many-boxes)."""
    case = found.case
    note = f"makespan {found.run.makespan_s:.6g}, bubble {over_ideal(found)}"
    caption = Caption(sizes(case), f"{note}; {times(case)}", "time, in the unit of tf and tb")
    return to_svg(found.bars, case.pp, found.run.makespan_s, caption, most_boxes=most_boxes)


def _rank_fields(rank: RankRun) -> dict[str, float]:
    return {
        "compute": rank.compute_s,
        "transfer": rank.transfer_s,
        "wait_send": rank.wait_send_s,
        "wait_recv": rank.wait_recv_s,
        "idle": rank.idle_s,
        "longest_wait": rank.longest_wait_s,
        "end": rank.end_s,
    }


def sizes(case: Case) -> str:
    """`interleaved: pp 4, vpp 2, 8 micro-batches`."""
    vpp = f", vpp {case.vpp}" if case.vpp > 1 else ""
    plural = "" if case.micro_batches == 1 else "es"
    return f"{case.name}: pp {case.pp}{vpp}, {case.micro_batches} micro-batch{plural}"


def times(case: Case) -> str:
    """`tf 1, tb 2, tw 1, p2p 0, async`."""
    return f"tf {case.tf:g}, tb {case.tb:g}, tw {case.tw:g}, p2p {case.p2p:g}, {case.mode}"


def over_ideal(found: Answer) -> str:
    """`37.5% over n (tf + tb) = 24`."""
    return f"{found.bubble:z.1%} over n (tf + tb) = {found.case.ideal:.6g}"


def shown(time: float, makespan: float) -> str:
    """Six digits; nothing where rounding has left it of zero."""
    return f"{time:.6g}" if abs(time) > 1e-9 * makespan else "0"
