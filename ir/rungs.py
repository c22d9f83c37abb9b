"""An order between nodes, some of which are merged into rungs without ever closing a circle."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class Order:
    """What stands above what, and which nodes stand side by side. Lives as long as one drawing is being made.

    nodes: all of them, in an order that decides nothing but the order of the results. pairs: above, below.
    """

    def __init__(self, nodes: Iterable[str], pairs: Iterable[tuple[str, str]]) -> None:
        self._below: dict[str, dict[str, None]] = {node: {} for node in nodes}  # unlike a set, a dict keeps its order
        for above, under in pairs:
            self._below[above][under] = None
        self._members = {node: [node] for node in self._below}
        self._rung = {node: node for node in self._below}

    def merge(self, left: str, right: str) -> bool:
        """Put two nodes on one rung unless one of their rungs has to stand above the other; whether they share one.

        A node that is not in the order shares a rung with nobody.
        """
        if left not in self._rung or right not in self._rung:
            return False
        a, b = self._rung[left], self._rung[right]
        if a == b or self._is_above(a, b) or self._is_above(b, a):
            return a == b
        for node in self._members.pop(b):
            self._members[a].append(node)
            self._rung[node] = a
        return True

    def rungs(self) -> tuple[tuple[str, ...], ...]:
        """Rungs of two nodes and more."""
        return tuple(tuple(nodes) for nodes in self._members.values() if len(nodes) > 1)

    def steps_round(self, above: str, under: str) -> int:
        """Steps of the shortest way from `above` to `under` other than the direct one; 0 when there is none."""
        distance = {node: 1 for node in self._below[above] if node != under}
        todo = deque(distance)
        while todo:
            node = todo.popleft()
            for beyond in self._below[node]:
                if beyond == under:
                    return distance[node] + 1
                if beyond not in distance:
                    distance[beyond] = distance[node] + 1
                    todo.append(beyond)
        return 0

    def _is_above(self, start: str, goal: str) -> bool:
        seen, todo = {start}, [start]
        while todo:
            fresh = {self._rung[under] for node in self._members[todo.pop()] for under in self._below[node]} - seen
            if goal in fresh:
                return True
            seen |= fresh
            todo.extend(fresh)
        return False
