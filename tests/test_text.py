"""The text form: what it looks like, that it comes back, and what is said about text that cannot be read."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samples import small
from stepgraph.ir.graph import Graph, Group
from stepgraph.ir.op import Attr, Op, Phase
from stepgraph.ir.program import Program, Run, SeamGroups, Stage
from stepgraph.ir.tensor import Kind, Tensor
from stepgraph.ir.text import TextError, dump, dump_program, op_line, parse, parse_program
from strategies import attr_values, graphs, programs

SMALL = """\
graph small
facts backward placed
mesh dp=2:4 tp=4:1
ports enters=%x leaves=%qkv grad_enters=%qkv.dy grad_leaves=%qkv.dx
inputs
  %x : bf16[b/dp=2 s/tp=8 d=16] act
  %norm.weight : bf16[d=16] param
  %qkv.weight : bf16[d=16 h/tp=32] param
  %qkv.dy : bf16[b/dp=2 s=8 h/tp=32] grad
forward
  %norm : bf16[b/dp=2 s/tp=8 d=16], %norm.rms : fp32[b/dp=2 s/tp=8] = rmsnorm(%x, %norm.weight) at=dp:b,tp:s module=attn eps=1e-05
  %norm.all_gather : bf16[b/dp=2 s=8 d=16] = all_gather(%norm) group=tp module=attn origin=collectives
  %qkv : bf16[b/dp=2 s=8 h/tp=32] = linear(%norm.all_gather, %qkv.weight) at=dp:b,tp:h module=attn family=qkv packed=true
backward
  %norm.regather : bf16[b/dp=2 s=8 d=16] act = all_gather(%norm) group=tp of=norm role=regather
  %qkv.dx : bf16[b/dp=2 s=8 d=16] sum(tp) = linear_dx(%qkv.dy, %qkv.weight) at=dp:b,tp:h of=qkv role=dx
  %qkv.dw : fp32[d=16 h/tp=32] sum(dp) = linear_dw(%qkv.dy, %norm.regather) at=dp:b,tp:h of=qkv role=dw
step
  all_reduce(%qkv.dw) as dw.sum group=dp+tp
outputs %qkv %qkv.dx %qkv.dw
"""


def one_op(**fields: Any) -> Graph:
    """A graph of one op that makes `%y` of `%x`."""
    x, y = Tensor("x", "b", (4,)), Tensor("y", "b", (4,))
    return Graph("one", (attrs.evolve(Op("y", "gelu", (x,), (y,)), **fields),))


def last_line(graph: Graph) -> str:
    return dump(graph).rstrip("\n").split("\n")[-1].strip()


def test_one_op_per_line_described_where_it_is_made() -> None:
    assert dump(small()) == SMALL


def test_text_comes_back() -> None:
    assert parse(SMALL) == small()


@given(graphs())
def test_every_graph_comes_back_field_by_field(graph: Graph) -> None:
    again = parse(dump(graph))
    assert again == graph
    # == takes 1, 1.0 and True for one another, and 0.0 for -0.0; repr does not
    assert repr(again.ops) == repr(graph.ops)


@given(programs())
def test_every_program_comes_back(program: Program) -> None:
    again = parse_program(dump_program(program))
    assert again == program
    assert [repr(graph.ops) for graph in again.templates] == [repr(graph.ops) for graph in program.templates]


@given(attr_values())
def test_values_keep_their_type(value: Attr) -> None:
    again = parse(dump(one_op(attrs=(("k", value),)))).ops[0].attr("k")
    assert (type(again), repr(again)) == (type(value), repr(value))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (1, "1"),
        (1.0, "1.0"),
        (-0.5, "-0.5"),
        (1e16, "1e+16"),
        (float("-inf"), "-inf"),
        ("1", '"1"'),
        ("true", '"true"'),
        ("inf", '"inf"'),
        ("", '""'),
        ("qkv", "qkv"),
        ('say "a b"', r'"say \"a b\""'),
        ("two\nlines ; k=2", r'"two\nlines ; k=2"'),
    ],
)
def test_how_values_are_spelt(value: Attr, text: str) -> None:
    line = "%y : bf16[b=4] = gelu(%x)"
    assert last_line(one_op(attrs=(("k", value),))) == f"{line} k={text}"


def test_attributes_named_like_fields_stand_in_quotes() -> None:
    graph = one_op(attrs=(("as", 1), ("of", "x"), ("role", True)), role="dx")
    assert last_line(graph) == '%y : bf16[b=4] = gelu(%x) role=dx "as"=1 "of"=x "role"=true'
    assert parse(dump(graph)) == graph


def test_a_kind_is_written_where_it_is_not_the_usual_one() -> None:
    y = Tensor("y", "b", (4,), kind=Kind.ACT)
    op = Op("y", "gelu", (), (y,))
    assert op_line(op) == "%y : bf16[b=4] = gelu()"
    assert op_line(attrs.evolve(op, phase=Phase.BACKWARD)) == "%y : bf16[b=4] act = gelu()"
    gradient = attrs.evolve(y, kind=Kind.GRAD)
    assert op_line(attrs.evolve(op, phase=Phase.BACKWARD, outputs=(gradient,))) == "%y : bf16[b=4] = gelu()"
    state = attrs.evolve(y, kind=Kind.STATE)
    assert op_line(attrs.evolve(op, phase=Phase.STEP, outputs=(state,))) == "%y : bf16[b=4] = gelu()"


def test_an_op_that_is_not_named_after_its_first_output_says_so() -> None:
    assert last_line(one_op(name="z")) == "%y : bf16[b=4] = gelu(%x) as z"


def test_one_inserted_op_adds_one_line() -> None:
    graph = small()
    loss = Op("loss", "gelu", (graph["qkv"].outputs[0],), (Tensor("loss", "", (), "fp32"),))
    longer = attrs.evolve(graph, ops=(*graph.ops[:3], loss, *graph.ops[3:]))
    before, after = dump(graph).split("\n"), dump(longer).split("\n")
    assert [line for line in after if line not in before] == ["  %loss : fp32[] = gelu(%qkv)"]
    assert [line for line in before if line not in after] == []


def test_columns_are_shown_and_not_read_back() -> None:
    text = dump(small(), {"time_s": [0.5, *[0.0] * 6], "rule": ["hbm\nx", *["-"] * 6]})
    assert text.split("\n")[10].endswith(" eps=1e-05 ; time_s=0.5 rule=hbm x")
    assert parse(text) == small()


def test_a_column_has_one_entry_per_op() -> None:
    with pytest.raises(ValueError, match=r"column 'time_s' has 1 entries; expected one per op: 7"):
        dump(small(), {"time_s": [0.5]})


def test_blanks_and_comments_do_not_count() -> None:
    text = SMALL.replace("\n", "\r\n\r\n; a comment\n").replace(", ", "  ,\t")
    assert parse(text) == small()


def test_reading_before_making_is_for_the_verifier_to_refuse() -> None:
    graph = small()
    backwards = attrs.evolve(graph, ops=(graph.ops[1], graph.ops[0], *graph.ops[2:]))
    assert parse(dump(backwards)) == backwards


def test_a_program_is_its_stages_and_its_templates() -> None:
    stages = (Stage((Run("embedding"), Run("dense", 10)), "step.0"), Stage((Run("x", 2), Run("x")), "step.1", 1))
    text = dump_program(Program("tiny", (Graph("dense", ()), small()), stages, 8))
    head = "program tiny\nmicrobatches 8\nstage 0: embedding, dense x 10 | step.0\nstage 1: x x 2, x | step.1\n"
    assert text == f"{head}\ngraph dense\n\n{SMALL}"


def test_a_kernel_is_a_line_with_its_ops_by_name() -> None:
    groups = (Group("add_norm", "add_rmsnorm", ("norm", "qkv")), Group("odd one", "", ("qkv.dx",), 2, 0.5))
    text = dump(attrs.evolve(small(), groups=groups))
    lines = 'kernel add_norm = norm qkv rule=add_rmsnorm\nkernel "odd one" = qkv.dx launches=2 efficiency=0.5\n'
    assert text == SMALL.replace("outputs", lines + "outputs")
    assert parse(text).groups == groups


def test_ops_may_be_called_what_a_kernel_line_says() -> None:
    graph = Graph(
        "g", (), groups=(Group("rule", "rule", ("rule", "launches", "a=b", "", "kernel")), Group("k", "", ()))
    )
    assert dump(graph) == 'graph g\nkernel rule = rule launches "a=b" "" kernel rule=rule\nkernel k =\n'
    assert parse(dump(graph)) == graph


def test_kernels_across_a_seam_stand_below_its_two_templates() -> None:
    span = Group("span", "add_rmsnorm", ("left.add", "right.norm"))
    program = Program(
        "tiny", (), (Stage((Run("a", 2),), "s"),), 1, (SeamGroups("a", "a", (span,)), SeamGroups("a", "b", ()))
    )
    seams = "seam a a\n  kernel span = left.add right.norm rule=add_rmsnorm\nseam a b\n"
    assert dump_program(program) == f"program tiny\nstage 0: a x 2 | s\n{seams}"
    assert parse_program(dump_program(program)) == program


def test_a_stage_names_its_rank_when_it_is_not_its_own_number() -> None:
    stages = tuple(Stage((Run("x"),), "step", index % 2) for index in range(3))
    program = Program("tiny", (), stages)
    text = dump_program(program)
    assert text == "program tiny\nstage 0: x | step\nstage 1: x | step\nstage 2 rank 0: x | step\n"
    assert parse_program(text) == program


GRAPH = "graph g\nmesh tp=2:1\ninputs\n  %x : bf16[b=4] act\nforward\n"


@pytest.mark.parametrize(
    ("text", "number", "expected"),
    [
        ("", 1, "'graph NAME'"),
        ("program p", 1, "'graph NAME'"),
        ("graph", 1, "the graph's name"),
        ("graph g h", 1, "the end of the line"),
        ("graph g\n\nfoo", 3, "one of: facts, mesh, ports"),
        ("graph g\nmesh tp=2", 2, "':'"),
        ("graph g\nmesh tp=two:1", 2, "the axis's size"),
        ("graph g\nports enter=%x", 2, "a port: enters, leaves"),
        ("graph g\nports enters=x", 2, "a tensor: %name"),
        ("graph g\ngraph h", 2, "one graph only"),
        ("graph g\ninputs\n  %x : bf16[b=4]", 3, "a tensor's kind: input, param"),
        ("graph g\ninputs\n  %x : bf16[b=4] parm", 3, "a tensor's kind: input, param"),
        (GRAPH + "  %x : bf16[b=4] = gelu(%x)", 6, "a tensor that nothing above defines"),
        (GRAPH + "  %y : bf16[b=4] = gelu(%z)", 6, r"a tensor that enters or is made in this graph"),
        (GRAPH + "outputs %out", 6, r"a tensor that enters or is made in this graph"),
        (GRAPH + "  %y bf16[b=4] = gelu(%x)", 6, "':'"),
        (GRAPH + "  %y : bf16[b] = gelu(%x)", 6, "'='"),
        (GRAPH + "  %y : bf16[bs=4] = gelu(%x)", 6, "one letter for a dimension"),
        (GRAPH + "  %y : bf16[b=4 = gelu(%x)", 6, "a dimension"),
        (GRAPH + "  %y : bf16[b/dp=4] = gelu(%x)", 6, "an axis of the mesh: tp"),
        (GRAPH + "  %y : bf16[b/tp=4] sum(tp) = gelu(%x)", 6, "each axis once in a tensor"),
        (GRAPH + "  %y : bf16[b=4] = gelu(%x", 6, r"'\)'"),
        (GRAPH + "  gelu(%x)", 6, "'as NAME'"),
        (GRAPH + "  %y : bf16[b=4] = gelu(%x) k", 6, "'='"),
        (GRAPH + "  %y : bf16[b=4] = gelu(%x) k=1+1", 6, "a value"),
        (GRAPH + '  %y : bf16[b=4] = gelu(%x) k="open', 6, "a text that ends with a quote"),
        (GRAPH + r'  %y : bf16[b=4] = gelu(%x) k="\q"', 6, "a JSON string"),
        (GRAPH + "  %y : bf16[b=4] = gelu(%x) of=a of=b", 6, "each field once"),
        (GRAPH + "  %y : bf16[b=4] = gelu(%x) group=dp", 6, "an axis of the mesh: tp"),
        (GRAPH + "  %y : bf16[b=4] = gelu(%x) at=tp", 6, "':'"),
        (GRAPH + "kernel", 6, "the kernel's name"),
        (GRAPH + "kernel k a b", 6, "'='"),
        (GRAPH + "kernel k = a kernels=2", 6, "each of these once: rule, launches, efficiency"),
        (GRAPH + "kernel k = a rule=b rule=c", 6, "each of these once: rule, launches, efficiency"),
        (GRAPH + "kernel k = a launches=two", 6, "how many launches"),
        (GRAPH + "kernel k = a efficiency=all", 6, "a number: the part of the HBM rate"),
        (GRAPH + "kernel k = %a", 6, "an op's name, or rule="),
    ],
)
def test_text_that_cannot_be_read(text: str, number: int, expected: str) -> None:
    with pytest.raises(TextError, match=f"^line {number}: expected {expected}") as caught:
        parse(text)
    assert caught.value.number == number
    assert caught.value.line == text.split("\n")[number - 1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "'program NAME'"),
        ("graph g", "'program NAME'"),
        ("program p\nstage 1: a | s", "stage 0"),
        ("program p\nstage 0: a", r"'\|'"),
        ("program p\nstage 0: a x two | s", "how many in a row"),
        ("program p\nmicrobatches many", "how many micro-batches"),
        ("program p\nseam a", "the right template"),
        ("program p\nseam a b c", "the end of the line"),
        ("program p\nkernel k = a", "'seam LEFT RIGHT' above a kernel"),
        ("program p\nfacts a", "one of: microbatches, stage, seam, kernel, graph"),
    ],
)
def test_programs_that_cannot_be_read(text: str, expected: str) -> None:
    with pytest.raises(TextError, match=f"expected {expected}"):
        parse_program(text)


def test_an_error_points_at_the_place_and_suggests() -> None:
    text = SMALL.replace("linear(%norm.all_gather,", "linear(%norm.al_gather,")
    with pytest.raises(TextError) as caught:
        parse(text)
    said = str(caught.value).split("\n")
    assert said[0].startswith("line 13: expected a tensor that enters or is made in this graph")
    assert "did you mean 'norm.all_gather'?" in said[0]
    assert said[1][said[2].index("^") :].startswith("%norm.al_gather")


@given(st.data())
def test_a_damaged_text_is_read_or_refused_but_never_crashes(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(SMALL)))
    end = data.draw(st.integers(start, min(start + 8, len(SMALL))))
    damaged = SMALL[:start] + data.draw(st.text(' "\\%()[]=,;:+/|\n1ax.', max_size=3)) + SMALL[end:]
    try:
        parse(damaged)
    except TextError as error:
        assert error.line == damaged.split("\n")[error.number - 1]
