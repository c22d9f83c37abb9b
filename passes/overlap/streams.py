"""streams: tasks on one compute stream and one stream per communicator, and who waited for whom.

A stream runs its tasks in the order in which they were issued. A task starts when its stream is free and what it
depends on has ended, as kernels do on CUDA streams with events in between. The simulation is exact: rates change only
when a task starts or ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import attrs

COMPUTE = "compute"
"""The stream of everything that is no collective."""

COMMUNICATORS = ("tp", "ep", "cp", "dp", "pp")
"""Streams of collectives, one per process group, named as the buckets are."""

Task: TypeAlias = tuple[str, float, tuple[int, ...], int]
"""stream, seconds, indices of the tasks that it waits for (all issued before it), SMs that it takes from compute.

The last is 0 for compute itself and for collectives on copy engines.
"""


@attrs.frozen
class Exposure:
    """One communicator: total_s on its stream; exposed_s: the part during which compute stood still for it."""

    name: str
    total_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        """What ran beside compute."""
        return self.total_s - self.exposed_s


@attrs.frozen
class Timeline:
    """When every task ran, by index, and where the time went.

    Law: makespan_s = compute_s + slowdown_s + the sum of exposed_s. lengthened_s: what contention added to each compute
    task (their sum is slowdown_s). exposed_s: for each collective, the time in which compute waited for it.
    Units: seconds.
    """

    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    lengthened_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    makespan_s: float
    compute_s: float
    slowdown_s: float
    communicators: tuple[Exposure, ...]

    @property
    def total_exposed_s(self) -> float:
        """What compute waited for, over all communicators."""
        return sum(found.exposed_s for found in self.communicators)


def schedule(tasks: Sequence[Task], sms: int | None = None) -> Timeline:
    """Run tasks that were issued in this order.

    While a collective that takes n_sm of the target's `sms` multiprocessors runs, compute goes at rate 1 / kappa,
    kappa = sms / (sms - n_sm); of several at once the largest n_sm counts; collectives themselves are not slowed. sms
    None: no contention. Compute idles only to wait for collectives; each such moment belongs to the one that is on the
    critical path then.

    Raises: ValueError for a task that waits for one issued after it, and for negative times: a caller's bug.
    Source: CUDA streams and events; the average of the wave model ceil(tiles / (S - n_sm)) / ceil(tiles / S).
    """
    _check(tasks, sms)
    starts, ends, lengthened = _Streams(tasks, sms).run()
    exposed = _exposed(tasks, starts, ends)
    return Timeline(
        start_s=tuple(starts),
        end_s=tuple(ends),
        lengthened_s=tuple(lengthened),
        exposed_s=tuple(exposed),
        makespan_s=max(ends, default=0.0),
        compute_s=sum(seconds for stream, seconds, _, _ in tasks if stream == COMPUTE),
        slowdown_s=sum(lengthened),
        communicators=_by_communicator(tasks, exposed),
    )


def _check(tasks: Sequence[Task], sms: int | None) -> None:
    for index, (stream, seconds, waits_for, n_sm) in enumerate(tasks):
        if any(not 0 <= other < index for other in waits_for):
            raise ValueError(f"task {index} waits for {waits_for}, expected tasks issued before it")
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"task {index} takes {seconds} s, expected 0 or more")
        if stream not in (COMPUTE, *COMMUNICATORS):
            raise ValueError(f"task {index} is on stream {stream!r}, expected {COMPUTE} or one of {COMMUNICATORS}")
        if sms is not None and not 0 <= n_sm < sms:
            raise ValueError(f"task {index} takes {n_sm} of {sms} multiprocessors, expected fewer than all")


class _Streams:
    """The running state: which task runs on each stream, and what contention does to the compute task."""

    __slots__ = ("ends", "kappa", "lengthened", "now", "position", "queues", "running", "sms", "starts", "tasks")

    def __init__(self, tasks: Sequence[Task], sms: int | None) -> None:
        count = len(tasks)
        self.tasks = tasks
        self.sms = sms
        self.queues: dict[str, list[int]] = {}
        for index, task in enumerate(tasks):
            self.queues.setdefault(task[0], []).append(index)
        self.position = dict.fromkeys(self.queues, 0)
        self.running: dict[str, int] = {}
        self.starts = [-1.0] * count
        self.ends = [float("inf")] * count  # of running tasks: as far as is known; past until `now`
        self.lengthened = [0.0] * count
        self.now = 0.0
        self.kappa = 1.0

    def run(self) -> tuple[list[float], list[float], list[float]]:
        """Starts, ends and what contention added, by task."""
        while True:
            self._start()
            self._contend()
            if not self.running:
                return self.starts, self.ends, self.lengthened
            self.now = min(self.ends[index] for index in self.running.values())
            self.running = {stream: index for stream, index in self.running.items() if self.ends[index] > self.now}

    def _start(self) -> None:
        """Start what can start now, at most one task per stream."""
        for stream, queue in self.queues.items():
            place = self.position[stream]
            if stream in self.running or place == len(queue):
                continue
            index = queue[place]
            if all(self._ended(other) for other in self.tasks[index][2]):
                self.position[stream] = place + 1
                self.running[stream] = index
                self.starts[index] = self.now
                self.ends[index] = self.now + self.tasks[index][1]
                if stream == COMPUTE:
                    self.kappa = 1.0

    def _ended(self, index: int) -> bool:
        return self.starts[index] >= 0 and self.ends[index] <= self.now and index not in self.running.values()

    def _contend(self) -> None:
        """Move the end of the compute task when what runs beside it changes."""
        index = self.running.get(COMPUTE)
        taken = max((self.tasks[other][3] for stream, other in self.running.items() if stream != COMPUTE), default=0)
        kappa = self.sms / (self.sms - taken) if self.sms else 1.0
        if index is None or kappa == self.kappa:
            return
        self.ends[index] = self.now + (self.ends[index] - self.now) / self.kappa * kappa
        self.lengthened[index] = self.ends[index] - self.starts[index] - self.tasks[index][1]
        self.kappa = kappa


def _exposed(tasks: Sequence[Task], starts: Sequence[float], ends: Sequence[float]) -> list[float]:
    """For each task, the part of its run in which the compute stream stood idle for it."""
    exposed = [0.0] * len(tasks)
    before: list[int] = []  # the task before each on its stream, or -1
    latest: dict[str, int] = {}
    for index, task in enumerate(tasks):
        before.append(latest.get(task[0], -1))
        latest[task[0]] = index
    free = 0.0
    for index, (stream, _, waits_for, _) in enumerate(tasks):
        if stream == COMPUTE:
            _blame(waits_for, starts[index], free, (tasks, starts, ends, before), exposed)
            free = ends[index]
    _blame(range(len(tasks)), max(ends, default=0.0), free, (tasks, starts, ends, before), exposed)
    return exposed


_Ran: TypeAlias = tuple[Sequence[Task], Sequence[float], Sequence[float], Sequence[int]]


def _blame(causes: Sequence[int], until: float, since: float, ran: _Ran, exposed: list[float]) -> None:
    """Walk the critical path back from `until` to `since` and book every piece of it on the collective that ran.

    A task starts exactly when one of those that it had to wait for ends, so the walk never loses the path.
    """
    tasks, starts, ends, before = ran
    while until > since:
        cause = next(index for index in causes if ends[index] == until)
        begin = max(starts[cause], since)
        exposed[cause] += until - begin
        until = begin
        causes = (*tasks[cause][2], before[cause]) if before[cause] >= 0 else tasks[cause][2]


def _by_communicator(tasks: Sequence[Task], exposed: Sequence[float]) -> tuple[Exposure, ...]:
    """Totals of the communicators that ran something, in their usual order."""
    found: list[Exposure] = []
    for name in COMMUNICATORS:
        own = [index for index, task in enumerate(tasks) if task[0] == name]
        if own:
            found.append(Exposure(name, sum(tasks[i][1] for i in own), sum(exposed[i] for i in own)))
    return tuple(found)
