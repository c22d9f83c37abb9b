"""Every reason to refuse a kernel, on graphs written by hand and on real ones."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, misc"

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TypeVar

import attrs
import networkx as nx
import pytest

from fusion_samples import TP, Sketch, contracted, layer, members_of, sketched
from stepgraph.ir.graph import Graph, Group
from stepgraph.ir.op import Phase
from stepgraph.ir.program import Program, Run, Stage
from stepgraph.ir.rewriting import Rewrite
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import lower
from stepgraph.passes.fusing.grouping import FusionReport, Site
from stepgraph.passes.fusing.legality import NOTES, REJECTIONS, Reason
from stepgraph.passes.fusing.pattern import FusionRule, fusion
from stepgraph.passes.fusing.programs import fuse
from stepgraph.passes.fusing.rules.norms import add_rmsnorm

T = TypeVar("T", Graph, Program)
PAIR = fusion(lambda op, x: op.gelu(op.silu(x)))


@cache
def llama(**layout: object) -> Program:
    return lower(load_model("llama-3-8b", {"num_hidden_layers": 4}), Layout(seq=256, **layout))  # type: ignore[arg-type]


def only(report: FusionReport) -> Site:
    (site,) = report.sites
    return site


def codes(site: Site) -> list[str]:
    return [reason.code for reason in site.reasons]


def rejected(target: T, *rules: FusionRule | Rewrite) -> dict[str, int]:
    """Rejections of the last rule, by code."""
    return dict(fuse(target, rules)[1].rules[-1].rejected)


def test_phase_of_members_that_run_at_different_times() -> None:
    sketch = Sketch()
    sketch.add("a", "silu", "x")
    sketch.add("b", "gelu", "a", phase=Phase.BACKWARD)
    site = only(fuse(sketch.graph(), [PAIR])[1])
    assert codes(site) == ["phase"]
    assert str(site.reasons[0]) == "[phase] b: spans backward and forward"


def test_phase_on_a_real_graph() -> None:
    """An activation and its gradient both read what enters it."""
    rule = fusion(lambda op, x, dy: (op.swiglu(x), op.swiglu_dx(dy, x)))
    assert rejected(llama(), rule) == {"phase": 4}


def test_scope_of_more_than_two_layers_written_out() -> None:
    """Four residual adds in a row are in three layers; two are in one layer or two, but attention lies between."""

    @fusion
    def sums(op, x, a, b, c, d):
        return op.add(op.add(op.add(op.add(x, a), b), c), d)

    report = fuse(llama().unroll(), [sums])[1]
    spanned = [{name.split(".")[0] for name in site.members} for site in report.sites]
    assert [codes(site) for site in report.sites] == [
        ["scope"] if len(layers) == 3 else ["cycle"] for layers in spanned
    ]
    assert report.rules[0].rejected == {"cycle": 3, "scope": 2}


def test_scope_across_seams() -> None:
    """A template with one op has its chains across seams: two of them can be one kernel, three cannot."""
    program = stack(layer("one", "y = gelu x", leaves="y"), 5)
    three = fusion(lambda op, x: op.gelu(op.gelu(op.gelu(x))))
    assert rejected(program, three) == {"scope": 4, "overlap": 4}  # and each op in the kernels of both its seams


def test_stage_on_a_real_program() -> None:
    """The second stage's first norm reads what the first stage's last add sent."""
    assert rejected(llama(pp=2, global_batch=4), add_rmsnorm) == {"stage": 1}
    assert rejected(llama(pp=4, global_batch=4), add_rmsnorm) == {"stage": 3}


def test_stage_backward() -> None:
    """The sum at the end of a layer's backward, and the GEMM of the layer before it."""
    rule = fusion(phase="backward")(lambda op, a, b, w: op.linear_dx(op.grad_add(a, b), w))
    none, two = llama(), llama(pp=2, global_batch=4)
    assert rejected(none, rule) == {}
    assert rejected(two, rule) == {"stage": 1}


def test_stage_in_a_graph_by_itself() -> None:
    sketch = Sketch()
    sketch.add("r", "recv", group=(TP,))
    sketch.add("a", "gelu", "r")
    sketch.add("b", "silu", "a")
    sketch.add("s", "send", "b", group=(TP,), outputs=())
    rule = fusion(lambda op, x: op.gelu(op.silu(x)))
    assert codes(only(fuse(sketch.graph(), [rule])[1])) == ["stage"]
    assert fuse(sketch.graph(), [fusion(lambda op, x: op.gelu(op.softcap(x)))])[1].sites == ()  # not what is sent


def test_recomputed_copies_fuse_among_themselves_but_not_with_first_executions() -> None:
    sketch = Sketch()
    sketch.add("a", "silu", "x")
    sketch.add("b", "gelu", "a")
    again = {"phase": Phase.BACKWARD, "role": "recompute"}
    sketch.add("a.again", "silu", "x", **again)  # type: ignore[arg-type]
    sketch.add("b.again", "gelu", "a.again", **again)  # type: ignore[arg-type]
    sketch.add("c.again", "gelu", "a", **again)  # type: ignore[arg-type]
    forward = fusion(phase="forward")(lambda op, x: op.gelu(op.silu(x)))
    fused, report = fuse(sketch.graph(), [forward])
    assert [group.members for group in fused.groups] == [("a", "b"), ("a.again", "b.again")]
    assert [codes(site) for site in report.sites] == [[], [], ["recompute", "overlap"]]


def test_a_recomputed_copy_and_a_gradient_are_two_phases() -> None:
    sketch = Sketch()
    sketch.add("a", "silu", "x", phase=Phase.BACKWARD, role="recompute")
    sketch.add("b", "gelu", "a", phase=Phase.BACKWARD)
    assert codes(only(fuse(sketch.graph(), [PAIR])[1])) == ["phase", "recompute"]


def test_recompute_boundaries_on_a_real_program() -> None:
    """Layers that are run again: 3 seams between 4 layers forward and again, and the one before the head."""
    fused, report = fuse(llama(recompute="full"), [add_rmsnorm])
    assert report.rules[0].rejected == {"recompute": 3 + 3 + 1}
    assert report.rules[0].fused == 2 * 4  # add and norm inside each layer, and their copies
    assert not fused.seam_groups
    names = [group.members for group in fused["dense"].groups]
    assert names == [("attn.residual", "mlp.norm"), ("attn.residual.again", "mlp.norm.again")]
    assert rejected(llama(recompute="selective"), add_rmsnorm) == {}


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "slice"])
def test_collective_between_members(kind: str) -> None:
    sketch = Sketch()
    sketch.add("a", "silu", "x")
    sketch.add("r", kind, "a", group=(TP,))
    sketch.add("b", "gelu", "r")
    site = only(fuse(sketch.graph(), [PAIR])[1])
    assert (codes(site), site.members) == (["collective"], ("a", "b"))
    assert site.reasons[0].op == "r"


def test_collective_as_a_member() -> None:
    sketch = Sketch()
    sketch.add("a", "silu", "x")
    sketch.add("r", "all_reduce", "a", group=(TP,))
    rule = fusion(lambda op, x: op.all_reduce(op.silu(x)))
    assert codes(only(fuse(sketch.graph(), [rule])[1])) == ["collective"]


def test_a_gap_is_reported_only_where_the_rest_of_the_pattern_is_there() -> None:
    rule = fusion(lambda op, x, y: op.gate_mul(op.gelu(x), op.softcap(y)))
    lines = ("g = gelu a", "r = all_reduce g", "c = softcap b", "t = gate_mul r c", "u = gate_mul r b")
    site = only(fuse(sketched(*lines), [rule])[1])
    assert (site.op, codes(site)) == ("t", ["collective"])


def test_a_match_without_a_gap_is_preferred_to_one_with_it() -> None:
    rule = fusion(lambda op, x, y: op.add(op.gelu(x), y))
    graph = sketched("g = gelu a", "r = all_reduce g", "h = gelu b", "t = add r h")
    assert [site.members for site in fuse(graph, [rule])[1].sites] == [("h", "t")]


def test_collective_on_a_real_program() -> None:
    """Row-parallel projections end in a collective before the add; column-parallel ones begin with one."""
    add = fusion(lambda op, x, w, r: op.add(r, op.linear(x, w)))
    norm = fusion(lambda op, x, g, w: op.linear(op.rmsnorm(x, g), w))
    for rule, count in ((add, 2 * 4), (norm, 2 * 4)):
        assert rejected(llama(), rule) == {}
        assert rejected(llama(tp=2), rule)["collective"] >= count
    assert rejected(llama(tp=2, sp=False), add) == {"collective": 8}


def test_collective_across_a_seam_and_all_reasons_at_once() -> None:
    left = layer("one", "s = add x y", "r = all_reduce s", leaves="r")
    right = layer("two", "n = rmsnorm x w", leaves="n")
    program = Program("p", (left, right, Graph("step", ())), (Stage((Run("one"), Run("two")), "step"),))
    assert rejected(program, add_rmsnorm) == {"collective": 1}
    backward = attrs.evolve(add_rmsnorm, phase="backward")
    assert codes(only(fuse(program, [backward])[1])) == ["collective", "phase"]


def test_overlap() -> None:
    graph = sketched("a = silu x", "b = gelu a", "c = silu b", "d = gelu c")
    chain = fusion(name="chain")(lambda op, x: op.silu(op.gelu(x)))
    fused, report = fuse(graph, [PAIR, chain])
    assert [group.members for group in fused.groups] == [("a", "b"), ("c", "d")]
    assert str(report.sites[-1].reasons[0]) == "[overlap] b: is in kernel b@<lambda> already"
    assert codes(report.sites[-1]) == ["overlap", "overlap"]
    assert report.rules[1].rejected == {"overlap": 1}


def test_overlap_leaves_other_matches_at_the_same_op() -> None:
    """Four readers of one tensor, two by two: the first partner that is free counts."""
    pair = fusion(lambda op, x, v, w: (op.linear(x, v), op.linear(x, w)))
    graph = sketched(*(f"{name} = linear x {name}.w" for name in "abcd"))
    fused, report = fuse(graph, [pair])
    assert [group.members for group in fused.groups] == [("a", "b"), ("c", "d")]
    assert report.rules[0].rejected == {}


def test_an_earlier_rule_has_the_first_choice_across_seams_too() -> None:
    """Otherwise a later rule would take the last op of every layer before the seams are looked at."""
    template = layer("one", "n = rmsnorm x w", "g = gelu n", "y = add x g", leaves="y")
    later = fusion(name="later")(lambda op, x, r: op.add(x, op.gelu(r)))
    fused, report = fuse(stack(template, 3), [add_rmsnorm, later])
    assert [rule.fused for rule in report.rules] == [2, 0]
    assert report.rules[1].rejected == {"overlap": 3}
    verify_kernels(fused)


def test_an_op_joins_one_kernel_across_the_seams_on_both_its_sides() -> None:
    """Chains of one op per layer: written out, the second layer's op would be in the kernels of both its seams."""
    program = stack(layer("one", "y = gelu x", leaves="y"), 3)
    fused, report = fuse(program, [fusion(lambda op, x: op.gelu(op.gelu(x)))])
    verify_kernels(fused)
    assert report.rules[0].fused == 0 and set(report.rules[0].rejected) == {"overlap"}


def test_kernels_across_seams_stay_when_more_rules_follow() -> None:
    program = fuse(llama(), [add_rmsnorm])[0]
    more, report = fuse(program, [fusion(name="more")(lambda op, x: op.swiglu(x))])
    assert report.rules[0].fused == 4
    assert more.seam_groups == program.seam_groups != ()
    again, report = fuse(more, [add_rmsnorm])
    assert again is more
    assert report.rules[0].rejected == {"overlap": 8}


def test_cycle_through_an_op_between_members() -> None:
    rule = fusion(lambda op, x, y: op.gate_mul(op.gelu(x), y))
    graph = sketched("a = gelu x", "b = silu a", "c = gate_mul a b")
    assert codes(only(fuse(graph, [rule])[1])) == ["cycle"]
    long = sketched(
        "a = gelu x", *(f"b{i} = silu {f'b{i - 1}' if i else 'a'}" for i in range(2000)), "c = gate_mul a b1999"
    )
    assert codes(only(fuse(long, [rule])[1])) == ["cycle"]


def test_two_kernels_that_are_convex_by_themselves_and_cyclic_together() -> None:
    """Kernels {a, c} and {b, d} with a -> d and b -> c: each waits for the other (pytorch/pytorch issue 86159)."""
    graph = sketched("a = add x p", "b = add x q", "c = gate_mul b p", "d = gate_mul a q")
    one, other = _sharing("p"), _sharing("q")
    assert list(members_of(fuse(graph, [one])[0]).values()) == [("a", "c")]  # either by itself is fine
    assert list(members_of(fuse(graph, [other])[0]).values()) == [("b", "d")]
    for rules in ([one, other], [other, one]):
        fused, report = fuse(graph, rules)
        assert [group.rule for group in fused.groups] == [rules[0].name]
        refused = [site for site in report.sites if not site.is_fused and "check" not in codes(site)]
        assert [(site.rule, codes(site)) for site in refused] == [(rules[1].name, ["cycle"])]
        assert nx.is_directed_acyclic_graph(contracted(fused))
    together = attrs.evolve(graph, groups=(Group("1", "", ("a", "c")), Group("2", "", ("b", "d"))))
    assert not nx.is_directed_acyclic_graph(contracted(together))


def _sharing(name: str) -> FusionRule:
    """A sum and a product that read one tensor, which has this name."""
    rule = fusion(name=name)(lambda op, x, y, shared: (op.add(x, shared), op.gate_mul(y, shared)))

    @rule.check
    def named(m):
        if m.shared.name != name:
            m.reject("shares another tensor")

    return named


def test_cycle_that_leads_behind_the_last_member_and_back_through_a_kernel() -> None:
    """a -> e -> f with f in a kernel with c, on which d waits: e stands behind every member of {a, d}."""
    graph = sketched("a = gelu x", "c = silu y", "d = gate_mul a c", "e = softcap a", "f = relu e")
    kernel = attrs.evolve(graph, groups=(Group("k", "", ("c", "f")),))
    rule = fusion(lambda op, x, y: op.gate_mul(op.gelu(x), y))
    assert fuse(graph, [rule])[1].rules[0].fused == 1
    assert codes(only(fuse(kernel, [rule])[1])) == ["cycle"]


def test_a_kernel_across_the_seam_before_and_one_across_the_seam_after_wait_for_each_other() -> None:
    """In the layer between: a -> b and c -> d, with {a, d} joined to the layer before, {b, c} to the layer after."""
    lines = ("a = gelu x", "c = silu w", "b = gate_mul a v", "d = softcap c", "y = add b c")
    template = layer("one", *lines, leaves="y")
    before = fusion(name="before")(lambda op, x, y, z: (op.gelu(op.add(x, y)), op.softcap(z)))
    fused, _ = fuse(
        stack(template, 4), [before, fusion(name="after")(lambda op, a, b, v: op.gelu(op.add(op.gate_mul(a, v), b)))]
    )
    verify_kernels(fused)


def test_cycle_on_a_real_graph() -> None:
    """Two residual adds of one layer, with attention or the MLP between them."""
    rule = fusion(phase="forward")(lambda op, x, a, b: op.add(op.add(x, a), b))
    assert rejected(llama(), rule) == {"cycle": 4 + 3}  # inside 4 layers, and across 3 seams


def test_check_on_a_real_graph() -> None:
    @add_rmsnorm.check
    def narrow(m):
        if m.weight.shape[0] > 2048:
            m.reject(f"rows of {m.weight.shape[0]} do not fit")

    report = fuse(llama(), [narrow])[1]
    assert report.rules[0].rejected == {"check": 8}
    assert {str(reason) for site in report.sites for reason in site.reasons} == {
        f"[check] {op}: rows of 4096 do not fit" for op in ("mlp.norm", "right.attn.norm", "right.head.norm")
    }


def test_relower_is_said_once() -> None:
    rewrite = Rewrite("flash", "logical", lambda graph: graph)
    graph, program = sketched("a = gelu x"), llama()
    (fused, report), (other, again) = fuse(graph, [rewrite]), fuse(program, [rewrite])
    assert fused is graph and other is program
    for told in (report, again):
        assert (told.rules[0].matched, told.rules[0].rejected) == (1, {"relower": 1})
        assert "lower(..., rewrites=[...])" in str(only(told).reasons[0])


def test_notes_say_who_still_reads() -> None:
    sketch = Sketch()
    sketch.add("a", "silu", "x")
    sketch.add("b", "gelu", "a")
    for phase, code in ((Phase.FORWARD, "escape"), (Phase.BACKWARD, "saved")):
        more = attrs.evolve(
            sketch.graph("b"), ops=(*sketch.ops, attrs.evolve(sketch.ops[1], name="late", phase=phase, outputs=()))
        )
        rule = attrs.evolve(PAIR, phase="forward")
        site = next(site for site in fuse(more, [rule])[1].sites if site.is_fused)
        assert [str(note) for note in site.notes] == [f"[{code}] late: reads %a, so it is still written"]
    leaving = only(fuse(sketch.graph("a", "b"), [PAIR])[1])
    assert [str(note) for note in leaving.notes] == ["[escape] the next layer: reads %a, so it is still written"]
    assert only(fuse(sketch.graph("b"), [PAIR])[1]).notes == ()


def test_the_report_as_text_and_as_numbers() -> None:
    report = fuse(llama(pp=2, global_batch=4), [add_rmsnorm])[1]
    # 4 layers inside, 1 seam in each of 2 stages, 1 before the head; the last is read by backward only
    assert str(report) == "add_rmsnorm: fused 7 of 8; rejected stage 1; still written escape 6, saved 1"
    assert report.to_json() == [
        {
            "name": "add_rmsnorm",
            "matched": 8,
            "fused": 7,
            "rejected": {"stage": 1},
            "notes": {"escape": 6, "saved": 1},
        }
    ]


def test_rules_of_one_name_are_reported_together() -> None:
    report = fuse(llama(), [add_rmsnorm, add_rmsnorm])[1]
    assert str(report) == "add_rmsnorm: fused 8 of 16; rejected overlap 8; still written escape 7, saved 1"


def test_nothing_to_do_gives_back_the_same() -> None:
    assert fuse(llama(), [])[0] is llama()
    assert str(fuse(llama(), [])[1]) == ""
    assert fuse(Graph("empty", ()), [PAIR])[0] == Graph("empty", ())


def test_every_code_is_documented() -> None:
    shown = (Path(__file__).parents[1] / "docs" / "fusing.md").read_text(encoding="utf-8")
    assert [code for code in (*REJECTIONS, *NOTES) if f"`{code}`" not in shown] == []
    with pytest.raises(ValueError, match="must be in"):
        Reason("impossible", "op", "a code that nobody documented")


def stack(template: Graph, count: int) -> Program:
    """A stage of equal layers written by hand."""
    return Program("stack", (template, Graph("step", ())), (Stage((Run(template.name, count),), "step"),))


def verify_kernels(program: Program) -> None:
    """Kernels are disjoint and can run once the stages are written out."""
    for index in range(len(program.stages)):
        graph = program.unroll(index)
        members = [name for group in graph.groups for name in group.members]
        assert len(members) == len(set(members))
        assert nx.is_directed_acyclic_graph(contracted(graph))


def test_recomputed_layers_keep_their_boundary_when_written_out() -> None:
    program = lower(load_model("llama-3-8b", {"num_hidden_layers": 4}), Layout(seq=64, recompute="full"))
    rule = fusion(phase="forward")(lambda op, x, r, w: op.rmsnorm(op.add(x, r), w))
    rolled, long = fuse(program, [rule])[1].rules[0], fuse(program.unroll(), [rule])[1].rules[0]
    assert rolled.fused == long.fused == 4 + 4  # inside the layers, first executions and copies; the head has no copy
    assert rolled.rejected["recompute"] > 0 and long.rejected["recompute"] > 0
