"""The modes in which a pipeline's ranks hand over their tensors, and in which a slot of two actions runs."""

from __future__ import annotations

from math import isfinite
from typing import Final

import attrs

from stepgraph.errors import InputError, did_you_mean, refuse

_WORDS: Final = ("async", "blocking", "overlap", "joint:X")


@attrs.frozen
class Mode:
    """How transfers and pairs run.

    transfers: "async": sends never block and receives are posted early, so that only a tensor that is not there yet
    is waited for. "blocking": Megatron-LM's batched calls, which end when all their transfers have ended. "overlap":
    Megatron-LM's interleaved schedule with overlap_p2p_comm: blocking while the pipeline fills and drains, behind
    computation in between.
    joint: where above zero, a slot of a forward and a backward is one op of joint x (their times), which needs the
    inputs of both and hands over both outputs at its end. At zero it runs them one after the other.
    """

    transfers: str
    joint: float = 0.0

    def __str__(self) -> str:
        return f"joint:{self.joint:g}" if self.joint else self.transfers


ASYNC: Final = Mode("async")
BLOCKING: Final = Mode("blocking")
OVERLAP: Final = Mode("overlap")


def joint(share: float) -> Mode:
    """Pairs as one op that takes `share` of what both take; transfers as in async.

    Raises: InputError (pipeline-mode) unless share is a finite number above zero.
    """
    if not (isfinite(share) and share > 0):
        raise _refused(f"joint:{share:g}")
    return Mode("async", share)


def parse_mode(text: str) -> Mode:
    """`async`, `blocking`, `overlap` or `joint:0.8`, in any case.

    Raises: InputError (pipeline-mode).
    """
    word, colon, share = text.strip().lower().partition(":")
    for mode in (ASYNC, BLOCKING, OVERLAP):
        if word == mode.transfers and not colon:
            return mode
    if word != "joint":
        raise _refused(text)
    try:
        return joint(float(share))
    except ValueError as error:
        raise _refused(text) from error


def refuse_without_pairs(mode: Mode, name: str, *, pairs: bool, where: str = "mode") -> None:
    """A joint mode says nothing about an order without slots of two. Raises: InputError (pipeline-mode)."""
    if mode.joint and not pairs:
        what = f"{mode} is about forwards and backwards that run as one, and {name} has none"
        raise refuse("pipeline-mode", where, what, "async, or a schedule that pairs them: dualpipev")


def _refused(text: str) -> InputError:
    expected = "async, blocking, overlap, or joint:X with X above 0"
    fix = "write joint:1 or joint:0.8" if text.lower().startswith("joint") else did_you_mean(text.lower(), _WORDS)
    return refuse("pipeline-mode", "mode", f"unknown mode {text[:40]!r}", expected, fix)
