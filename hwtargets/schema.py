"""Which figures a target file holds, what each must look like, and how one is checked."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from enum import Enum
from math import inf
from typing import TypeAlias

from stepgraph.errors import Problem, did_you_mean
from stepgraph.hwtargets.target import BreakPoints, Figure

STATUSES = ("spec", "measured", "fitted", "assumed")
FAMILIES = ("qkv", "attn_out", "mlp_up", "mlp_down", "lm_head", "router", "experts_up", "experts_down", "sdpa")
TEXTS = ("name", "title", "base")
_PARTS = ("value", "source", "status")
_LARGEST = 1e30

Checked: TypeAlias = tuple[Figure | None, tuple[Problem, ...]]


class Kind(Enum):
    """What the value of a figure may be; the text is what a message says was expected."""

    POSITIVE = "a number above 0"
    RATE = "a rate per second from 1e8 to 1e19: bytes or FLOPs, not gigabytes"
    BYTES = "bytes from 1e5 to 1e15, not gigabytes"
    SECONDS = "seconds from 0 to 1, not microseconds"
    NON_NEGATIVE = "a number of at least 0"
    FRACTION = "a number above 0 and at most 1.2"
    COUNT = "a whole number of at least 1"
    BREAK_POINTS = "[[up_to_bytes, alpha], ..., [inf, alpha]] with rising sizes, each alpha above 0 and at most 1.2"


def _kinds() -> Iterator[tuple[str, Kind]]:
    """Every figure in file order, under its dotted key."""
    for section, kind, keys in _SECTIONS:
        yield from ((f"{section}.{key}", kind) for key in keys.split())
    for family in FAMILIES:
        roles = "fwd dx" if family == "sdpa" else "fwd dx dw"  # attention has one backward kernel
        yield from ((f"eta.constant.{family}.{role}", Kind.FRACTION) for role in roles.split())


_SECTIONS = (
    ("peak_flops_per_s", Kind.RATE, "bf16 fp16 tf32 fp32 fp8"),
    ("hbm", Kind.BYTES, "size_bytes"),
    ("hbm", Kind.RATE, "bandwidth_bytes_per_s"),
    ("hbm", Kind.FRACTION, "reachable_fraction"),
    ("compute", Kind.COUNT, "sms"),
    ("compute", Kind.BYTES, "l2_bytes"),
    ("topk", Kind.RATE, "bytes_per_s"),
    ("scale_up", Kind.RATE, "bandwidth_bytes_per_s"),
    ("scale_up", Kind.COUNT, "domain"),
    ("scale_up", Kind.SECONDS, "t0_s t_link_s"),
    ("scale_up", Kind.BREAK_POINTS, "alpha"),
    ("nic", Kind.RATE, "bandwidth_bytes_per_s"),
    ("nic", Kind.SECONDS, "t0_s t_link_s"),
    ("nic", Kind.BREAK_POINTS, "alpha"),
    ("launch", Kind.SECONDS, "gap_s host_issue_s graph_node_s"),
    ("eta.constant", Kind.FRACTION, "gemm"),
    ("eta.shape", Kind.FRACTION, "eta_inf f_hbm"),
    ("eta.shape", Kind.NON_NEGATIVE, "k0 h droop"),
    ("eta.shape", Kind.COUNT, "largest_tile"),
    ("eta.shape.layout", Kind.FRACTION, "fwd dx dw"),
    ("eta.sdpa_shape.fwd_64", Kind.FRACTION, "eta_inf"),
    ("eta.sdpa_shape.fwd_64", Kind.NON_NEGATIVE, "s0"),
    ("eta.sdpa_shape.fwd_128", Kind.FRACTION, "eta_inf"),
    ("eta.sdpa_shape.fwd_128", Kind.NON_NEGATIVE, "s0"),
    ("eta.sdpa_shape.dx", Kind.FRACTION, "eta_inf"),
    ("eta.sdpa_shape.dx", Kind.NON_NEGATIVE, "s0"),
)
KINDS = tuple(_kinds())


def required(key: str, present: AbstractSet[str]) -> bool:
    """Whether a file with these figures must hold `key` too.

    alpha has a default law; CUDA graphs may be unknown; a dtype other than bf16 may not exist on the GPU; a named op without figures takes the
    gemm constant, but one with figures needs all its roles.
    """
    section, _, name = key.rpartition(".")
    if name in ("alpha", "graph_node_s") or (section == "peak_flops_per_s" and name != "bf16"):
        return False
    if section.startswith("eta.constant.") and section != "eta.constant.sdpa":
        return any(other.startswith(f"{section}.") for other in present)
    return True


def checked_figure(kind: Kind, raw: object, where: str) -> Checked:
    """The figure behind `{ value = ..., source = ..., status = ... }`, or everything that is wrong with it."""
    form = "{ value = ..., source = ..., status = ... }"
    if not isinstance(raw, dict):
        return None, (Problem("target-figure", where, f"found {raw!r}", form, "say where the figure comes from"),)
    problems = [
        Problem("target-key", where, f"unknown part {key!r}", form, did_you_mean(key, _PARTS))
        for key in raw
        if key not in _PARTS
    ]
    source, status = raw.get("source"), raw.get("status")
    if not isinstance(source, str) or not source.strip():
        fix = "name the document, data set or measurement that it comes from"
        problems.append(Problem("target-source", where, _found("source", raw), "a text that is not empty", fix))
    if status not in STATUSES:
        fix = did_you_mean(status, STATUSES) if isinstance(status, str) else ""
        problems.append(Problem("target-status", where, _found("status", raw), f"one of {', '.join(STATUSES)}", fix))
    value = _value(kind, raw.get("value"))
    if value is None:
        problems.append(Problem("target-value", where, _found("value", raw), kind.value))
    if problems or value is None:
        return None, tuple(problems)
    return Figure(value, str(source), str(status)), ()


def _found(part: str, raw: dict[str, object]) -> str:
    return f"{part} is {raw[part]!r}" if part in raw else f"no {part}"


def _value(kind: Kind, raw: object) -> float | BreakPoints | None:
    if kind is Kind.BREAK_POINTS:
        return _break_points(raw)
    return _number(kind, raw)


def _number(kind: Kind, raw: object) -> float | None:
    """The number, or None where it is none of its kind; bool and text are no numbers, nan and inf neither."""
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not 0 <= raw < _LARGEST:
        return None
    allowed = {
        Kind.POSITIVE: raw > 0,
        Kind.RATE: 1e8 <= raw <= 1e19,
        Kind.BYTES: 1e5 <= raw <= 1e15,
        Kind.SECONDS: raw <= 1,
        Kind.NON_NEGATIVE: True,
        Kind.FRACTION: 0 < raw <= 1.2,
        Kind.COUNT: raw >= 1 and raw == int(raw),
    }
    return float(raw) if allowed[kind] else None


def _break_points(raw: object) -> BreakPoints | None:
    """((up to bytes, alpha), ...): the last row may be [alpha] or [inf, alpha]."""
    if not isinstance(raw, list) or not raw:
        return None
    *rows, last = (tuple(row) if isinstance(row, list) else () for row in raw)
    if len(last) == 2 and last[0] != inf:
        return None
    points = [_point(row) for row in rows]
    alpha = _number(Kind.FRACTION, last[-1]) if len(last) in (1, 2) else None
    if alpha is None:
        return None
    known = [point for point in points if point is not None]
    sizes = [size for size, _ in known]
    if len(known) < len(points) or sizes != sorted(set(sizes)):
        return None
    return (*known, (inf, alpha))


def _point(row: tuple[object, ...]) -> tuple[float, float] | None:
    if len(row) != 2:
        return None
    size, alpha = _number(Kind.POSITIVE, row[0]), _number(Kind.FRACTION, row[1])
    return None if size is None or alpha is None else (size, alpha)
