"""stepgraph.passes: graph to graph (fusion) and graph to numbers. Names are imported when they are first used."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

if __name__ == "passes":
    raise ImportError("import stepgraph.passes instead: 'passes' alone would be a second copy of every class")

if TYPE_CHECKING:
    from stepgraph.passes.comparison import compare
    from stepgraph.passes.fusing.grouping import explain
    from stepgraph.passes.fusing.pattern import fusion
    from stepgraph.passes.fusing.programs import fuse, unfuse

_HOMES = MappingProxyType(
    {
        "compare": "stepgraph.passes.comparison",
        "explain": "stepgraph.passes.fusing.grouping",
        "fuse": "stepgraph.passes.fusing.programs",
        "fusion": "stepgraph.passes.fusing.pattern",
        "unfuse": "stepgraph.passes.fusing.programs",
    }
)

__all__ = ["compare", "explain", "fuse", "fusion", "unfuse"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'stepgraph.passes' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
