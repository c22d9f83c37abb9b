"""Multi-token prediction modules: how many a layout may ask for, and what to say of those that it leaves out."""

from __future__ import annotations

from collections.abc import Iterator

from stepgraph.errors import Problem
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.model import Model


def mtp_problems(layout: Layout, model: Model) -> Iterator[Problem]:
    """More modules than the configuration has (code mtp-modules): nothing says what the others would look like."""
    if layout.mtp <= model.mtp:
        return
    held = "has none" if not model.mtp else f"has {model.mtp}"
    expected = f"0 to {model.mtp}" if model.mtp else "0"
    what = f"{layout.mtp} multi-token prediction {_modules(layout.mtp)}, but the configuration {held}"
    yield Problem("mtp-modules", "mtp", what, expected, f"nearest possible: {model.mtp}")


def mtp_warnings(layout: Layout, model: Model) -> tuple[str, ...]:
    """What to say when the configuration has modules that the training step leaves out."""
    left = model.mtp - layout.mtp
    if left <= 0:
        return ()
    verb = "is" if left == 1 else "are"
    share = f"{left} of {model.mtp}" if layout.mtp else f"{left}"
    what = f"{share} multi-token prediction {_modules(model.mtp)} {verb} not part of the training step"
    return (f"mtp: {what}; --mtp {model.mtp} adds {'it' if model.mtp == 1 else 'them'}",)


def _modules(count: int) -> str:
    return "module" if count == 1 else "modules"
