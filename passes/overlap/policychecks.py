"""policychecks: whether a framework would run a policy with a layout, all reasons collected."""

from __future__ import annotations

from collections.abc import Iterator

from stepgraph.errors import Problem
from stepgraph.passes.overlap.policies import Policy
from stepgraph.passes.pipeline.schedules import SCHEDULES, Schedule

_WHERE = "--overlap"


def _pairs_on_ranks(schedule: Schedule) -> bool:
    form = schedule.combined or schedule
    return form.pairs and form.most_ranks != 1


PAIRING = tuple(name for name, schedule in SCHEDULES.items() if _pairs_on_ranks(schedule))
"""Pipeline schedules that run forwards and backwards as pairs."""


def check_policy(
    policy: Policy,
    *,
    tp: int,
    sp: bool,
    ep: int,
    pp: int,
    schedule: str,
    recompute: str,
    has_shared_expert: bool,
    zero: int,
) -> list[Problem]:
    """What the framework would refuse; empty when it would run.

    Only mechanisms that were named one by one have to fit: those of a set apply where there is something to overlap.
    recompute: none, selective or full. Codes: overlap-param-gather, overlap-tp-comm, overlap-expert-comm,
    overlap-shared-expert, overlap-fsdp, overlap-ring.

    Source: NVIDIA/Megatron-LM megatron/training/arguments.py and megatron/core/transformer/transformer_config.py.
    """
    return [
        *_param_gather(policy, zero),
        *_tp_comm(policy, tp, sp),
        *_expert_comm(policy, ep, pp, schedule, recompute),
        *_shared_expert(policy, has_shared_expert, ep),
        *_later(policy),
    ]


def _later(policy: Policy) -> Iterator[Problem]:
    """What no layout has yet: parameters that are split over data ranks, and context parallelism."""
    if "fsdp-prefetch" in policy.asked:
        what = "with whole parameters on every data rank: ZeRO 3 is not modelled yet"
        yield _problem("overlap-fsdp", "fsdp-prefetch", what, "graphs that gather parameters", "leave it out")
    if "cp-ring" in policy.asked:
        what = "without context parallelism, which is not modelled yet"
        yield _problem("overlap-ring", "cp-ring", what, "graphs that pass keys around", "leave it out")


def _problem(code: str, word: str, what: str, expected: str, fix: str) -> Problem:
    return Problem(code, _WHERE, f"{word} {what}", expected, fix)


def _param_gather(policy: Policy, zero: int) -> Iterator[Problem]:
    word = "overlap-param-gather"
    if word not in policy.asked:
        return
    if not policy.grad_reduce:
        fix = "name overlap-grad-reduce too"
        yield _problem(word, word, "without overlap-grad-reduce", "both: they share their buckets", fix)
    if zero < 1:
        fix = "use --zero 1 or leave it out"
        yield _problem(word, word, f"with ZeRO {zero}, which gathers no parameters", "ZeRO 1", fix)


def _tp_comm(policy: Policy, tp: int, sp: bool) -> Iterator[Problem]:
    word, code = "tp-comm-overlap", "overlap-tp-comm"
    if word not in policy.asked:
        return
    if tp < 2:
        yield _problem(code, word, f"with tp = {tp}", "tp of 2 or more", "leave it out")
    elif not sp:
        what = "without sequence parallelism: there are only all-reduces, which it cannot cut into chunks"
        yield _problem(code, word, what, "--sp", "use --sp or leave it out")


def _expert_comm(policy: Policy, ep: int, pp: int, schedule: str, recompute: str) -> Iterator[Problem]:
    word, code = "overlap-moe-expert-parallel-comm", "overlap-expert-comm"
    if word not in policy.asked:
        return
    if ep < 2:
        yield _problem(code, word, f"with ep = {ep}: nothing is dispatched", "ep of 2 or more", "leave it out")
    if recompute == "full":
        what = "with full recomputation: a layer's backward would begin with its forward"
        yield _problem(code, word, what, "--recompute none or selective", "recompute less")
    if pp > 1 and schedule not in PAIRING:
        what = f"with schedule {schedule}, which never runs a forward and a backward together"
        yield _problem(
            code, word, what, " or ".join(PAIRING), "use --vpp 2 without --schedule, or --schedule dualpipev"
        )
    if policy.shared_expert:
        what = "beside moe-shared-expert-overlap: both want the same all-to-alls"
        yield _problem(code, word, what, "one of them", "leave one out")


def _shared_expert(policy: Policy, has_shared_expert: bool, ep: int) -> Iterator[Problem]:
    word, code = "moe-shared-expert-overlap", "overlap-shared-expert"
    if word not in policy.asked:
        return
    if not has_shared_expert:
        yield _problem(code, word, "with a model that has no shared expert", "a shared expert", "leave it out")
    if ep < 2:
        yield _problem(code, word, f"with ep = {ep}: nothing is dispatched", "ep of 2 or more", "leave it out")
