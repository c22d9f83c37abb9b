"""Warnings: the source text's rules of thumb, applied to one prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepgraph.passes.exchanges import Exchange
from stepgraph.passes.iteration import Iteration

LAUNCH_SHARE = 0.10
"""From which share of a micro-batch on launches are worth a word."""

UNEVEN_SHARE = 0.10
"""By how much the busiest stage may exceed the mean before it is worth a word."""


def advise(
    iteration: Iteration, microbatches: int, uneven_layers: str, exchanges: Sequence[Exchange] = ()
) -> tuple[str, ...]:
    """What the source text would warn about, each with its code first.

    Source: How to Think About Asymptotic Times, sections 9 to 11.
    """
    rules = (
        _bubble(iteration, microbatches),
        _stages(iteration, uneven_layers),
        _launches(iteration),
        _all_to_all(exchanges),
    )
    return tuple(text for rule in rules for text in rule)


def _bubble(iteration: Iteration, n: int) -> Iterator[str]:
    stages = len(iteration.stages)
    if stages == 1 or n >= 4 * stages:
        return
    bound = "2P" if n < 2 * stages else "4P"
    yield (
        f"bubble: n = {n} micro-batches are fewer than {bound} = {int(bound[0]) * stages}: the pipeline idles "
        f"(P - 1)/n = {iteration.bubble_closed_form:.0%} on top of the work ({iteration.bubble_simulated:.0%} simulated); "
        "raise the global batch or lower the micro-batch or pp"
    )


def _stages(iteration: Iteration, uneven_layers: str) -> Iterator[str]:
    if uneven_layers:
        yield uneven_layers
    times = [stage.micro_batch.time_s for stage in iteration.stages]
    mean, longest = sum(times) / len(times), max(times)
    if longest <= (1 + UNEVEN_SHARE) * mean:
        return
    yield (
        f"uneven-stages: stage {times.index(longest)} takes {longest / mean - 1:.0%} longer than the mean; every other "
        "stage waits for it, and the closed form, which spreads work evenly, is too fast"
    )


def _launches(iteration: Iteration) -> Iterator[str]:
    buckets = iteration.stages[iteration.slowest].micro_batch.buckets
    share = buckets.launch / buckets.total
    if share > LAUNCH_SHARE:
        yield (
            f"launch-bound: kernel launches take {share:.0%} of a micro-batch; a larger micro-batch, fewer kernels "
            "(fusion) or CUDA graphs would win most"
        )


def _all_to_all(exchanges: Sequence[Exchange]) -> Iterator[str]:
    """Dispatch and combine that leave the scale-up domain, with what a flat S / beta would have said."""
    crossing = [exchange for exchange in exchanges if exchange.domains > 1]
    if not crossing:
        return
    worst = max(crossing, key=lambda exchange: exchange.time_s)
    yield (
        f"all-to-all: expert parallelism spans {worst.domains} scale-up domains; {worst.inter_fraction:.0%} of the bytes "
        f"leave the domain and a call takes {worst.time_s * 1e3:.2f} ms, where S / beta of the scale-up link alone says "
        f"{worst.flat_scale_up_s * 1e3:.2f} ms and of the NIC alone {worst.flat_nic_s * 1e3:.2f} ms"
    )
