"""Rewrites: when they act, what they leave, what they refuse; and what eager PyTorch moves according to them."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from stepgraph.errors import InputError
from stepgraph.hwtargets.reading import load_target
from stepgraph.ir.gradients import param_gradients
from stepgraph.ir.graph import Graph, Group
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.rewriting import Parts, Rewrite, expand, replace_ops
from stepgraph.ir.rows import Rule, flops_of
from stepgraph.ir.table import row_of
from stepgraph.ir.tensor import Tensor
from stepgraph.ir.verifier import verify_program
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import lower
from stepgraph.passes.base import setting
from stepgraph.passes.footprint import static_bytes
from stepgraph.passes.gemm import gemm_shape
from stepgraph.passes.iteration import iterate
from stepgraph.passes.profiles import PROFILES, kernels_of, operand_bytes
from stepgraph.passes.rewriting.attention import flash_attention
from stepgraph.passes.rewriting.decomposing import DECOMPOSABLE, decompose

EAGER_LAYER = ("rmsnorm", "rope", "swiglu", "qkv", "gate_up")
LLAMA = load_model("llama-3-8b", {"num_hidden_layers": 2})
SEQ = 4096
UNIT = SEQ * 4096 * 2
"""m d x 2 bytes."""

# what eager PyTorch moves ----------------------------------------------------------------------------------------------


def eager(graph: str = "dense", *kinds: str, layout: Layout = Layout(seq=SEQ)) -> Graph:  # noqa: B008
    return lower(LLAMA, layout, (decompose(*(kinds or EAGER_LAYER)),))[graph]


def units(graph: Graph, phase: Phase, belongs: Callable[[Op], bool] = lambda op: True) -> float:
    """HBM bytes of the ops that are under the HBM rule, in m d x 2 bytes, exact profile."""
    chosen = [op for op in graph.phase(phase) if row_of(op.kind).rule is Rule.HBM and belongs(op)]
    return sum(operand_bytes(op, PROFILES["exact"][op.kind]) for op in chosen) / UNIT


def kernels(graph: Graph, phase: Phase) -> int:
    return sum(kernels_of(op, PROFILES["exact"][op.kind]) for op in graph.phase(phase))


def test_hbm_traffic_of_an_eager_llama_layer() -> None:
    """Counted under a torch dispatch mode: 72.1 forward, 158.6 backward."""
    layer = eager()
    assert units(layer, Phase.FORWARD) == pytest.approx(72.1, rel=0.05)
    assert units(layer, Phase.BACKWARD) == pytest.approx(158.6, rel=0.15)
    # forward: 2 norms of 18, RoPE 10 x (1 + 1/4), 2 residuals of 3, SwiGLU 5 x 3.5
    assert units(layer, Phase.FORWARD) == pytest.approx(2 * 18 + 10 * 1.25 + 2 * 3 + 5 * 3.5, rel=1e-3)
    # backward: 2 norms of 46, RoPE (14 + 2) x 1.25, SwiGLU 9 x 3.5, 2 residual sums, sums of q k v (4) and gate up (3)
    assert units(layer, Phase.BACKWARD) == pytest.approx(2 * 46 + 16 * 1.25 + 9 * 3.5 + 2 * 3 + 4 + 3, rel=1e-3)


@pytest.mark.parametrize(
    ("start", "forward", "backward"),
    [
        ("attn.norm", 10 + 8, 27 + 19 + 4),  # 4: the sum of the gradients of q, k and v belongs to the norm's result
        ("mlp.norm", 10 + 8, 27 + 19 + 3),  # 3: of gate and up
        ("attn.rope_q", 10, 14 + 2),  # 2: the transposed gradient is copied
        ("attn.rope_k", 10 / 4, (14 + 2) / 4),
        ("mlp.act", 5 * 3.5, 9 * 3.5),
    ],
)
def test_each_part_moves_what_was_counted(start: str, forward: float, backward: float) -> None:
    layer = eager()

    def part(op: Op) -> bool:
        return (op.of or op.name).startswith(start)

    assert units(layer, Phase.FORWARD, part) == pytest.approx(forward, rel=1e-3)
    assert units(layer, Phase.BACKWARD, part) == pytest.approx(backward, rel=1e-3)


def test_a_packed_projection_costs_a_concatenation_in_backward() -> None:
    packed, apart = (eager("dense", "swiglu", *also) for also in ((), ("gate_up",)))
    join = packed["mlp.act.split.dx"]
    assert operand_bytes(join, PROFILES["exact"][join.kind]) / UNIT == 4 * 3.5  # R both gradients, W both
    assert units(packed, Phase.BACKWARD) - units(apart, Phase.BACKWARD) == pytest.approx(4 * 3.5 - 3)


def test_kernels_of_an_eager_llama_layer() -> None:
    """Counted under a torch dispatch mode with attention as one op each way: 38 forward, 71 backward."""
    layer = eager()
    # 2 norms of 8, 2 RoPEs of 5, 7 linears, attention, 2 residuals, SwiGLU 2
    assert kernels(layer, Phase.FORWARD) == 2 * 8 + 2 * 5 + 7 + 1 + 2 + 2 == 38
    # 2 norms of 16, 2 RoPEs of 7 and a copy, 14 GEMMs, attention 3, 2 residual sums, SwiGLU 3, sums of q k v and of
    # gate up 1 each: PyTorch adds q, k and v in two kernels, and the count took attention for one
    assert kernels(layer, Phase.BACKWARD) == 2 * 16 + 2 * (7 + 1) + 14 + 3 + 2 + 3 + 2 == 71 + 2 - 1


def test_the_loss_in_eager_pytorch() -> None:
    head = eager("head", "cross_entropy")
    logits = SEQ * 128256 * 2

    def passes(phase: Phase) -> float:
        return units(head, phase, lambda op: (op.of or op.name).startswith("head.loss")) * UNIT / logits

    assert passes(Phase.FORWARD) == pytest.approx(3 + 4, rel=1e-3)  # cast R1 W2; log-softmax R2 W2
    assert passes(Phase.BACKWARD) == pytest.approx(2 + 6 + 3, rel=1e-3)  # zeros W2; R4 W2; cast R2 W1
    assert sum(op.kind in ("cast", "log_softmax", "nll") for op in head.ops) == 3


@pytest.mark.parametrize(("dtype", "per_parameter"), [("float32", 80), ("bfloat16", 80 + 6)])
def test_bytes_of_a_parameter_in_foreach_adamw(dtype: str, per_parameter: int) -> None:
    model = load_model("llama-3-8b", {"num_hidden_layers": 1, "torch_dtype": dtype})
    step = lower(model, Layout(seq=64, dp=2), (decompose("adamw"),))["step"]
    plain = lower(model, Layout(seq=64, dp=2))["step"]
    moved = sum(operand_bytes(op, PROFILES["exact"][op.kind]) for op in step.ops if op.origin == "decompose")
    assert moved == per_parameter * next(op for op in step.ops if op.origin == "decompose").inputs[0].elements
    short = model.dtype
    assert static_bytes(step, short) == static_bytes(plain, short)


# what stays ----------------------------------------------------------------------------------------------------------


def matmul_flops(graph: Graph) -> int:
    return sum(flops_of(op, row_of(op.kind)) for op in graph.ops if row_of(op.kind).rule is not Rule.ATTENTION)


@pytest.mark.parametrize("layout", [Layout(seq=64), Layout(seq=64, tp=2, dp=2)])
def test_flops_and_parameters_of_matmuls_stay(layout: Layout) -> None:
    plain = lower(LLAMA, layout)["dense"]
    split = lower(LLAMA, layout, (decompose(*EAGER_LAYER),))["dense"]
    assert matmul_flops(split) == matmul_flops(plain)
    params = [sum(param.elements for param, _ in param_gradients(graph)) for graph in (plain, split)]
    assert params[0] == params[1]
    assert {op.attr("family") for op in split.ops if "linear" in op.kind} == {"qkv", "attn_out", "mlp_up", "mlp_down"}


def test_eager_attention_computes_all_pairs() -> None:
    def forward(graph: Graph) -> int:
        ops = (op for op in graph.phase(Phase.FORWARD) if op.attr("family") == "sdpa")
        return sum(flops_of(op, row_of(op.kind)) for op in ops)

    flash, masked = lower(LLAMA, Layout(seq=SEQ))["dense"], eager("dense", "sdpa")
    assert forward(masked) == 4 * SEQ * SEQ * 4096 == 2 * forward(flash)  # a causal flash kernel leaves half out
    backward = sum(flops_of(op, row_of(op.kind)) for op in masked.backward_of("attn.sdpa.scores"))
    assert backward == 2 * (2 * SEQ * SEQ * 4096)
    scores = masked["attn.sdpa.scores"]
    assert gemm_shape(scores, row_of(scores.kind)) == (32 * SEQ, SEQ, 128)


def test_the_product_of_gate_and_up_is_visible() -> None:
    product = eager()["mlp.act"]
    gate = eager().producer(product.inputs[0])
    assert product.kind == "mul" and gate is not None and gate.kind == "silu"
    assert [t.name for t in product.outputs] == ["mlp.act"]  # the name that the down projection reads


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama-3-8b", DECOMPOSABLE),
        ("qwen2.5-7b", DECOMPOSABLE),
        ("gemma-2-9b", ("rmsnorm", "rope", "geglu", "sdpa", "gate_up", "qkv", "cross_entropy")),
        ("mixtral-8x7b", DECOMPOSABLE),
        ("qwen3-30b-a3b", DECOMPOSABLE),
        ("deepseek-v3", tuple(kind for kind in DECOMPOSABLE if kind != "rope")),
    ],
)
@pytest.mark.parametrize(
    "layout", [Layout(seq=64), Layout(seq=64, tp=2, dp=2), Layout(seq=64, tp=2, pp=2, recompute="full")]
)
def test_decomposed_programs_are_sound(name: str, kinds: tuple[str, ...], layout: Layout) -> None:
    model = load_model(name, {"num_hidden_layers": 4})
    program = lower(model, layout, (decompose(*kinds),))
    verify_program(program)
    verify_program(lower(model, layout, (decompose(*kinds), flash_attention())))
    assert all(op.kind not in kinds for graph in program.templates for op in graph.ops)
    for eta in ("constant", "shape"):
        assert iterate(program, setting(load_target("h100"), "exact", eta)).step_s > 0


def test_flash_attention_undoes_decompose() -> None:
    plain = lower(LLAMA, Layout(seq=64, tp=2))["dense"]
    back = lower(LLAMA, Layout(seq=64, tp=2), (decompose("sdpa"), flash_attention()))["dense"]
    unnamed = [
        attrs.evolve(graph, ops=tuple(attrs.evolve(op, origin="") for op in graph.ops)) for graph in (plain, back)
    ]
    assert unnamed[0] == unnamed[1]


# when rewrites act ---------------------------------------------------------------------------------------------------


def seen_by(at: str, layout: Layout) -> dict[str, Graph]:
    """What a rewrite at that time gets to see."""
    seen: dict[str, Graph] = {}

    def look(graph: Graph) -> Graph:
        seen[graph.name] = graph
        return graph

    assert lower(LLAMA, layout, (Rewrite("look", at, look),)) == lower(LLAMA, layout)
    return seen


def test_rewrites_act_before_or_after_collectives_and_before_autograd() -> None:
    layout = Layout(seq=64, tp=2)
    logical, placed = seen_by("logical", layout), seen_by("placed", layout)
    assert list(logical) == list(placed) == ["embedding", "dense", "head", "step"]
    assert not logical["dense"].axes and "placed" not in logical["dense"].facts
    assert any(op.kind == "reduce_scatter" for op in placed["dense"].ops)
    assert not placed["dense"].phase(Phase.BACKWARD)


def test_a_placed_rewrite_keeps_splits_and_gets_its_backward() -> None:
    def how(op: Op, parts: Parts) -> None:
        wide = parts.emit("cast", parts.like(op.inputs[0], "wide", dtype="fp32"), op.inputs[0])
        parts.many("rmsnorm", op.outputs, wide, *op.inputs[1:])

    rewrite = Rewrite("widen", "placed", lambda graph: expand(graph, "widen", {"rmsnorm": how}))
    program = lower(LLAMA, Layout(seq=64, tp=2), (rewrite,))
    verify_program(program)
    wide = program["dense"]["attn.norm.wide"]
    assert (wide.at, wide.module, wide.origin) == ((("tp", "s"),), "attn", "widen")
    assert str(wide.outputs[0]) == "[b s/tp d]"
    assert [op.kind for op in program["dense"].backward_of("attn.norm.wide")] == ["cast_dx"]


def test_nothing_changed_is_the_same_object() -> None:
    graph = Graph("g", (Op("x", "add", (Tensor("a", "b", (2,)),) * 2, (Tensor("x", "b", (2,)),)),))
    assert replace_ops(graph, {}) is graph
    assert decompose(*DECOMPOSABLE).apply(graph) is graph
    assert flash_attention().apply(graph) is graph


def test_ops_that_are_not_there_or_are_fused_are_not_replaced() -> None:
    graph = Graph("g", (Op("x", "add", (), ()),), groups=(Group("f", "rule", ("x",)),))
    with pytest.raises(ValueError, match=r"\['y'\] are no ops of it, \['x'\] are in fused kernels"):
        replace_ops(graph, {"x": (), "y": ()})


# refusals ------------------------------------------------------------------------------------------------------------


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(InputError) as refused:
        make()
    return str(refused.value)


def test_what_cannot_be_decomposed_is_refused_with_a_suggestion() -> None:
    assert "'rmsnrm' has no decomposition" in refusal(lambda: decompose("rmsnrm"))
    assert "Did you mean 'rmsnorm'? [decompose]" in refusal(lambda: decompose("rmsnrm"))
    assert refusal(lambda: decompose("layernorm", "topk", "rope")).count("[decompose]") == 2
    assert "no kinds" in refusal(lambda: decompose())
    assert "while the activation reads it packed" in refusal(lambda: decompose("gate_up", "qkv"))


def test_partial_rotation_is_refused() -> None:
    model = load_model("deepseek-v3", {"num_hidden_layers": 4})
    text = refusal(lambda: lower(model, Layout(seq=64), (decompose("rope"),)))
    assert "attn.rope_q rotates 64 of a head of 192" in text and "[decompose]" in text


def test_a_rewrite_at_an_unknown_time_is_refused() -> None:
    assert "[rewrite-at]" in refusal(lambda: Rewrite("r", "later", lambda graph: graph))


@pytest.mark.parametrize("at", ["logical", "placed"])
def test_a_rewrite_that_breaks_a_graph_is_named(at: str) -> None:
    def drop(graph: Graph) -> Graph:
        return replace_ops(graph, {"attn.norm": ()} if "attn.norm" in graph.by_name else {})

    text = refusal(lambda: lower(LLAMA, Layout(seq=64, tp=2), (Rewrite("drop", at, drop),)))
    assert f"rewrite 'drop' at {at}" in text and "which no op makes" in text
