"""Graphs for networkx: for people and their own graph algorithms. Nothing here is used by a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepgraph.ir.graph import Graph
from stepgraph.ir.rows import flops_of
from stepgraph.ir.table import row_of
from stepgraph.ir.tensor import describe

if TYPE_CHECKING:
    import networkx as nx


def to_networkx(graph: Graph) -> nx.MultiDiGraph[str]:
    """The graph as a networkx multigraph: data flows along the edges.

    Nodes: ops by name, and `%name` for each tensor that enters. Both carry kind, phase, module, role, of (texts; empty
    where there is none) and flops (of one rank). Edges: one per operand, from its producer to its reader, with the
    operand's index as key; tensor and dims are texts, nbytes is what one rank holds.
    Units: flops FLOP, nbytes bytes.

    Raises: UnknownKindError for an op of a kind without a row: its FLOPs are not zero, they are unknown.
    """
    import networkx as nx  # not needed to predict, and slow to import

    network: nx.MultiDiGraph[str] = nx.MultiDiGraph(name=graph.name)
    for tensor in graph.inputs:
        network.add_node(f"%{tensor.name}", kind=tensor.kind.value, phase="", module="", role="", of="", flops=0)
    for op in graph.ops:
        flops = flops_of(op, row_of(op.kind))
        fields = {"kind": op.kind, "module": op.module, "role": op.role, "of": op.of}
        network.add_node(op.name, phase=op.phase.value, flops=flops, **fields)
    _connect(graph, network)
    return network


def _connect(graph: Graph, network: nx.MultiDiGraph[str]) -> None:
    for op in graph.ops:
        for slot, tensor in enumerate(op.inputs):
            producer = graph.producer(tensor)
            source = producer.name if producer else f"%{tensor.name}"
            network.add_edge(source, op.name, key=slot, tensor=tensor.name, dims=describe(tensor), nbytes=tensor.nbytes)
