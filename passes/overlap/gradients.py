"""gradients: reductions beside the backward pass and parameter gathers beside the forward pass, on numbers alone.

Each mechanism is a list of tasks in the order in which its framework issues them. `schedule` runs them, and what is
exposed comes out; the closed forms in the docstrings are what it comes to without contention.
"""

from __future__ import annotations

from collections.abc import Sequence

from stepgraph.passes.overlap.policies import SMS
from stepgraph.passes.overlap.streams import COMPUTE, Task, schedule

_SMS = SMS["nccl"]


def buckets_in_backward_order(
    pieces: Sequence[tuple[int, float]], bucket_elements: int | None
) -> list[tuple[int, float]]:
    """How a stage's flat gradient buffer divides into buckets: (elements, when the last of them is ready), first first.

    pieces: (elements, ready_s) of each parameter or layer in the order of the model; ready_s: when backward has made its
    gradient. Buckets are filled from the end of the model; one is closed as soon as it holds bucket_elements, so it may
    hold more (a piece is not cut). None: a single bucket. Shapes: as many elements in as out. Units: seconds.

    Source: NVIDIA/Megatron-LM megatron/core/distributed/param_and_grad_buffer.py.
    """
    if bucket_elements is not None and bucket_elements < 1:
        raise ValueError(f"buckets of {bucket_elements} elements, expected 1 or more")
    buckets: list[tuple[int, float]] = []
    elements, ready = 0, 0.0
    for count, ready_s in reversed(pieces):
        elements, ready = elements + count, max(ready, ready_s)
        if bucket_elements is not None and elements >= bucket_elements:
            buckets.append((elements, ready))
            elements, ready = 0, 0.0
    return [*buckets, (elements, ready)] if elements else buckets


def bucketed_tasks(backward_s: Sequence[float], collective_s: Sequence[float]) -> list[Task]:
    """Megatron-LM: the collective of a bucket starts when its last gradient is ready and the one before it has ended.

    backward_s: backward until each bucket is ready, counted from the bucket before; one entry more is what backward
    does after the last bucket. collective_s: of each bucket. Raises: ValueError where the lengths do not fit.
    """
    if len(backward_s) - len(collective_s) not in (0, 1):
        raise ValueError(f"{len(backward_s)} pieces of backward for {len(collective_s)} buckets")
    tasks: list[Task] = []
    for index, seconds in enumerate(backward_s):
        tasks.append((COMPUTE, seconds, (), 0))
        if index < len(collective_s):
            tasks.append(("dp", collective_s[index], (len(tasks) - 1,), _SMS))
    return tasks


def bucketed_exposed_s(backward_s: Sequence[float], collective_s: Sequence[float]) -> float:
    """What of the gradient buckets is exposed: max_k (sum_{i<=k} b_i + sum_{i>=k} c_i) - sum b_i, at least 0.

    For equal buckets max(c, N c - (N - 1) b); without overlap it would be the sum of c_i.
    Source: NVIDIA/Megatron-LM megatron/core/distributed/param_and_grad_buffer.py (register_grad_ready).
    """
    return schedule(bucketed_tasks(backward_s, collective_s)).total_exposed_s


def staged_exposed_s(first_stage_s: float, reduce_s: Sequence[float], lead_s: Sequence[float]) -> float:
    """What a pipeline exposes of its gradient reductions: max(first stage's, max_r (reduce_r - lead_r)), at least 0.

    Only the first stage cuts its buffer into buckets; later stages reduce all at once in the bubble that they have after
    their last backward. first_stage_s: exposed on stage 0, as `bucketed_exposed_s` says. reduce_s, lead_s: of the later
    stages, the whole reduction, and how long before stage 0 their backward ends: r (t_b + t) for equal stages.

    Source: NVIDIA/Megatron-LM megatron/core/distributed/distributed_data_parallel.py,
    megatron/core/pipeline_parallel/schedules.py.
    """
    later = (reduce - lead for reduce, lead in zip(reduce_s, lead_s, strict=True))
    return max(0.0, first_stage_s, *later)


def gather_tasks(collective_s: Sequence[float], forward_s: Sequence[float]) -> list[Task]:
    """One bucket of look-ahead: bucket k + 1 is gathered beside forward k, once bucket k is there.

    Shapes: one collective per piece of forward. Raises: ValueError where the lengths differ.
    """
    _same_lengths(collective_s, forward_s)
    tasks: list[Task] = [("dp", c, (), _SMS) for c in collective_s[:1]]
    gathered: list[int] = [0]
    computed: list[int] = []
    for k, (ahead, f) in enumerate(zip((*collective_s[1:], None), forward_s, strict=False)):
        if ahead is not None:
            tasks.append(("dp", ahead, (gathered[k], *computed[-1:]), _SMS))
            gathered.append(len(tasks) - 1)
        tasks.append((COMPUTE, f, (gathered[k],), 0))
        computed.append(len(tasks) - 1)
    return tasks


def gather_exposed_s(collective_s: Sequence[float], forward_s: Sequence[float]) -> float:
    """What of the parameter gathers is exposed: c_0 + sum_k max(0, c_{k+1} - f_k).

    For Megatron-LM's overlap-param-gather the pieces are buckets and only a step's first micro-batch pays; for FSDP2 they
    are units, and every forward pays that finds its parameters sharded.
    Source: NVIDIA/Megatron-LM megatron/core/distributed/param_and_grad_buffer.py (finish_param_sync); pytorch/pytorch
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
    """
    return schedule(gather_tasks(collective_s, forward_s)).total_exposed_s


def sharded_backward_tasks(
    gather_s: Sequence[float], backward_s: Sequence[float], reduce_s: Sequence[float]
) -> list[Task]:
    """FSDP2 with parameters sharded again after forward: gathers one unit ahead and reductions, on one communicator.

    Issue order: gather of the next unit, backward of this one, its reduce-scatter. Units in backward order.
    Shapes: one of each per unit. Raises: ValueError where the lengths differ.
    """
    _same_lengths(gather_s, backward_s, reduce_s)
    tasks: list[Task] = [("dp", c, (), _SMS) for c in gather_s[:1]]
    gathered: list[int] = [0]
    computed: list[int] = []
    for k, (ahead, b, reduce) in enumerate(zip((*gather_s[1:], None), backward_s, reduce_s, strict=False)):
        if ahead is not None:
            tasks.append(("dp", ahead, (gathered[k], *computed[-1:]), _SMS))
            gathered.append(len(tasks) - 1)
        tasks.append((COMPUTE, b, (gathered[k],), 0))
        computed.append(len(tasks) - 1)
        tasks.append(("dp", reduce, (computed[k],), _SMS))
    return tasks


def sharded_backward_exposed_s(
    gather_s: Sequence[float], backward_s: Sequence[float], reduce_s: Sequence[float]
) -> float:
    """What FSDP2's backward exposes; for L >= 2 equal units of gather g, backward b, reduction r

    g + max(0, g - b) + (L - 2) max(0, g + r - b) + max(0, r - b) + r.
    Source: pytorch/pytorch torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
    """
    return schedule(sharded_backward_tasks(gather_s, backward_s, reduce_s)).total_exposed_s


def two_buffer_tasks(backward_s: Sequence[float], reduce_s: Sequence[float]) -> list[Task]:
    """DeepSpeed ZeRO 1 and 2 with overlap_comm: two buffers alternate, so backward waits for the reduction before last.

    Shapes: one reduction per piece of backward. Raises: ValueError where the lengths differ.
    """
    _same_lengths(backward_s, reduce_s)
    tasks: list[Task] = []
    for k, (b, reduce) in enumerate(zip(backward_s, reduce_s, strict=True)):
        tasks.append((COMPUTE, b, (2 * (k - 2) + 1,) if k >= 2 else (), 0))
        tasks.append(("dp", reduce, (2 * k,), _SMS))
    return tasks


def two_buffer_exposed_s(backward_s: Sequence[float], reduce_s: Sequence[float]) -> float:
    """What DeepSpeed exposes: c_last + sum_k max(0, c_k - b_{k+1}).

    Source: deepspeedai/DeepSpeed deepspeed/runtime/zero/stage_1_and_2.py (average_tensor).
    """
    return schedule(two_buffer_tasks(backward_s, reduce_s)).total_exposed_s


def _same_lengths(*times: Sequence[float]) -> None:
    lengths = [len(seconds) for seconds in times]
    if len(set(lengths)) > 1:
        raise ValueError(f"{' and '.join(map(str, lengths))} times, expected as many of each")
