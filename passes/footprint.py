"""The part of memory that needs no model of activations: parameters, gradients and optimizer state of one rank."""

from __future__ import annotations

from stepgraph.ir.graph import Graph
from stepgraph.ir.tensor import DTYPE_BYTES, Kind


def static_bytes(step: Graph, dtype: str) -> int:
    """Bytes that a rank holds all through the step: a lower bound of its memory.

    Formula: parameters n x bytes of the type + fp32 gradients 4 n + what AdamW keeps on this rank (two moments, and
    master weights where the parameters are narrower), n / ranks of it under ZeRO-1. Activations, workspace and
    fragmentation come on top. Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1.
    """
    grads = [t for t in step.inputs if t.kind is Kind.GRAD and t.name.endswith(".grads")]
    held = {t.name: t for t in step.inputs if t.kind is Kind.STATE}
    if dtype == "fp32":  # the master weights are the parameters
        held = {name: t for name, t in held.items() if not name.endswith(".master")}
    buffers = [t for t in grads if "replicated" not in t.name and "tied" not in t.name]
    parameters = sum(t.elements for t in buffers) * DTYPE_BYTES[dtype]
    return parameters + sum(t.nbytes for t in buffers) + sum(t.nbytes for t in held.values())
