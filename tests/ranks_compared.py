"""What a run on many ranks is held against: the same graph on one rank, and finite differences for that one."""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

import attrs
import numpy as np
import pytest

from meaning import MEANINGS
from meaning_experts import aux_term
from meaning_rank import Array, Meaning
from ranks import Ranks, is_inner, is_routed, run
from stepgraph.ir.gradients import param_gradients
from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Phase
from stepgraph.ir.tensor import Kind, Tensor
from stepgraph.lowering.backward import autograd
from stepgraph.lowering.blocks.ends import EMBEDDING_WEIGHT
from stepgraph.lowering.collectives import insert_collectives
from stepgraph.lowering.mesh import Mesh

VOCAB = 32


def placed_on(mesh: Mesh, logical: Graph) -> Graph:
    """Forward and backward of a logical graph on a mesh, whatever layouts offer."""
    return autograd(insert_collectives(logical, mesh), mesh, regather=mesh.sequence_parallel)


# what enters ---------------------------------------------------------------------------------------------------------


def entering(graph: Graph) -> dict[str, Array]:
    """Random global values of all that enters, the same under every layout."""
    return {tensor.name: drawn(tensor, graph) for tensor in graph.inputs}


def drawn(tensor: Tensor, graph: Graph, seed: str = "") -> Array:
    """Random, from the tensor's name: ids and labels below VOCAB, normal numbers, halved for parameters."""
    rng = np.random.default_rng(crc32((seed + _seed_name(tensor, graph)).encode()))
    if tensor.kind is Kind.INPUT:
        return rng.integers(0, VOCAB, tensor.shape)
    return rng.normal(size=tensor.shape) * (0.5 if tensor.kind is Kind.PARAM else 1.0)


def _seed_name(tensor: Tensor, graph: Graph) -> str:
    """A tied table has one value at both ends; what leaves, and so its gradient, may be named after a conversion."""
    if tensor.name == graph.ports.grad_enters:
        return "grad"
    return EMBEDDING_WEIGHT if tensor.name.endswith(EMBEDDING_WEIGHT) else tensor.name


def gradients_of(graph: Graph) -> dict[str, str]:
    """Name of the gradient of each parameter and of the entering stream, by the name of what it belongs to.

    Raises: AssertionError when a parameter has none.
    """
    grads = {param.name: grad.name for param, grad in param_gradients(graph)}
    assert grads.keys() == {param.name for param in graph.params}
    return grads | ({graph.ports.enters: graph.ports.grad_leaves} if graph.ports.enters else {})


# one rank ------------------------------------------------------------------------------------------------------------


def objective(graph: Graph, values: Mapping[str, Array]) -> float:
    """The sum of all token losses where there are some, else <what leaves, the gradient that enters for it>.

    The loss that hangs on to experts' scores is added.
    """
    ops = graph.phase(Phase.FORWARD)
    forward, ports = run(attrs.evolve(graph, ops=ops), values), graph.ports
    losses = sum(forward.value(op.outputs[0].name).sum() for op in ops if op.kind == "cross_entropy")
    losses += sum(aux_term(forward.value(op.inputs[0].name)) for op in ops if op.kind == "aux_loss")
    if ports.grad_enters:
        losses += np.sum(forward.value(ports.leaves) * values[ports.grad_enters])
    return float(losses)


def assert_finite_differences(graph: Graph) -> int:
    """<gradient, v> = (f(x + e v) - f(x - e v)) / 2e along random directions v, for every parameter and the stream."""
    values, step = entering(graph), 1e-5
    computed = run(graph, values)
    tensors = {tensor.name: tensor for tensor in graph.inputs}
    for name, grad in gradients_of(graph).items():
        for seed in ("first", "second"):
            direction = drawn(tensors[name], graph, seed)
            ahead, behind = (objective(graph, {**values, name: values[name] + e * direction}) for e in (step, -step))
            expected = (ahead - behind) / (2 * step)
            assert np.sum(computed.value(grad) * direction) == pytest.approx(expected, rel=1e-6, abs=1e-6), name
    return len(gradients_of(graph))


# many ranks ----------------------------------------------------------------------------------------------------------


def assert_same(placed: Graph, single: Graph, meanings: Mapping[str, Meaning] = MEANINGS) -> int:
    """Every tensor of the one-rank run, every gradient and every recomputed copy; returns how many gradients."""
    mine, reference = run(placed, entering(placed), meanings), run(single, entering(single), meanings)
    assert {t.name for op in single.ops if not is_inner(op, single) for t in op.outputs} <= mine.tensors.keys()
    pairs = {name: name.removesuffix(".again") for name in mine.tensors}
    assert_pairs(mine, reference, {name: base for name, base in pairs.items() if base in reference.tensors})
    grads, expected = gradients_of(placed), gradients_of(single)
    assert grads.keys() == expected.keys()
    assert_pairs(mine, reference, {grads[name]: expected[name] for name in grads})
    if placed.ports.leaves:
        assert_pairs(mine, reference, {placed.ports.leaves: single.ports.leaves})
    return len(grads)


def assert_pairs(mine: Ranks, reference: Ranks, pairs: Mapping[str, str]) -> None:
    """The global values are equal; routed tokens may come in another order."""
    for name, base in pairs.items():
        value, expected = mine.value(name), reference.value(base)
        if is_routed(mine.tensors[name]):
            value, expected = _ordered(value), _ordered(expected)
        np.testing.assert_allclose(value, expected, 1e-9, 1e-9, err_msg=f"{name} {mine.tensors[name]}")


def _ordered(value: Array) -> Array:
    """Every coordinate of every expert, [E b s ...], sorted over the tokens."""
    return np.sort(value.reshape(value.shape[0], value.shape[1] * value.shape[2], -1), axis=1)
