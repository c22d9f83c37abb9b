"""autograd: every forward op is answered by the backward ops of its row, at the same letters.

Conversions are aliases here: they get no backward op of their own. At the producer of a tensor its gradients are
grouped by placement, each group is summed, moved to what the producer needs, and the groups are added. That gives one
reduce-scatter for q, k and v together, and pairs a backward collective with an edge, not with a forward collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from stepgraph.ir.graph import Graph, Ports
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.rows import Grad, spec_of
from stepgraph.ir.table import CONVERSIONS, row_of
from stepgraph.ir.tensor import DTYPE_BYTES, Kind, Place, Tensor
from stepgraph.lowering.conversions import Writer
from stepgraph.lowering.mesh import Mesh
from stepgraph.lowering.placement import dual_place, result_place

GATHERED_AGAIN = ("linear_dw",)
"""Backward kinds that gather a sequence-split activation again instead of keeping the gathered copy.

Source: NVIDIA/Megatron-LM megatron/core/tensor_parallel/layers.py (LinearWithGradAccumulationAndAsyncCommunication).
"""

PARAM_GRAD_DTYPE = "fp32"
"""Weight gradients are accumulated into an fp32 buffer over the micro-batches (Megatron-LM's main_grad)."""


def autograd(graph: Graph, mesh: Mesh, *, regather: bool) -> Graph:
    """Append the backward pass of a placed forward graph.

    regather: gather activations again in backward (Megatron with sequence parallelism) or keep the gathered copy
    (DTensor). The gradient of the leaving stream enters as `<leaves>.grad`, placed as the stream's dual; the graph
    then yields the entering stream's gradient and one gradient per parameter.
    """
    return _Autograd(graph, mesh, regather).run()


class _Autograd:
    """One walk over one graph, backwards; holds the gradients that wait for their producer."""

    def __init__(self, graph: Graph, mesh: Mesh, regather: bool) -> None:
        self.graph = graph
        self.mesh = mesh
        self.regather = regather
        self.writer = Writer(mesh, graph.ops)
        self.waiting: dict[str, list[Tensor]] = {}
        self.param_grads: dict[str, list[Tensor]] = {}
        self.sources = {op.outputs[0].name: op for op in graph.ops if op.kind in CONVERSIONS and op.role != "inner"}
        self.again: dict[str, Tensor] = {}

    def run(self) -> Graph:
        ports = self._seed()
        for op in reversed(self.graph.ops):
            if op.kind not in CONVERSIONS:
                self._answer(op)
        entering = next((t for t in self.graph.inputs if t.name == ports.enters), None)
        stream = self._settle(entering, entering.place) if entering else None
        grads = [self._sum(gs, name, _like("", "")) for name, gs in self.param_grads.items()]
        outputs = (*self.graph.outputs, *((stream,) if stream else ()), *grads)
        ports = attrs.evolve(ports, grad_leaves=stream.name if stream else "")
        facts = self.graph.facts | {"backward"}
        return Graph(self.graph.name, tuple(self.writer.ops), outputs, ports, facts)

    def _seed(self) -> Ports:
        """The gradient of the leaving stream, waiting at its producer."""
        ports = self.graph.ports
        if not ports.leaves or row_of(self.graph.producers[ports.leaves].kind).inner:
            return ports
        leaving = next(t for t in self.graph.outputs if t.name == ports.leaves)
        grad = attrs.evolve(leaving, name=f"{leaving.name}.grad", kind=Kind.GRAD, place=dual_place(leaving.place))
        self.writer.fresh(grad.name)
        self._give(leaving, grad)
        return attrs.evolve(ports, grad_enters=grad.name)

    def _root(self, tensor: Tensor) -> Tensor:
        """The tensor before any conversion of its placement."""
        while tensor.name in self.sources:
            tensor = self.sources[tensor.name].inputs[0]
        return tensor

    def _give(self, tensor: Tensor, grad: Tensor) -> None:
        root = self._root(tensor)
        waiting = self.param_grads if root.kind is Kind.PARAM else self.waiting
        waiting.setdefault(root.name, []).append(grad)

    def _answer(self, op: Op) -> None:
        row = row_of(op.kind)
        if not row.needs_gradient:
            return
        grads = {f"dy{i}": g for i, t in enumerate(op.outputs) if (g := self._settle(t, dual_place(t.place)))}
        if not grads and not row.inner:
            return
        for operand in row.passes:
            self._give(op.inputs[operand], grads["dy0"])
        for grad in row.grads:
            self._emit(op, grad, grads)

    def _settle(self, tensor: Tensor, place: Place) -> Tensor | None:
        """Everything that arrived for a tensor, summed and placed as its producer needs it."""
        waiting = self.waiting.get(tensor.name)
        if not waiting:
            return None
        groups: dict[Place, list[Tensor]] = {}
        for grad in waiting:
            groups.setdefault(grad.place, []).append(grad)
        like = self._like(tensor)
        part = f"{tensor.name}.part" if len(groups) > 1 else tensor.name  # the total has the same name in any layout
        moved = [
            self.writer.convert(self._sum(group, part, like), place, attrs.evolve(like, role="dx"))
            for group in groups.values()
        ]
        return self._sum(moved, tensor.name, like)

    def _like(self, tensor: Tensor) -> Op:
        """What the collectives and sums for a tensor's gradient inherit: they belong to its producer."""
        producer = self.graph.producer(tensor)
        return _like(producer.name, producer.module) if producer else _like("", "")

    def _sum(self, grads: Sequence[Tensor], name: str, like: Op) -> Tensor:
        """One gradient as it is; several through a grad_add, which moves bytes."""
        if len(grads) == 1:
            return grads[0]
        fresh = self.writer.fresh(f"{name}.grad")
        out = attrs.evolve(grads[0], name=fresh)
        at = tuple((p.axis.name, "+" if p.dim is None else out.dims[p.dim]) for p in out.place)
        op = attrs.evolve(like, name=fresh, kind="grad_add", inputs=tuple(grads), outputs=(out,), at=at, role="sum")
        self.writer.emit(op)
        return out

    def _emit(self, op: Op, grad: Grad, grads: dict[str, Tensor]) -> None:
        reads = tuple(self._read(ref, op, grad, grads) for ref in grad.reads)
        name = self.writer.fresh(f"{op.name}.{grad.role}")
        kept = tuple(pair for pair in op.attrs if pair[0] != "metadata")  # what travels beside forward only
        draft = attrs.evolve(
            op,
            attrs=kept,
            name=name,
            kind=grad.kind,
            inputs=reads,
            outputs=(),
            phase=Phase.BACKWARD,
            of=op.name,
            role=grad.role,
        )
        outputs = self._grad_outputs(draft, op, grad)
        made = self.writer.emit(attrs.evolve(draft, outputs=outputs, origin="autograd"))
        self.writer.emit_inner(made, row_of(grad.kind), _like(op.name, op.module))
        for operand, out in zip(grad.of, outputs, strict=True):
            self._give(op.inputs[operand], out)

    def _read(self, ref: str, op: Op, grad: Grad, grads: dict[str, Tensor]) -> Tensor:
        if ref.startswith("dy"):
            return grads[ref]
        index = int(ref[1:])
        if ref[0] == "y":
            return op.outputs[index]
        operand = op.inputs[index]
        return self._gathered_again(operand) if self.regather and grad.kind in GATHERED_AGAIN else operand

    def _gathered_again(self, tensor: Tensor) -> Tensor:
        source = self.sources.get(tensor.name)
        if source is None or source.kind != "all_gather":
            return tensor
        if tensor.name not in self.again:
            self.again[tensor.name] = self._regather(source, tensor)
        return self.again[tensor.name]

    def _regather(self, source: Op, tensor: Tensor) -> Tensor:
        name = self.writer.fresh(f"{source.inputs[0].name}.regather")
        again = attrs.evolve(source, name=name, outputs=(attrs.evolve(tensor, name=name),), phase=Phase.BACKWARD)
        return self.writer.emit(attrs.evolve(again, of=source.name, role="regather", origin="autograd")).outputs[0]

    def _grad_outputs(self, draft: Op, op: Op, grad: Grad) -> tuple[Tensor, ...]:
        """The gradients of some operands: their letters and sizes, placed by the backward op's own loop nest."""
        at = dict(op.at)
        letters = _result_letters(draft, op, grad)
        outs = []
        for index, (operand, dims) in enumerate(zip(grad.of, letters, strict=True)):
            source = op.inputs[operand]
            param = source.kind is Kind.PARAM
            dtype = PARAM_GRAD_DTYPE if param and DTYPE_BYTES[source.dtype] < 4 else source.dtype
            place = result_place(dims, at, self.mesh.splitting, row_of(grad.kind).inner)
            name = draft.name if index == 0 else f"{draft.name}.{index}"
            outs.append(Tensor(name, source.dims, source.shape, dtype, Kind.GRAD, place, source.fraction))
        return tuple(outs)


def _result_letters(draft: Op, op: Op, grad: Grad) -> tuple[str, ...]:
    """The letters of each gradient in the backward op's loop nest."""
    row = row_of(grad.kind)
    if row.spec:
        return spec_of(draft, row)[1]
    return tuple(op.inputs[operand].dims for operand in grad.of)


def _like(of: str, module: str) -> Op:
    return Op("", "", (), (), phase=Phase.BACKWARD, of=of, module=module, origin="autograd")
