"""The op table: one row per kind, what an op computes.

Letters: b batch, s sequence, t key sequence, d hidden, h heads, c key width, w value width, r latent width, e rotary
part, n both packed, u packed key and value, f FFN width, k the gate and up halves, j half a key width, E experts,
v vocabulary, l rows of a position table, p a rank's flat parameters. How software executes a kind (passes, kernels) is
a profile's business.
"""

from __future__ import annotations

from types import MappingProxyType

from stepgraph.errors import did_you_mean
from stepgraph.ir.kinds import attention, eager, eager_attention, ends, experts, matmuls, moves, norms, pointwise, step
from stepgraph.ir.rows import Row

FAMILIES = MappingProxyType(
    {
        "ends": ends.ROWS,
        "matmuls": matmuls.ROWS,
        "attention": attention.ROWS,
        "norms": norms.ROWS,
        "pointwise": pointwise.ROWS,
        "experts": experts.ROWS,
        "moves": moves.ROWS,
        "step": step.ROWS,
        "eager": (*eager.ROWS, *eager_attention.ROWS),
    }
)
"""Rows by family."""

ROWS: tuple[Row, ...] = tuple(row for rows in FAMILIES.values() for row in rows)
"""Every row, family by family."""

TABLE = MappingProxyType({row.kind: row for row in ROWS})
"""Rows by kind."""

KINDS_OF = MappingProxyType({family: tuple(row.kind for row in rows) for family, rows in FAMILIES.items()})
"""Kinds by family."""

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
