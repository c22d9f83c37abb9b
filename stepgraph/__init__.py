"""stepgraph: one training step of a transformer on a GPU cluster, operator by operator.

    >>> import stepgraph
    >>> model = stepgraph.load_model("llama-3-8b")
    >>> layout = stepgraph.Layout(tp=2, micro_batch=1, seq=4096)
    >>> stepgraph.predict(model, layout, stepgraph.load_target("h100"))

Names are imported when they are first used: the command line must start quickly.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from stepgraph.errors import InputError, Problem
from stepgraph.version import VERSION as __version__

if TYPE_CHECKING:
    from stepgraph.hwtargets.reading import load_target, target_names
    from stepgraph.ir.program import Program
    from stepgraph.lowering.huggingface import load_model, model_names
    from stepgraph.lowering.layout import Layout
    from stepgraph.lowering.lowering import lower
    from stepgraph.prediction import predict
    from stepgraph.report import Prediction

_HOMES = MappingProxyType(
    {
        "load_target": "stepgraph.hwtargets.reading",
        "target_names": "stepgraph.hwtargets.reading",
        "Program": "stepgraph.ir.program",
        "load_model": "stepgraph.lowering.huggingface",
        "model_names": "stepgraph.lowering.huggingface",
        "Layout": "stepgraph.lowering.layout",
        "lower": "stepgraph.lowering.lowering",
        "Prediction": "stepgraph.report",
        "predict": "stepgraph.prediction",
    }
)

__all__ = [
    "InputError",
    "Layout",
    "Prediction",
    "Problem",
    "Program",
    "__version__",
    "load_model",
    "load_target",
    "lower",
    "model_names",
    "predict",
    "target_names",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'stepgraph' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
