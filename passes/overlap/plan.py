"""plan: in which order ops are issued, which collectives the next op does not wait for, and the tasks that follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import attrs

from stepgraph.passes.overlap.policies import SMS
from stepgraph.passes.overlap.streams import COMPUTE, Task, Timeline
from stepgraph.passes.overlap.work import Work

WAITED, LOOSE, JOIN, RING, PIPELINE = range(5)
"""How an op is issued.

WAITED: the next op waits for it. LOOSE: only its readers do, and whoever stands behind a JOIN with it. RING: an
all-gather that feeds its matmul part by part. PIPELINE: a matmul that feeds its reduce-scatter part by part.
"""

Step: TypeAlias = tuple[int, int, int]
"""Mode, position of the op, position of its partner: the matmul of RING, the reduce-scatter of PIPELINE, else -1."""

PIPELINE_SPLITS = 4
"""Parts of a matmul that feeds a reduce-scatter.

Source: NVIDIA/TransformerEngine transformer_engine/pytorch/module/base.py (num_splits).
"""


_NO_PAIRS: Mapping[int, int] = MappingProxyType({})
_NO_WINDOWS: Mapping[int, tuple[int, ...]] = MappingProxyType({})


@attrs.frozen
class Join:
    """Whatever is issued next waits for these ops."""

    positions: tuple[int, ...]


@attrs.frozen(eq=False)
class Partners:
    """Which ops are issued with which others, by position.

    beside: matmul -> collective issued just before it and awaited just after it. rings: matmul -> its all-gather.
    pipelines: matmul -> its reduce-scatter. windows: collective -> ops issued while it runs, and then a wait for it.
    loose: other collectives that the next op does not wait for. ahead: op -> collectives issued just before it, which
    only their readers wait for.
    """

    beside: Mapping[int, int] = _NO_PAIRS
    rings: Mapping[int, int] = _NO_PAIRS
    pipelines: Mapping[int, int] = _NO_PAIRS
    windows: Mapping[int, tuple[int, ...]] = _NO_WINDOWS
    loose: frozenset[int] = frozenset()
    ahead: Mapping[int, tuple[int, ...]] = _NO_WINDOWS

    def hosts(self) -> dict[int, int]:
        """For every op that another one issues, that other one."""
        pairs = {guest: host for links in (self.beside, self.rings, self.pipelines) for host, guest in links.items()}
        many = (*self.windows.items(), *self.ahead.items())
        return pairs | {guest: host for host, guests in many for guest in guests}


def steps_of(work: Work, partners: Partners) -> list[Step]:
    """Issue ops in program order, partners together, nothing before what it reads."""
    return steps_of_parts(work, partners, [work.chosen])


def steps_of_parts(work: Work, partners: Partners, parts: Iterable[Sequence[int] | Join]) -> list[Step]:
    """The same with an order of one's own: positions part by part, and joins between them."""
    issuer = _Issuer(work, partners)
    for part in parts:
        if isinstance(part, Join):
            issuer.steps.extend((JOIN, position, -1) for position in part.positions)
            continue
        for position in part:
            if position not in issuer.hosts:
                issuer.issue(position)
    return issuer.steps


class _Issuer:
    """One walk over one piece of work; holds what has been issued."""

    def __init__(self, work: Work, partners: Partners) -> None:
        self.work = work
        self.partners = partners
        self.hosts = partners.hosts()
        self.begun: set[int] = set()
        self.steps: list[Step] = []

    def issue(self, position: int) -> None:
        """Issue an op after what it reads; one that another op issues is left to that other op."""
        host = self.hosts.get(position)
        if position in self.begun:
            return
        if host is not None and host not in self.begun:
            self.issue(host)
        elif host is None or self._is_inside(position, host):
            self._issue(position)

    def _is_inside(self, position: int, host: int) -> bool:
        """Whether the host issues the op itself later on: not so for what stands in a window."""
        return position in self.partners.windows.get(host, ())

    def _issue(self, position: int) -> None:
        self.begun.add(position)
        self._issue_sources(position)
        partners = self.partners
        for early in partners.ahead.get(position, ()):
            self._issue_loose(early)
        guest = partners.beside.get(position)
        if guest is not None:
            self._issue_loose(guest)
        if position in partners.windows:
            self._issue_window(position)
        elif position in partners.rings:
            self._issue_pair(RING, partners.rings[position], position)
        elif position in partners.pipelines:
            self._issue_pair(PIPELINE, position, partners.pipelines[position])
        else:
            self.steps.append((LOOSE if position in partners.loose else WAITED, position, -1))
        if guest is not None:
            self.steps.append((JOIN, guest, -1))

    def _issue_sources(self, position: int) -> None:
        for source in self.work.sources[position]:
            self.issue(source)

    def _issue_loose(self, guest: int) -> None:
        self.begun.add(guest)
        self._issue_sources(guest)
        self.steps.append((LOOSE, guest, -1))

    def _issue_pair(self, mode: int, first: int, second: int) -> None:
        """Two ops that run part by part; what both read comes before."""
        self.begun.update((first, second))
        self._issue_sources(first)
        self.steps.append((mode, first, second))

    def _issue_window(self, position: int) -> None:
        """A collective with the ops that run while it does; what these read comes first, and is awaited."""
        guests = self.partners.windows[position]
        for guest in guests:
            for source in self.work.sources[guest]:
                if source not in guests:
                    self.issue(source)
        self.steps.append((LOOSE, position, -1))
        for guest in guests:
            self.issue(guest)
        self.steps.append((JOIN, position, -1))


def tasks_of(work: Work, steps: Sequence[Step]) -> tuple[list[Task], list[int]]:
    """The tasks of a plan, and for each the position of the op that it is (a part of)."""
    writer = _Writer(work)
    for mode, position, partner in steps:
        if mode == JOIN:
            writer.join(position)
        elif mode == RING:
            writer.ring(position, partner)
        elif mode == PIPELINE:
            writer.pipeline(position, partner)
        else:
            writer.single(position, waited=mode == WAITED)
    return writer.tasks, writer.owners


class _Writer:
    """Turns steps into tasks. `after`: the tasks that whatever is issued next waits for."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.tasks: list[Task] = []
        self.owners: list[int] = []
        self.after: tuple[int, ...] = ()
        self.loose: dict[int, int] = {}  # op -> its last task, of ops that the next one did not wait for

    def add(self, position: int, share: float, waits_for: tuple[int, ...], method: str) -> int:
        """One task: a share of an op."""
        stream = self.work.stream(position)
        n_sm = 0 if stream == COMPUTE else SMS[method]
        self.tasks.append((stream, self.work.seconds[position] * share, waits_for, n_sm))
        self.owners.append(position)
        return len(self.tasks) - 1

    def ready(self, *positions: int) -> tuple[int, ...]:
        """What ops issued now wait for: everything awaited so far, and what they read."""
        reads = (source for position in positions for source in self.work.sources[position])
        return (*self.after, *(self.loose[source] for source in reads if source in self.loose))

    def single(self, position: int, *, waited: bool) -> None:
        """A whole op."""
        task = self.add(position, 1.0, self.ready(position), "nccl")
        if waited:
            self.after = (task,)
        else:
            self.loose[position] = task

    def join(self, position: int) -> None:
        """Let whatever comes next wait for a loose op."""
        self.after = (*self.after, self.loose[position])

    def ring(self, gather: int, matmul: int) -> None:
        """P parts of the matmul, of which the first reads what the rank has; P - 1 steps of the all-gather."""
        parts = self.work.ops[gather].group_size
        first, own = self.ready(gather), self.ready(matmul)
        hops = [self.add(gather, 1 / (parts - 1), first, "ring") for _ in range(parts - 1)]
        for part in range(parts):
            task = self.add(matmul, 1 / parts, own if part == 0 else (hops[part - 1],), "ring")
        self.after = (task,)  # which is behind the last hop too

    def pipeline(self, matmul: int, scatter: int) -> None:
        """A fixed number of parts of the matmul, each followed by its part of the reduce-scatter."""
        own, share = self.ready(matmul), 1 / PIPELINE_SPLITS
        parts = [self.add(matmul, share, own, "pipeline") for _ in range(PIPELINE_SPLITS)]
        hops = [self.add(scatter, share, (part,), "pipeline") for part in parts]
        self.after = (hops[-1],)


def seconds_of(timeline: Timeline, tasks: Sequence[Task], owners: Sequence[int], count: int) -> list[float]:
    """What each op adds to the makespan: time of compute with its lengthening, of a collective what is exposed."""
    spent = [0.0] * count
    for index, (stream, seconds, _, _) in enumerate(tasks):
        own = seconds + timeline.lengthened_s[index] if stream == COMPUTE else timeline.exposed_s[index]
        spent[owners[index]] += own
    return spent
