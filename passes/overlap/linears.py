"""linears: which collectives of tensor-parallel linears run beside which matmuls."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from stepgraph.ir.op import Op
from stepgraph.passes.overlap.plan import Partners
from stepgraph.passes.overlap.policies import Policy
from stepgraph.passes.overlap.work import Work

COVERED = ("qkv", "attn_out", "mlp_up", "mlp_down", "shared_up", "shared_down")
"""Families of linears that `tp-comm-overlap` covers: qkv, proj, fc1 and fc2; not the head, the router or experts.

Source: NVIDIA/TransformerEngine transformer_engine/pytorch/module/base.py (the table of methods); NVIDIA/Megatron-LM
megatron/core/extensions/transformer_engine.py (no overlap for experts).
"""

_WIDTH = "d"
"""The buffers of `tp-comm-overlap` hold tokens x hidden, so the latents of latent attention do not go through them."""


def is_expert(op: Op) -> bool:
    """Whether a matmul belongs to single experts: routed tokens and experts' parameters begin with E."""
    return any(t.dims.startswith("E") for t in (*op.inputs[:1], *op.outputs[:1]))


def linear_partners(work: Work, policy: Policy, *, apart: Collection[int] = (), delayed: bool = False) -> Partners:
    """Partners of the linears of some work.

    Column-parallel in backward: the input's all-gather beside dgrad, dgrad's reduce-scatter beside wgrad (Megatron-LM,
    always). With tp-comm-overlap also: all-gather in rings under the matmul that reads it, matmul in four parts over
    its reduce-scatter. apart: linears that handle their collectives themselves. delayed: weight gradients come later, so
    nothing runs beside a reduce-scatter of dgrad.
    """
    pairs = list(_backward_pairs(work, apart)) if policy.tp_backward else []
    again = {dx: gather for dx, dw in pairs for gather in _gathered_again(work, dw)}
    reduced = {dw: scatter for dx, dw in pairs for scatter in _reductions(work, dx) if not delayed}
    rings = dict(_rings(work, apart)) if policy.tp_comm else {}
    pipelines = dict(_pipelines(work, apart)) if policy.tp_comm else {}
    return Partners(again | reduced, rings, {i: scatter for i, scatter in pipelines.items() if i not in rings})


def _backward_pairs(work: Work, apart: Collection[int]) -> Iterator[tuple[int, int]]:
    """Both matmuls of every dense linear's backward: input gradient, weight gradient."""
    dgrads = {op.of: i for i, op in _matmuls(work, apart) if op.role == "dx"}
    for i, op in _matmuls(work, apart):
        if op.role == "dw" and op.of in dgrads:
            yield dgrads[op.of], i


def _matmuls(work: Work, apart: Collection[int]) -> Iterator[tuple[int, Op]]:
    for i in work.chosen:
        if work.is_gemm(i) and i not in apart and not is_expert(work.ops[i]):
            yield i, work.ops[i]


def _gathered_again(work: Work, dw: int) -> list[int]:
    """The all-gather that brings a weight gradient its input again, if nobody needs it earlier."""
    sources = (i for i in work.sources[dw] if work.ops[i].role == "regather" and work.stream(i) == "tp")
    return [i for i in sources if work.readers[i][0] == dw]


def _reductions(work: Work, dx: int) -> list[int]:
    """The collective that finishes an input gradient, if nothing else reads that gradient."""
    readers = work.readers[dx]
    alone = len(readers) == 1 and work.ops[readers[0]].kind in ("reduce_scatter", "all_reduce")
    return [readers[0]] if alone and work.stream(readers[0]) == "tp" else []


def _rings(work: Work, apart: Collection[int]) -> Iterator[tuple[int, int]]:
    """Matmuls with the all-gather that they are the first to read."""
    for i in work.chosen:
        op = work.ops[i]
        if op.kind != "all_gather" or op.role == "regather" or not _fits(work, i) or not work.readers[i]:
            continue
        reader = work.readers[i][0]
        if _is_covered(work, reader, apart) and work.ops[reader].role != "dw":
            yield reader, i


def _pipelines(work: Work, apart: Collection[int]) -> Iterator[tuple[int, int]]:
    """Forward (or recomputed) matmuls with the reduce-scatter that is the only one to read them."""
    for i in work.chosen:
        if work.ops[i].kind != "reduce_scatter" or not _fits(work, i) or not work.sources[i]:
            continue
        source = work.sources[i][0]
        if (
            _is_covered(work, source, apart)
            and work.ops[source].role in ("", "recompute")
            and work.readers[source] == (i,)
        ):
            yield source, i


def _fits(work: Work, position: int) -> bool:
    return work.stream(position) == "tp" and _WIDTH in work.ops[position].outputs[0].dims


def _is_covered(work: Work, position: int, apart: Collection[int]) -> bool:
    op = work.ops[position]
    return work.is_gemm(position) and position not in apart and op.attr("family") in COVERED
