"""Order files: a user's own schedule, in the CSV form that torch.distributed.pipelining dumps and loads.

One row per rank, one cell per slot: `4F0` `4B0` `4I0` `4W0`, or `(0F7;7B3)OVERLAP_F_B` for a forward and a backward
that run as one. Empty cells are bubbles in torch's drawings and carry no order, so they are passed over.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from stepgraph.errors import InputError, Problem, refuse
from stepgraph.passes.pipeline.actions import LETTERS, Action, Order, Slot, slot_shown
from stepgraph.passes.pipeline.orderchecks import order_problems, stage_owners

MAX_BYTES: Final = 2**24
"""About 2 million cells."""
MAX_PROBLEMS: Final = 20
"""As many are written out; a file of another kind would have thousands."""

_NUMBER = "([0-9]{1,6})"
_ACTION = re.compile(f"{_NUMBER}([FBIW]){_NUMBER}")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
# what torch adds when it lowers an order: transfers, and what FSDP does with parameters and gradients
_LOWERED = re.compile(r"[0-9]+(?:(?:SEND|RECV)_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")
_CELLS = "a cell such as 0F0, 0B0, 0I0, 0W0 or (0F1;7B0)OVERLAP_F_B"


def read_order(path: str | os.PathLike[str]) -> Order:
    """The order that a file holds; row i is rank i, and a stage is where its actions stand.

    Torch's lowered form is refused rather than thinned out: it fixes where transfers are posted, which here follows
    from the order, so the result would not be what the file says.
    Raises: InputError with the problems of the whole file. Codes: pipeline-file (it cannot be read as text, or is
    empty), pipeline-file-cell, pipeline-file-lowered, and those of `order_problems`.
    Source: pytorch/pytorch torch/distributed/pipelining/schedules.py, _dump_csv and _load_csv (compute_only).
    """
    file = Path(path)
    text = _text(file)
    unread: list[Problem] = []
    rows = [list(_row(cells, f"{file}, row {number}", unread)) for number, cells in enumerate(_table(text, file), 1)]
    problems = [*unread, *order_problems(rows, f"{file}", complete=not unread)]
    if problems:
        raise InputError(_shortened(problems, f"{file}"))
    stage_rank = tuple(rank for _, rank in sorted(stage_owners(rows).items()))
    return Order(stage_rank, tuple(tuple(slot for _, slot in row) for row in rows))


def write_order(order: Order) -> str:
    """The text of an order file: read_order gives the same order back."""
    return "".join(",".join(map(slot_shown, slots)) + "\n" for slots in order.ranks)


def _text(file: Path) -> str:
    """Raises: InputError where there is no file, it is too large or it is not text."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise refuse("pipeline-file", ascii(str(file))[1:-1], f"cannot be read: {reason}", "an order file") from None
    if len(raw) > MAX_BYTES:
        raise refuse("pipeline-file", str(file), f"more than {MAX_BYTES // 2**20} MiB", "an order file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text (byte {error.start})"
        raise refuse("pipeline-file", str(file), what, "an order file in UTF-8", "save it as UTF-8") from None


def _table(text: str, file: Path) -> list[list[str]]:
    """The rows, without empty lines at the end. Raises: InputError where nothing is left."""
    try:
        rows = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise refuse("pipeline-file", str(file), f"not a CSV file: {error}", "an order file") from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if not rows:
        raise refuse("pipeline-file", str(file), "the file is empty", f"one row per rank, with {_CELLS}")
    return rows


def _row(cells: list[str], where: str, unread: list[Problem]) -> Iterator[tuple[str, Slot]]:
    """The slots of a row with their places; cells that are none go to `unread`."""
    for number, cell in enumerate(map(str.strip, cells), 1):
        slot = _slot(cell)
        if slot:
            yield f"{where}, cell {number}", slot
        elif cell:
            unread.append(_unread(cell, f"{where}, cell {number}"))


def _slot(cell: str) -> Slot | None:
    """One action, or a forward and a whole backward."""
    if single := _ACTION.fullmatch(cell):
        return (_action(single),)
    pair = _PAIR.fullmatch(cell)
    parts = [_ACTION.fullmatch(part.strip()) for part in pair.groups()] if pair else []
    actions = [_action(part) for part in parts if part]
    letters = [LETTERS[kind] for kind, _, _ in actions]
    return tuple(actions) if letters == ["F", "B"] else None


def _action(match: re.Match[str]) -> Action:
    stage, letter, microbatch = match.groups()
    return LETTERS.index(letter), int(stage), int(microbatch)


def _unread(cell: str, where: str) -> Problem:
    if _LOWERED.fullmatch(cell):
        fix = 'export the order itself: _dump_csv(file, format="compute_only")'
        return Problem("pipeline-file-lowered", where, f"{cell} is of torch's lowered form", "computations only", fix)
    return Problem("pipeline-file-cell", where, f"{cell[:40]!r} is no action", _CELLS)


def _shortened(problems: list[Problem], where: str) -> Iterator[Problem]:
    """The first problems, and how many more there are."""
    yield from islice(problems, MAX_PROBLEMS)
    if len(problems) > MAX_PROBLEMS:
        yield Problem("pipeline-file", where, f"{len(problems) - MAX_PROBLEMS} more problems")
