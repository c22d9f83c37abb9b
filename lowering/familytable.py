"""The table of model families: one row per `model_type` of a Hugging Face config.json."""

from __future__ import annotations

from stepgraph.lowering.densefamilies import DENSE
from stepgraph.lowering.families import Family
from stepgraph.lowering.sparsefamilies import SPARSE

FAMILIES: tuple[Family, ...] = (*DENSE, *SPARSE)


def family_of(model_type: object) -> Family | None:
    """The row of a `model_type`, or None when there is none."""
    if not isinstance(model_type, str):
        return None
    return next((row for row in FAMILIES if model_type in (row.model_type, *row.aliases)), None)


def family_of_architecture(architectures: object) -> Family | None:
    """The row that a config's `architectures` list names, or None: a hint for files without a `model_type`."""
    if not isinstance(architectures, list):
        return None
    return next((row for row in FAMILIES if set(row.architectures) & _words(architectures)), None)


def _words(values: list[object]) -> set[str]:
    return {value for value in values if isinstance(value, str)}
