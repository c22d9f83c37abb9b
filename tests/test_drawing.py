"""The DOT text: what it shows, in which order, and that no name can break it."""

from __future__ import annotations

import re
from itertools import pairwise

import attrs
import pytest

from goldens import Golden
from samples import small
from stepgraph.errors import InputError
from stepgraph.ir.dotlabels import RULE_FILLS, byte_text
from stepgraph.ir.drawing import OpNote, to_dot
from stepgraph.ir.graph import Graph, Group, Ports
from stepgraph.ir.ladder import Part, Way, edges_of, op_id, rungs_of
from stepgraph.ir.op import Op, Phase
from stepgraph.ir.rows import Rule
from stepgraph.ir.rungs import Order
from stepgraph.ir.tensor import Kind, Tensor
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import lower

HOSTILE = '<b>&"\\N:\x00\n]'


def dense(**layout: int | str) -> Graph:
    return lower(load_model("llama-3-8b"), Layout(**layout))["dense"]  # type: ignore[arg-type]


def renamed(graph: Graph, old: str, new: str) -> Graph:
    """The graph with one op and the tensor of the same name called something else."""

    def tensors(found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(attrs.evolve(t, name=new) if t.name == old else t for t in found)

    def op(o: Op) -> Op:
        name, of = (new if text == old else text for text in (o.name, o.of))
        return attrs.evolve(o, name=name, of=of, inputs=tensors(o.inputs), outputs=tensors(o.outputs))

    return attrs.evolve(graph, ops=tuple(map(op, graph.ops)), outputs=tensors(graph.outputs))


def test_a_small_graph_reads_as_before(golden: Golden) -> None:
    golden("dot/small.dot", to_dot(small(), title="small"))


def test_the_dense_template_reads_as_before(golden: Golden) -> None:
    golden("dot/llama-3-8b-tp2-dense.dot", to_dot(dense(tp=2)))


def test_the_same_graph_gives_the_same_text() -> None:
    assert to_dot(dense(tp=2, recompute="full")) == to_dot(dense(tp=2, recompute="full"))


def test_notes_and_title_are_shown_and_escaped() -> None:
    note = OpNote(("12 us & 3 %", "<gemm>"), "#123456", "a < b \\N")
    text = to_dot(small(), notes={"qkv": note}, title="R&D")
    assert "12 us &amp; 3 %<br/>&lt;gemm&gt;>" in text
    assert 'fillcolor="#123456"' in text
    assert r'tooltip="a < b \\N"' in text
    assert "<b>R&amp;D</b>" in text


def test_an_empty_fill_keeps_the_colour_of_the_rule() -> None:
    assert to_dot(small(), notes={"norm": OpNote()}) == to_dot(small())
    assert f'fillcolor="{RULE_FILLS[Rule.HBM]}"' in to_dot(small())


def test_the_legend_names_the_colours_in_use() -> None:
    assert ">matmul<" in to_dot(small())
    painted = {op.name: OpNote(fill="red") for op in small().ops if op.kind.startswith("linear")}
    assert ">matmul<" not in to_dot(small(), notes=painted)
    assert ">HBM-bound<" in to_dot(small(), notes=painted)


def test_hostile_names_are_escaped() -> None:
    text = to_dot(renamed(small(), "qkv", HOSTILE), title=HOSTILE)
    assert "<b>&lt;b&gt;&amp;&quot;\\N:" in text
    assert "\x00" not in text
    assert re.search(r'"=3Cb=3E=26=22=5CN=3A=00=0A=5D" \[', text)  # the node's id means nothing in DOT


@pytest.mark.parametrize("name", [HOSTILE, "node", "a:b", "<i>", "", "~x", "x~", "\\"])
def test_an_engine_reads_every_name(name: str) -> None:
    pygraphviz = pytest.importorskip("pygraphviz")
    drawn = pygraphviz.AGraph(string=to_dot(renamed(small(), "norm", name)))
    assert len(drawn.nodes()) == 7 + 4  # ops, and the ellipses x, qkv, qkv.dy, qkv.dx


def test_ids_of_ops_differ_from_those_of_streams() -> None:
    assert op_id("~x") != "~x"
    assert op_id("x~") != "x~"
    assert len({op_id(name) for name in ("", "=", "%", "=3D", "%3D")}) == 5
    assert op_id("attn.norm_1-a") == "attn.norm_1-a"


def test_a_graph_too_large_to_read_is_refused() -> None:
    assert len(small().ops) == 7
    to_dot(small(), max_ops=7)
    with pytest.raises(InputError) as caught:
        to_dot(small(), max_ops=6)
    (problem,) = caught.value.problems
    assert problem.code == "too-many-ops"
    assert "7 ops" in problem.what
    assert "template" in problem.fix


def test_collectives_say_kind_group_and_bytes() -> None:
    text = to_dot(dense(tp=8))
    (line,) = (line for line in text.splitlines() if line.strip().startswith('"attn.norm.all_gather" [label'))
    assert "<b>all-gather tp=8</b>" in line
    assert byte_text(1 * 4096 * 4096 * 2) == "32 MiB"  # b s d in bf16: 2**25 bytes
    assert "[b s d]  32 MiB" in line
    assert "shape=hexagon" in line


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1000 * 2**20, "1000 MiB"), (5 * 2**40, "5 TiB")],
)
def test_bytes_read_well(n_bytes: int, text: str) -> None:
    assert byte_text(n_bytes) == text


def test_parameters_and_state_are_not_drawn() -> None:
    text = to_dot(dense(tp=2))
    assert "attn.qkv.weight" not in text
    assert '"~x" [' in text
    assert '"mlp.residual~" [' in text


def test_backward_edges_are_turned_round_and_saved_tensors_do_not_constrain() -> None:
    text = to_dot(dense(tp=2))
    (up,) = re.findall(r'"?mlp.down.dx"? -> "?mlp.residual.grad.all_gather"? \[(.*)\]', text)
    assert "dir=back" in up
    (saved,) = re.findall(r'"?mlp.act"? -> "?mlp.down.dw"? \[(.*)\]', text)
    assert "constraint=false" in saved
    assert "style=dashed" in saved


def test_partners_stand_on_one_rung() -> None:
    graph = dense(tp=2)
    rungs = rungs_of(graph, edges_of(graph))
    assert ("mlp.down", "mlp.down.dw", "mlp.down.dx") in rungs
    # the gather of the gradient faces the scatter of what it is the gradient of
    assert ("mlp.down.reduce_scatter", "mlp.residual.grad.all_gather") in rungs
    # x, its gradient, and what is gathered again beside the gather itself
    assert ("~x", "x.grad~") in rungs
    assert ("attn.norm.all_gather", "attn.norm.regather", "attn.qkv.dx.reduce_scatter") in rungs


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_every_backward_op_with_a_partner_faces_one(recompute: str) -> None:
    graph = dense(tp=2, recompute=recompute)
    standing = {node for rung in rungs_of(graph, edges_of(graph)) for node in rung}
    assert [op.name for op in graph.phase(Phase.BACKWARD) if op.of and op.name not in standing] == []


def test_residuals_are_led_round_the_trunk() -> None:
    graph = dense(tp=2)
    parts = {(edge.source, edge.target): edge.part for edge in edges_of(graph)}
    assert parts["~x", "attn.norm"] is Part.TRUNK
    assert parts["~x", "attn.residual"] is Part.BYPASS
    assert parts["attn.residual.grad", "x.grad"] is Part.BYPASS
    assert parts["attn.split", "attn.sdpa"] is Part.BRANCH  # two steps by way of rope
    assert parts["mlp.act.dx", "mlp.gate_up.dw"] is Part.BRANCH


def test_what_runs_again_runs_down_and_is_marked() -> None:
    graph = dense(tp=2, recompute="full")
    ways = {(edge.source, edge.target): edge.way for edge in edges_of(graph)}
    assert ways["mlp.gate_up.again", "mlp.act.again"] is Way.DOWN
    assert ways["mlp.act.again", "mlp.down.dw"] is Way.ACROSS
    text = to_dot(graph)
    assert ">recomputed<" in text
    assert ">gathered again<" in text


def test_tensors_between_the_same_two_ops_share_an_edge() -> None:
    (edge,) = (e for e in edges_of(dense(tp=2)) if (e.source, e.target) == ("attn.sdpa", "attn.sdpa.dx"))
    assert [t.name for t in edge.tensors] == ["attn.sdpa", "attn.sdpa.lse"]


def test_collectives_inside_an_op_hang_below_it_in_a_row() -> None:
    graph = lower(load_model("llama-3-8b"), Layout(tp=2))["head"]
    ends = {(edge.source, edge.target) for edge in edges_of(graph)}
    row = ["head.loss", "head.loss.max", "head.loss.target", "head.loss.sum"]
    assert set(pairwise(row)) <= ends
    assert ("head.loss", "head.loss.sum") not in ends


def test_layers_written_out_have_boxes_of_their_own() -> None:
    text = to_dot(lower(load_model("llama-3-8b"), Layout(pp=16)).unroll(1), max_ops=400)
    assert "subgraph cluster_forward_L1.attn" in text.replace('"', "")
    assert "subgraph cluster_forward_L2.attn" in text.replace('"', "")


def test_a_graph_without_ops_or_ports_is_drawn() -> None:
    assert to_dot(Graph("empty", ())).startswith("digraph empty {")
    x = Tensor("x", "bsd", (1, 2, 3))
    alone = Op("sum", "add", (x, x), (Tensor("sum", "bsd", (1, 2, 3)),))
    assert '"~x" -> sum' in to_dot(Graph("alone", (alone,), ports=Ports(enters="x")))


def test_state_does_not_enter_the_picture() -> None:
    state = Tensor("step.exp_avg", "p", (8,), "fp32", Kind.STATE)
    alone = Op("copy", "add", (state, state), (), phase=Phase.STEP)
    assert "exp_avg" not in to_dot(Graph("step", (alone,)))


def test_rungs_never_close_a_circle() -> None:
    order = Order("abcd", [("a", "b"), ("c", "d")])
    assert order.merge("a", "d")
    assert not order.merge("b", "c")  # c above d = a above b
    assert not order.merge("a", "b")
    assert not order.merge("a", "unknown")
    assert order.rungs() == (("a", "d"),)


def test_the_shortest_way_round_is_counted() -> None:
    order = Order("abcd", [("a", "b"), ("b", "c"), ("c", "d"), ("a", "d"), ("a", "c")])
    assert order.steps_round("a", "d") == 2  # a c d
    assert order.steps_round("b", "c") == 0


def kernels(graph: Graph, *members: str, rule: str = "fused", launches: int = 1) -> Graph:
    """The graph with one fused kernel."""
    return attrs.evolve(graph, groups=(Group("k", rule, members, launches),))


def test_a_kernel_has_a_dashed_box_titled_with_its_rule() -> None:
    text = to_dot(kernels(dense(tp=2), "attn.rope_q", "attn.rope_k", rule="a<b", launches=2))
    box = text[text.index("subgraph cluster_kernel_k {") :]
    box = box[: box.index("}")]
    assert ">a&lt;b, 2 launches</font>" in box
    assert 'style="rounded,dashed"' in box
    assert "<b>rope_q</b>" in box
    assert "<b>rope_k</b>" in box
    assert text.index("subgraph cluster_forward_attn") < text.index("subgraph cluster_kernel_k")
    assert ">one kernel<" in text
    assert ">one kernel<" not in to_dot(dense(tp=2))


def test_a_kernel_with_ops_of_two_modules_stands_between_their_boxes() -> None:
    text = to_dot(kernels(dense(tp=2), "attn.residual", "mlp.norm"))
    box = text[text.index("subgraph cluster_kernel_k {") :]
    box = box[: box.index("}")]
    assert "<b>attn.residual</b>" in box  # in no module's box, so the module is said
    assert "<b>mlp.norm</b>" in box
    assert text.count("<b>attn.residual</b>") == 1


def test_kernels_leave_the_ladder_as_it_is() -> None:
    plain, fused = dense(tp=2), kernels(dense(tp=2), "attn.residual", "mlp.norm")
    assert rungs_of(fused, edges_of(fused)) == rungs_of(plain, edges_of(plain))
    assert edges_of(fused) == edges_of(plain)


def test_an_engine_reads_kernels_of_any_name() -> None:
    pygraphviz = pytest.importorskip("pygraphviz")
    graph = attrs.evolve(small(), groups=(Group(HOSTILE, HOSTILE, ("norm", "qkv")), Group("", "", ("qkv.dx",))))
    assert len(pygraphviz.AGraph(string=to_dot(graph)).nodes()) == 7 + 4


def test_changed_ops_have_a_thick_rim() -> None:
    text = to_dot(small(), changed=frozenset({"qkv", "norm.regather", "unknown"}))
    thick = [line.split(" [", 1)[0].strip() for line in text.splitlines() if "penwidth=3" in line]
    assert thick == ["qkv", '"norm.regather"']
    (again,) = (line for line in text.splitlines() if line.strip().startswith('"norm.regather" ['))
    assert "dashed" in again


@pytest.mark.parametrize("name", ["mixtral-8x7b", "gpt-oss-20b", "deepseek-v3", "gemma-2-9b"])
def test_every_template_of_every_kind_of_block_draws(name: str) -> None:
    for graph in lower(load_model(name), Layout(seq=512)).templates:
        assert to_dot(graph).count("fillcolor=") >= len(graph.ops)


def test_every_rule_has_a_colour_of_its_own() -> None:
    assert set(RULE_FILLS) == set(Rule)
    assert len(set(RULE_FILLS.values())) == len(Rule)
