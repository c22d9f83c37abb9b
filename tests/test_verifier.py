"""The verifier: what the lowering makes is sound, and each rule is broken once."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import attrs
import pytest

from goldens import Golden
from stepgraph.ir import verifier
from stepgraph.ir.graph import Graph, Group, Ports
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.program import Program, Run, SeamGroups
from stepgraph.ir.tensor import Axis, Placement, Tensor
from stepgraph.ir.verifier import MOST, VerifyError, verify, verify_program
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import lower

DP, TP = Axis("dp", 2, 4), Axis("tp", 4, 1)

MODELS = {
    "llama-3-8b": {"num_hidden_layers": 4},
    "qwen2.5-7b": {"num_hidden_layers": 4},
    # 24 heads and a padded vocabulary, so that the tensor axis divides them
    "gpt2-xl": {"n_layer": 4, "n_head": 24, "n_embd": 1536, "vocab_size": 50432},
}

LAYOUTS = {
    "one-rank": Layout(seq=64),
    "tp": Layout(seq=64, tp=4),
    "tp-dp-pp": Layout(seq=64, tp=2, dp=2, pp=2),
    "pp": Layout(seq=64, pp=4),
    "zero-0": Layout(seq=64, dp=2, zero=0),
    "selective": Layout(seq=64, tp=2, dp=2, recompute="selective"),
    "full": Layout(seq=64, tp=2, pp=2, recompute="full"),
    "full-no-sp": Layout(seq=64, tp=2, dp=2, sp=False, recompute="full"),
    "no-sp": Layout(seq=64, tp=2, sp=False),
    "no-regather": Layout(seq=64, tp=4, dp=2, tp_regather=False),
}


@cache
def lowered(model: str, layout: Layout) -> Program:
    """A small model of that family under a layout."""
    return lower(load_model(model, MODELS[model]), layout)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_what_the_lowering_makes_is_sound(model: str, layout: Layout) -> None:
    program = lowered(model, layout)
    verify_program(program)
    for graph in program.templates:
        verify(graph)
    for stage in range(layout.pp):
        verify(program.unroll(stage))


def template(name: str, model: str = "llama-3-8b", *, sp: bool = True) -> Graph:
    """A template on 8 ranks: 2 data ranks outside, 4 tensor ranks inside."""
    return lowered(model, Layout(seq=64, tp=4, dp=2, sp=sp))[name]


def edited(graph: Graph, op_name: str, /, **changes: Any) -> Graph:
    """The graph with one op changed."""
    assert op_name in graph.by_name
    return attrs.evolve(graph, ops=tuple(attrs.evolve(op, **changes) if op.name == op_name else op for op in graph.ops))


def retensored(graph: Graph, tensor_name: str, /, **changes: Any) -> Graph:
    """The graph with one tensor changed wherever it stands."""

    def new(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(attrs.evolve(t, **changes) if t.name == tensor_name else t for t in tensors)

    ops = tuple(attrs.evolve(op, inputs=new(op.inputs), outputs=new(op.outputs)) for op in graph.ops)
    return attrs.evolve(graph, ops=ops, outputs=new(graph.outputs))


def without(graph: Graph, name: str) -> Graph:
    """The graph without one op, and without what it made among the outputs."""
    made = graph[name].outputs
    outputs = tuple(t for t in graph.outputs if t not in made)
    return attrs.evolve(graph, ops=tuple(op for op in graph.ops if op.name != name), outputs=outputs)


def inserted(graph: Graph, before: str, op: Op) -> Graph:
    """The graph with one op more."""
    index = graph.ops.index(graph[before])
    return attrs.evolve(graph, ops=(*graph.ops[:index], op, *graph.ops[index:]))


def moved(graph: Graph, name: str, before: str) -> Graph:
    """The graph with one op somewhere else."""
    op = graph[name]
    rest = attrs.evolve(graph, ops=tuple(other for other in graph.ops if other != op))
    return inserted(rest, before, op)


def the(graph: Graph, name: str) -> Tensor:
    """The first result of an op."""
    return graph[name].outputs[0]


DENSE, PLAIN, HEAD, GPT = (
    template("dense"),
    template("dense", sp=False),
    template("head"),
    template("embedding", "gpt2-xl"),
)
PLAIN_GRAD = PLAIN["mlp.down.dw"].inputs[0]  # it enters, but in backward only
AT_WHOLE = (("dp", "b"), ("tp", "d"))

BROKEN: list[tuple[str, Graph]] = [
    ("op-name", edited(DENSE, "attn.rope_k", name="attn.rope_q")),
    ("tensor-twice", edited(DENSE, "mlp.norm.regather", outputs=DENSE["attn.norm.regather"].outputs)),
    ("tensor-differs", edited(DENSE, "mlp.down.dw", outputs=(attrs.evolve(the(DENSE, "mlp.down.dw"), dtype="bf16"),))),
    ("tensor-form", retensored(DENSE, "attn.norm.rstd", shape=(2,))),
    ("tensor-form", retensored(DENSE, "attn.norm.rstd", dtype="bf61")),
    ("tensor-form", retensored(DENSE, "attn.norm.rstd", place=(Placement(TP, 1), Placement(DP, 0)))),
    ("tensor-form", retensored(DENSE, "attn.norm.rstd", place=(Placement(DP, 7),))),
    ("divides", retensored(HEAD, "labels", shape=(3, 64))),
    ("axis-differs", edited(DENSE, "attn.out.reduce_scatter", group=(Axis("tp", 8, 1),))),
    ("unknown-kind", edited(DENSE, "mlp.norm", kind="rmsnrom")),
    ("phase-order", moved(HEAD, "head.loss.max", before="head.norm.dx")),
    ("phase-read", edited(DENSE, "mlp.act", inputs=(the(DENSE, "mlp.act.dx"),))),
    ("undefined", edited(PLAIN, "attn.residual", inputs=(PLAIN["attn.residual"].inputs[0], PLAIN_GRAD))),
    ("use-before-def", moved(DENSE, "attn.norm.all_gather", before="attn.norm")),
    ("undefined", without(PLAIN, "attn.out.all_reduce")),
    ("arity", edited(DENSE, "attn.sdpa", inputs=DENSE["attn.sdpa"].inputs * 2)),
    ("arity", edited(DENSE, "mlp.norm", inputs=DENSE["mlp.norm"].inputs[:1])),
    ("letters", retensored(DENSE, "attn.sdpa.lse", dims="bs", shape=(2, 64), place=())),
    ("sizes", retensored(HEAD, "labels", shape=(4, 64))),
    ("group", edited(DENSE, "mlp.act", group=(TP,))),
    ("group", edited(DENSE, "attn.out.reduce_scatter", group=())),
    ("at", edited(DENSE, "attn.residual", at=(("dp", "b"), ("ep", "s")))),
    ("at", edited(DENSE, "attn.residual", at=(("dp", "b"), ("tp", "h")))),
    ("at", edited(DENSE, "attn.out.reduce_scatter", at=(("tp", "s"),))),
    (
        "whole",
        edited(edited(edited(DENSE, "mlp.norm", at=AT_WHOLE), "mlp.norm.dx", at=AT_WHOLE), "mlp.norm.dw", at=AT_WHOLE),
    ),
    (
        "pending",
        edited(GPT, "embedding.positions", inputs=(the(GPT, "embedding.tokens"), GPT["embedding.positions"].inputs[1])),
    ),
    ("operand-place", retensored(HEAD, "labels", place=())),
    ("result-place", retensored(DENSE, "mlp.down.dw", place=())),
    ("conversion", edited(DENSE, "attn.out.reduce_scatter", kind="all_to_all")),
    ("conversion", retensored(HEAD, "head.loss.max", place=())),
    ("role", edited(DENSE, "attn.residual.grad", role="total")),
    ("role", edited(DENSE, "attn.residual", role="dx")),
    ("role", edited(DENSE, "attn.norm.regather", of="attn.norm")),
    ("role", edited(DENSE, "attn.residual.grad", kind="add")),
    ("role", edited(HEAD, "head.loss.max", of="head.logits")),
    ("of", edited(DENSE, "attn.residual.grad", of="nowhere")),
    ("of", edited(DENSE, "attn.residual.grad", of="mlp.norm.dx")),
    ("of", edited(HEAD, "head.loss.max", of="")),
    ("backward", without(DENSE, "attn.qkv.dw")),
    ("backward", edited(DENSE, "attn.rope_k.dx", of="attn.rope_q")),
    ("backward", attrs.evolve(PLAIN, ports=attrs.evolve(PLAIN.ports, leaves="attn.residual"))),
    (
        "gradient",
        retensored(DENSE, "mlp.down.dw", dims="df", shape=(4096, 14336), place=(Placement(DP, None), Placement(TP, 1))),
    ),
    # the weight gradient of the second norm's projection reads the first norm's activation
    (
        "gradient",
        edited(DENSE, "mlp.gate_up.dw", inputs=(the(DENSE, "mlp.act.dx"), the(DENSE, "attn.norm.all_gather"))),
    ),
    ("gradient", edited(HEAD, "head.logits.dx", inputs=(the(HEAD, "head.logits"), HEAD["head.logits"].inputs[1]))),
    ("ports", attrs.evolve(DENSE, ports=attrs.evolve(DENSE.ports, leaves="nowhere"))),
    ("ports", attrs.evolve(DENSE, ports=attrs.evolve(DENSE.ports, grad_leaves="attn.qkv.dx"))),
    ("outputs", attrs.evolve(DENSE, outputs=(*DENSE.outputs, Tensor("nowhere", "b", (2,))))),
    ("facts", attrs.evolve(DENSE, facts=DENSE.facts | {"fused"})),
    ("facts", attrs.evolve(DENSE, facts=frozenset({"placed"}))),
    ("facts", attrs.evolve(DENSE, facts=frozenset({"backward"}))),
]


def moved_parameter() -> Graph:
    """A tensor-parallel weight gathered in forward, as if it were no longer at home where it lives."""
    weight = DENSE["attn.qkv"].inputs[1]
    whole = attrs.evolve(weight, name="gathered", place=())
    op = Op("gathered", "all_gather", (weight,), (whole,), group=(TP,))
    return inserted(DENSE, "attn.split", op)


BROKEN.append(("param-moved", moved_parameter()))


def grouped(graph: Graph, *groups: tuple[str, ...], **fields: Any) -> Graph:
    """The graph with groups of those members, called k0, k1, ..."""
    made = (Group(f"k{i}", "rule", members) for i, members in enumerate(groups))
    return attrs.evolve(graph, groups=tuple(attrs.evolve(group, **fields) for group in made))


AGAIN = lowered("llama-3-8b", LAYOUTS["full"])["dense"]


def crossed() -> Graph:
    """a -> c, b -> d: the kernels (a d) and (b c) are convex, and each needs the other."""
    x, a, b, c, d = (Tensor(name, "b", (4,)) for name in "xabcd")
    reads = ((x, a), (x, b), (a, c), (b, d))
    ops = tuple(Op(made.name, "gelu", (read,), (made,)) for read, made in reads)
    alone = Graph("crossed", ops, (c, d), Ports(enters="x", leaves="d"))
    for group in (("a", "d"), ("b", "c")):
        verify(grouped(alone, group))
    return grouped(alone, ("a", "d"), ("b", "c"))


ADD_NORM = ("attn.residual", "mlp.norm")
BROKEN += [
    ("group-members", grouped(DENSE, ("attn.residual", "mlp.nrom"))),
    ("group-members", grouped(DENSE, ("mlp.norm", "attn.residual"))),
    ("group-members", grouped(DENSE, ("mlp.norm", "mlp.norm"))),
    ("group-members", grouped(DENSE, ())),
    ("group-members", grouped(DENSE, ADD_NORM, ("mlp.norm",))),
    ("group-members", grouped(DENSE, ADD_NORM, ("mlp.act",), name="k")),
    ("group-members", grouped(DENSE, ADD_NORM, name="")),
    ("group-launch", grouped(DENSE, ADD_NORM, kernels=0)),
    ("group-launch", grouped(DENSE, ADD_NORM, efficiency=0.0)),
    ("group-launch", grouped(DENSE, ADD_NORM, efficiency=1.5)),
    ("group-launch", grouped(DENSE, ADD_NORM, efficiency=float("nan"))),
    ("group-phase", grouped(DENSE, ("mlp.residual", "mlp.down.dx"))),
    ("group-phase", grouped(AGAIN, ("mlp.residual", "attn.norm.again"))),
    ("group-phase", grouped(AGAIN, ("mlp.down.dx", "attn.norm.again"))),
    ("group-collective", grouped(DENSE, ("attn.out", "attn.out.reduce_scatter"))),
    ("group-cycle", grouped(DENSE, ("attn.norm", "attn.qkv"))),
    ("group-cycle", crossed()),
]


def test_kernels_that_may_be_are_sound() -> None:
    verify(grouped(DENSE, ADD_NORM, ("mlp.act",), kernels=2, efficiency=0.5))
    verify(grouped(DENSE, ("attn.qkv", "attn.split", "attn.rope_q", "attn.rope_k")))  # a view inside
    verify(grouped(AGAIN, ("attn.residual.again", "mlp.norm.again")))


def test_kernels_that_wait_for_each_other_are_all_named() -> None:
    with pytest.raises(VerifyError, match=r"kernel k\d needs what kernel k\d makes; kernel k\d needs") as caught:
        verify(crossed())
    assert [line[4] for line in caught.value.problems[0].excerpt].count(">") == 1


@pytest.mark.parametrize(("code", "graph"), BROKEN, ids=[f"{i}-{code}" for i, (code, _) in enumerate(BROKEN)])
def test_each_broken_rule_is_named_and_no_other(code: str, graph: Graph) -> None:
    with pytest.raises(VerifyError) as caught:
        verify(graph)
    assert {problem.code for problem in caught.value.problems} == {code}


def piped() -> Program:
    """Two stages: embedding, two layers, send; recv, two layers, head."""
    return lowered("llama-3-8b", Layout(seq=64, tp=4, dp=2, pp=2))


def restaged(*runs: Run, step: str = "step.0") -> Program:
    """The two-stage program with another first stage."""
    program = piped()
    first = attrs.evolve(program.stages[0], runs=runs, step=step)
    return attrs.evolve(program, stages=(first, *program.stages[1:]))


def retemplated(graph: Graph) -> Program:
    """The two-stage program with one template replaced by its namesake."""
    program = piped()
    return attrs.evolve(program, templates=tuple(graph if g.name == graph.name else g for g in program.templates))


def other_stream(name: str) -> Graph:
    """The template of the same name without sequence parallelism: its stream is not split over tp."""
    return lowered("llama-3-8b", Layout(seq=64, tp=4, dp=2, pp=2, sp=False))[name]


def spanned(*groups: tuple[str, ...], count: int = 2, left: str = "dense", times: int = 1) -> Program:
    """The program with a first stage of `count` layers, and groups across the seam from `left` to the layer."""
    made = tuple(Group(f"k{i}", "rule", members) for i, members in enumerate(groups))
    program = restaged(Run("embedding"), Run("dense", count), Run("send"))
    return attrs.evolve(program, seam_groups=(SeamGroups(left, "dense", made),) * times)


SPAN = ("left.mlp.residual", "right.attn.norm")
# of a layer between two others both kernels want attn.norm.dw
WANTED_TWICE = (("right.attn.norm.dw", "left.mlp.down.dw"), ("right.mlp.norm.dw", "left.attn.norm.dw"))

BROKEN_PROGRAMS: list[tuple[str, Program]] = [
    ("stage", restaged(Run("embedding"), Run("dens", 2), Run("send"))),
    ("stage", restaged(Run("embedding"), Run("dense", 0), Run("send"))),
    ("stage", restaged(Run("embedding"), Run("dense", 2), Run("send"), step="dense")),
    ("stage", restaged(Run("embedding"), Run("step.0"), Run("dense", 2), Run("send"))),
    ("stage", attrs.evolve(piped(), templates=(*piped().templates, piped()["dense"]))),
    ("boundary", restaged(Run("dense", 2), Run("send"))),
    ("boundary", restaged(Run("recv"), Run("dense", 2), Run("send"))),
    ("boundary", restaged(Run("embedding"), Run("dense", 2), Run("head"))),
    ("boundary", restaged(Run("embedding"), Run("dense", 2))),
    ("seam", retemplated(other_stream("embedding"))),
    ("seam", retemplated(other_stream("recv"))),
    ("seam", restaged(Run("embedding"), Run("embedding"), Run("dense", 2), Run("send"))),
    ("backward", retemplated(without(piped()["dense"], "attn.qkv.dw"))),
    ("backward", retemplated(edited(piped()["recv"], "recv.x.send", role="dw"))),
    ("group-seam", spanned(SPAN, left="head")),
    ("group-seam", spanned(SPAN, left="dens")),
    ("group-seam", spanned(SPAN, times=2)),
    ("group-seam", spanned(("left.attn.residual", "left.mlp.norm"))),
    ("group-members", spanned(("left.mlp.residual", "right.nowhere"))),
    ("group-cycle", spanned(("left.mlp.residual", "right.attn.qkv"))),
    ("group-members", spanned(*WANTED_TWICE, count=3)),
]


def test_kernels_across_a_seam_that_may_be_are_sound() -> None:
    verify_program(spanned(SPAN, count=3))
    verify_program(spanned(*WANTED_TWICE, count=2))  # no layer is in the middle


@pytest.mark.parametrize(
    ("code", "program"), BROKEN_PROGRAMS, ids=[f"{i}-{code}" for i, (code, _) in enumerate(BROKEN_PROGRAMS)]
)
def test_each_broken_rule_of_a_program_is_named_and_no_other(code: str, program: Program) -> None:
    with pytest.raises(VerifyError) as caught:
        verify_program(program)
    assert {problem.code for problem in caught.value.problems} == {code}


def test_every_code_of_the_module_s_table_is_broken_here() -> None:
    rows = re.findall(r"^\| ([a-z, -]+) \|", verifier.__doc__ or "", re.MULTILINE)
    codes = {code for row in rows for code in row.split(", ")} - {"code"}
    assert codes == {code for code, _ in (*BROKEN, *BROKEN_PROGRAMS)}


def test_an_error_says_what_was_found_and_expected_and_shows_it_in_place(golden: Golden) -> None:
    # A replicated label meets a loss that is split over data; its backward op meets it too: 2 problems.
    with pytest.raises(VerifyError) as caught:
        verify(retensored(HEAD, "labels", place=()))
    assert [problem.op for problem in caught.value.problems] == ["head.loss", "head.loss.dx"]
    golden("verify-error.txt", f"VerifyError: {caught.value}\n")


def test_an_error_of_a_program_names_the_template() -> None:
    with pytest.raises(VerifyError, match=r"dense: backward attn\.qkv ") as caught:
        verify_program(retemplated(without(piped()["dense"], "attn.qkv.dw")))
    assert str(caught.value).startswith("program 'llama-3-8b' (1 problem)\n  dense: ")
    assert "is answered by linear_dx (dx), expected linear_dw (dw), linear_dx (dx)" in str(caught.value)


def test_the_first_op_has_no_neighbour_before_it() -> None:
    with pytest.raises(VerifyError, match=r"1 problem\)") as caught:
        verify(edited(DENSE, "attn.norm", kind="norm"))
    shown = caught.value.problems[0].excerpt
    assert [line[4] for line in shown] == [">", " "]


def test_at_most_twenty_problems_are_reported() -> None:
    unknown = attrs.evolve(DENSE, ops=tuple(attrs.evolve(op, kind="mystery") for op in DENSE.ops))
    assert len(DENSE.ops) > MOST == 20
    with pytest.raises(ValueError, match="20 problems") as caught:
        verify(unknown)
    assert isinstance(caught.value, VerifyError)
    assert len(caught.value.problems) == MOST


def test_a_recomputed_copy_of_a_loss_reduction_is_still_inside_its_op() -> None:
    original = HEAD["head.loss.max"]
    out = attrs.evolve(original.outputs[0], name="again")
    again = attrs.evolve(
        original, name="again", outputs=(out,), phase=Phase.BACKWARD, of=original.name, role="recompute"
    )
    verify(inserted(HEAD, "head.loss.dx", again))


def test_a_forward_graph_needs_no_backward() -> None:
    forward = attrs.evolve(
        DENSE,
        ops=DENSE.phase(Phase.FORWARD),
        outputs=DENSE.outputs[:1],
        ports=attrs.evolve(DENSE.ports, grad_enters="", grad_leaves=""),
        facts=frozenset({"placed"}),
    )
    verify(forward)
