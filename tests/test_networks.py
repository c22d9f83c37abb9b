"""Graphs as networkx graphs."""

from __future__ import annotations

import subprocess
import sys

import networkx as nx
import pytest
from hypothesis import given

from samples import small
from stepgraph.ir.graph import Graph
from stepgraph.ir.networks import to_networkx
from stepgraph.ir.op import Op
from stepgraph.ir.table import UnknownKindError
from stepgraph.ir.tensor import Tensor
from strategies import graphs


def test_ops_and_entering_tensors_are_nodes() -> None:
    network = to_networkx(small())
    entering = ["%x", "%norm.weight", "%qkv.weight", "%qkv.dy"]
    assert list(network) == entering + [op.name for op in small().ops]
    assert network.nodes["%qkv.weight"]["kind"] == "param"
    # 2 x b s d h on one rank: b 2 / dp 2, s 8, d 16, h 32 / tp 4
    assert network.nodes["qkv"]["flops"] == 2 * (2 // 2) * 8 * 16 * (32 // 4)
    assert network.nodes["qkv.dx"] == {
        "kind": "linear_dx",
        "phase": "backward",
        "module": "",
        "role": "dx",
        "of": "qkv",
        "flops": 2 * (2 // 2) * 8 * 16 * (32 // 4),
    }


def test_an_edge_is_an_operand() -> None:
    network = to_networkx(small())
    # bf16, b 2 / dp 2, s 8 / tp 4, d 16
    nbytes = 2 * (2 // 2) * (8 // 4) * 16
    edge = {"tensor": "norm", "dims": "[b/dp s/tp d]", "nbytes": nbytes}
    assert network.get_edge_data("norm", "norm.all_gather") == {0: edge}
    assert network.get_edge_data("norm.regather", "qkv.dw", 1)["tensor"] == "norm.regather"
    assert network.number_of_edges() == 2 + 1 + 2 + 1 + 2 + 2 + 1


def test_a_tensor_read_twice_by_one_op_is_two_edges() -> None:
    x, y = Tensor("x", "b", (4,)), Tensor("y", "b", (4,))
    network = to_networkx(Graph("twice", (Op("y", "add", (x, x), (y,)),)))
    assert list(network.get_edge_data("%x", "y")) == [0, 1]


def test_an_unknown_kind_has_no_flops_to_show() -> None:
    with pytest.raises(UnknownKindError, match="did you mean 'linear'"):
        to_networkx(Graph("g", (Op("y", "linaer", (), ()),)))


@given(graphs(4))
def test_program_order_is_a_topological_order(graph: Graph) -> None:
    network = to_networkx(graph)
    position = {name: i for i, name in enumerate(network)}
    assert nx.is_directed_acyclic_graph(network)
    assert all(position[source] < position[reader] for source, reader in network.edges())
    assert network.number_of_edges() == sum(len(op.inputs) for op in graph.ops)


def test_networkx_is_loaded_when_it_is_asked_for() -> None:
    code = "import sys, stepgraph.ir.networks; sys.exit('networkx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
