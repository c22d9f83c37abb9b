"""The op table: one row per kind, what an op computes.

Letters: b batch, s sequence, t key sequence, d hidden, h heads, c key width, w value width, r latent width, e rotary
part, n both packed, u packed key and value, f FFN width, k the gate and up halves, E experts, v vocabulary, l rows of a position
table, p a rank's flat parameters. How software executes a kind (passes, kernels) is a profile's business.
"""

from __future__ import annotations

from types import MappingProxyType

from stepgraph.errors import did_you_mean
from stepgraph.ir.kinds import attention, ends, experts, matmuls, moves, norms, pointwise, step
from stepgraph.ir.rows import Row

ROWS: tuple[Row, ...] = (
    *ends.ROWS,
    *matmuls.ROWS,
    *attention.ROWS,
    *norms.ROWS,
    *pointwise.ROWS,
    *experts.ROWS,
    *moves.ROWS,
    *step.ROWS,
)
"""Every row, family by family."""

TABLE = MappingProxyType({row.kind: row for row in ROWS})
"""Rows by kind."""

CONVERSIONS = ("slice", "reduce_scatter", "all_reduce", "all_to_all", "all_gather")
"""Kinds that only change a placement, in the order in which several are applied: smallest data first."""


class UnknownKindError(LookupError):
    """An op of a kind without a row: never counted as zero."""


def row_of(kind: str) -> Row:
    """The row of a kind.

    Raises: UnknownKindError, with a suggestion.
    """
    row = TABLE.get(kind)
    if row is None:
        raise UnknownKindError(f"no row for op kind {kind!r}; {did_you_mean(kind, TABLE)}")
    return row
