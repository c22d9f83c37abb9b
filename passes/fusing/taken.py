"""Which ops are in kernels already, while more kernels are being made."""

from __future__ import annotations

from collections.abc import Iterable

from stepgraph.ir.graph import Graph, Group


class Taken:
    """The kernels of a graph so far. Lives for one fusing; `add` is its only change.

    A path that leaves an op can come back before it only inside a kernel, whose members run as one: `horizon` says how
    far such a detour can lead, so that a search for cycles stays local.
    """

    def __init__(self, graph: Graph, groups: Iterable[Group] = ()) -> None:
        self._positions = graph.positions
        self._kernel: dict[str, Group] = {}
        self._ends = [-1] * (len(graph.ops) + 1)  # a Fenwick tree: the last position of kernels by their first one
        for group in groups:
            self.add(group)

    def __contains__(self, op: object) -> bool:
        return op in self._kernel

    def __getitem__(self, op: str) -> str:
        """The name of the op's kernel."""
        return self._kernel[op].name

    def add(self, group: Group) -> None:
        """Note a kernel, or of one that is partly outside the graph the part that is in it."""
        self._kernel.update(dict.fromkeys(group.members, group))
        places = [self._positions[name] for name in group.members]
        at, end = min(places) + 1, max(places)
        while at < len(self._ends):
            self._ends[at] = max(self._ends[at], end)
            at += at & -at

    def unit(self, op: str) -> tuple[str, ...]:
        """The ops that run together with an op: itself, and the others of its kernel."""
        return self._kernel[op].members if op in self._kernel else (op,)

    def horizon(self, position: int) -> int:
        """The last position from which data can come back to `position` or before, through overlapping kernels."""
        end = self._last_end(position)
        while end > position:
            position, end = end, self._last_end(end)
        return position

    def _last_end(self, position: int) -> int:
        """The last position of all kernels that begin at `position` or before."""
        at, end = position + 1, -1
        while at:
            end = max(end, self._ends[at])
            at -= at & -at
        return end
