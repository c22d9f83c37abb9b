"""stepgraph.hwtargets."""

from typing import TYPE_CHECKING

if __name__ == "hwtargets":
    raise ImportError("import stepgraph.hwtargets instead: 'hwtargets' alone would be a second copy of every class")

if TYPE_CHECKING:
    from stepgraph.hwtargets.reading import load_target, target_names
    from stepgraph.hwtargets.target import Target

__all__ = ["Target", "load_target", "target_names"]


def __getattr__(name: str) -> object:
    """Load a public name when it is first used, so that importing the package stays free."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from stepgraph.hwtargets import reading

    return getattr(reading, name)
