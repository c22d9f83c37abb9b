"""The rule language: what a pattern can say, what it finds, and what is told to whoever writes one wrongly."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-any-return, misc"

from __future__ import annotations

import re
from collections.abc import Callable

import attrs
import pytest

from fusion_samples import MD, Sketch, act, sketched
from stepgraph.hwtargets.reading import load_target
from stepgraph.ir.graph import Graph
from stepgraph.ir.op import Phase
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import lower
from stepgraph.passes.comparison import compare
from stepgraph.passes.fusing.grouping import explain
from stepgraph.passes.fusing.legality import Match
from stepgraph.passes.fusing.pattern import FusionRule, fusion
from stepgraph.passes.fusing.programs import fuse
from stepgraph.passes.fusing.recorder import PatternError


def found(graph: Graph, rule: FusionRule) -> list[tuple[str, ...]]:
    """Members of every kernel that the rule makes."""
    return [group.members for group in fuse(graph, [rule])[0].groups]


def unknown_kind(op, x, w):
    return op.rmsnrom(x, w)


def unknown_kind_of_several(op, x):
    return op.one_of("gelu", "sillu")(x)


def unknown_optional_kind(op, x, b):
    return op.gelu(op.maybe("bias_ad")(x, b))


def unknown_family(op, x):
    return op.any("pointwize", x)


def no_kind(op, x):
    return op.one_of()(x)


def unused_parameter(op, x, w, spare):
    return op.rmsnorm(x, w)


def unused_result(op, x, r, w):
    total = op.add(x, r)
    op.softcap(total)
    return op.rmsnorm(total, w)


def reserved_parameter(op, x, outputs):
    return op.add(x, outputs)


def no_result(op, x):
    op.gelu(x)


def parameter_as_result(op, x):
    return x


def one_result_of_two_is_a_parameter(op, x):
    return op.gelu(x), x


def empty_result(op):
    return ()


def optional_result(op, x, b):
    return op.maybe("bias_add")(x, b)


def optional_without_operand(op):
    return op.gelu(op.maybe("bias_add")())


def number_as_operand(op, x):
    return op.add(x, 2)


def tensor_by_name(op, x, w):
    return op.rmsnorm(x, weight=w)


def no_recorder():
    return None


def any_number_of_tensors(op, *tensors):
    return op.grad_add(*tensors)


def tensor_by_keyword_only(op, *, x):
    return op.gelu(x)


WRONG: tuple[tuple[Callable[..., object], str], ...] = (
    (unknown_kind, r"no op kind 'rmsnrom'; did you mean 'rmsnorm'"),
    (unknown_kind_of_several, r"no op kind 'sillu'; did you mean 'silu'"),
    (unknown_optional_kind, r"no op kind 'bias_ad'; did you mean 'bias_add'"),
    (unknown_family, r"no family 'pointwize'; did you mean 'pointwise'"),
    (no_kind, r"names no op kind"),
    (unused_parameter, r"parameter 'spare' of rule 'unused_parameter' is never used"),
    (unused_result, r"the result of softcap in rule 'unused_result' is neither used nor returned"),
    (reserved_parameter, r"may not be called 'outputs'"),
    (no_result, r"'no_result' has to return what leaves the kernel"),
    (parameter_as_result, r"has to return what leaves the kernel"),
    (one_result_of_two_is_a_parameter, r"has to return what leaves the kernel"),
    (empty_result, r"has to return what leaves the kernel"),
    (optional_result, r"returns an op that may be absent"),
    (optional_without_operand, r"bias_add or nothing needs an operand"),
    (number_as_operand, r"add was given 2; operands are the pattern's parameters"),
    (tensor_by_name, r"rmsnorm was given weight=Var\(name='w'\); tensors go by position"),
    (no_recorder, r"takes \(op, tensor, ...\)"),
    (any_number_of_tensors, r"takes \(op, tensor, ...\): plain parameters"),
    (tensor_by_keyword_only, r"takes \(op, tensor, ...\): plain parameters"),
)


@pytest.mark.parametrize(("pattern", "what"), WRONG, ids=[pattern.__name__ for pattern, _ in WRONG])
def test_a_wrong_pattern_is_refused_with_its_file_and_line(pattern: Callable[..., object], what: str) -> None:
    where = f"{__file__}:{pattern.__code__.co_firstlineno}: "
    with pytest.raises(PatternError, match=f"^{re.escape(where)}.*{what}"):
        fusion(pattern)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"phase": "fwd"}, "no phase 'fwd'"),
        ({"phase": "steps"}, "no phase 'steps'"),
        ({"kernels": 0}, "whole number of kernels, at least 1"),
        ({"kernels": 1.5}, "whole number of kernels, at least 1"),
        ({"efficiency": "high"}, "0 < efficiency <= 1"),
        ({"efficiency": 0.0}, "0 < efficiency <= 1"),
        ({"efficiency": 1.5}, "0 < efficiency <= 1"),
        ({"efficiency": float("nan")}, "0 < efficiency <= 1"),
    ],
)
def test_wrong_options_are_refused_with_file_and_line(options: dict[str, object], what: str) -> None:
    def rule(op, x):
        return op.gelu(x)

    with pytest.raises(PatternError, match=f"^{re.escape(__file__)}:[0-9]+: .*{what}"):
        fusion(**options)(rule)  # type: ignore[call-overload]


def test_a_rule_is_a_function_and_is_not_called() -> None:
    with pytest.raises(PatternError, match="3 is no function"):
        fusion(3)  # type: ignore[call-overload]
    rule = fusion(lambda op, x: op.gelu(x))
    with pytest.raises(PatternError, match="is not called; give it to fuse"):
        rule(1, 2)


def test_both_ways_to_decorate() -> None:
    @fusion
    def plain(op, x, b):
        return op.gelu(op.bias_add(x, b))

    @fusion(name="other", phase="backward", kernels=2, efficiency=0.5, source="here")
    def named(op, x, b):
        return op.gelu(op.bias_add(x, b))

    assert (plain.name, plain.params, plain.phase, plain.kernels, plain.efficiency) == (
        "plain",
        ("x", "b"),
        "either",
        1,
        1.0,
    )
    assert (named.name, named.phase, named.kernels, named.efficiency, named.source) == (
        "other",
        "backward",
        2,
        0.5,
        "here",
    )


def test_a_parameter_that_stands_twice_is_one_tensor() -> None:
    rule = fusion(lambda op, x, y: op.gate_mul(op.add(x, y), x))
    graph = sketched("s = add a b", "t = gate_mul s a", "u = add a b", "v = gate_mul u c")
    assert found(graph, rule) == [("s", "t")]
    assert "reads %c, expected %a, which 'x' is already" in explain(graph, rule, "v")


def test_operands_of_a_commutative_op_stand_in_any_order_and_of_others_do_not() -> None:
    total = fusion(lambda op, x, y: op.add(x, op.gelu(y)))
    gated = fusion(lambda op, x, y: op.gate_mul(x, op.gelu(y)))
    graph = sketched("g = gelu a", "left = add g b", "h = gelu a", "right = add b h")
    assert found(graph, total) == [("g", "left"), ("h", "right")]
    graph = sketched("g = gelu a", "left = gate_mul g b", "h = gelu a", "right = gate_mul b h")
    assert found(graph, gated) == [("h", "right")]


def test_any_operands_of_a_sum_of_many() -> None:
    """A sum of gradients has as many operands as there are readers; a pattern of two finds any two of them."""
    pair = fusion(lambda op, x, y: op.grad_add(op.gelu(x), op.silu(y)))
    one = fusion(lambda op, x: op.grad_add(op.silu(x)))
    graph = sketched("s = silu a", "g = gelu a", "total = grad_add b s g")
    assert found(graph, pair) == [("s", "g", "total")]
    assert found(graph, one) == [("s", "total")]


def test_backtracking_from_a_first_order_that_fails_deeper() -> None:
    """Both operands are sums; only the second has a norm beneath."""
    rule = fusion(lambda op, x, w, y, z: op.add(op.add(op.rmsnorm(x, w), y), z))
    graph = sketched("n = rmsnorm a w", "p = add b c", "q = add c n", "t = add p q")
    assert found(graph, rule) == [("n", "q", "t")]


def test_an_op_stands_for_one_part_of_the_pattern_only() -> None:
    rule = fusion(lambda op, x, y: op.add(op.gelu(x), op.gelu(y)))
    graph = sketched("g = gelu a", "t = add g g")
    assert found(graph, rule) == []
    assert "stands for another part of the pattern already" in explain(graph, rule, "t")


def test_a_result_that_is_used_twice_in_the_pattern_is_one_op() -> None:
    @fusion
    def twice(op, x, y):
        total = op.add(x, y)
        return op.gate_mul(op.gelu(total), total)

    graph = sketched("s = add a b", "g = gelu s", "t = gate_mul g s", "o = add a c", "u = gate_mul g o")
    assert found(graph, twice) == [("s", "g", "t")]


def test_families_and_alternatives() -> None:
    family = fusion(lambda op, x, y: op.any("norms", op.add(x, y)))
    either = fusion(lambda op, x, y: op.one_of("gelu", "silu")(op.add(x, y)))
    lines = ("s = add a b", "n = rmsnorm s w", "t = add a c", "l = layernorm t w v", "u = add b c", "g = silu u")
    assert found(sketched(*lines), family) == [("s", "n"), ("t", "l")]
    assert found(sketched(*lines), either) == [("u", "g")]


def test_maybe_finds_both_and_prefers_what_is_there() -> None:
    rule = fusion(lambda op, x, b: op.gelu(op.maybe("bias_add")(op.linear(x, b), b)))
    graph = sketched("m = linear a w", "p = bias_add m w", "g = gelu p", "n = linear a v", "h = gelu n")
    assert found(graph, rule) == [("m", "p", "g"), ("n", "h")]


def test_maybes_over_maybes() -> None:
    """Each optional op may be there or not, also when an op could be either."""

    @fusion
    def tower(op, x, y, w):
        low = op.maybe("softcap")(op.add(x, y))
        return op.rmsnorm(op.maybe("softcap", "gelu")(op.maybe("silu")(low)), w)

    for between in ((), ("softcap",), ("gelu",), ("softcap", "silu", "gelu"), ("softcap", "softcap"), ("silu", "gelu")):
        lines = ["t0 = add a b", *(f"t{i + 1} = {kind} t{i}" for i, kind in enumerate(between))]
        graph = sketched(*lines, f"n = rmsnorm t{len(between)} w")
        assert found(graph, tower) == [(*(f"t{i}" for i in range(len(between) + 1)), "n")]
    assert not found(sketched("t0 = add a b", "t1 = gelu t0", "t2 = silu t1", "n = rmsnorm t2 w"), tower)


def test_an_absent_op_that_is_used_twice_is_absent_twice() -> None:
    @fusion
    def both(op, x, y, b):
        biased = op.maybe("bias_add")(op.add(x, y), b)
        return op.gelu(biased), op.silu(biased)

    assert found(sketched("s = add a b", "g = gelu s", "h = silu s"), both) == [("s", "g", "h")]
    assert found(sketched("s = add a b", "p = bias_add s c", "g = gelu p", "h = silu p"), both) == [
        ("s", "p", "g", "h")
    ]
    assert not found(sketched("s = add a b", "p = bias_add s c", "g = gelu p", "h = silu s"), both)


def test_deep_patterns_over_equal_operands_are_found_in_no_time() -> None:
    """Twenty sums of a tensor with itself: both orders are the same, so there are not 2^20 ways."""

    def doubled(op, x, w):
        for _ in range(20):
            x = op.add(x, x)
        return op.gelu(op.gate_mul(x, w))

    graph = sketched(
        "n = silu a",
        *(f"t{i} = add {f't{i - 1}' if i else 'n'} {f't{i - 1}' if i else 'n'}" for i in range(19)),
        "g = gate_mul t18 w",
        "h = gelu g",
    )
    assert found(graph, fusion(doubled)) == []


def test_attributes_are_exact() -> None:
    sketch = Sketch()
    for name, pairs in (("a", (("act", 1),)), ("b", (("act", 2),)), ("c", ())):
        sketch.add(name, "gelu", "x", attrs=pairs)
        sketch.add(f"{name}.out", "silu", name)
    rule = fusion(lambda op, x: op.silu(op.gelu(x, act=2)))
    assert found(sketch.graph(), rule) == [("b", "b.out")]
    assert "a has act = 1, expected 2" in explain(sketch.graph(), rule, "a.out")
    assert "c has act = None, expected 2" in explain(sketch.graph(), rule, "c.out")


def test_several_results_that_share_what_they_read() -> None:
    pair = fusion(lambda op, x, v, w: (op.linear(x, v), op.linear(x, w)))
    graph = sketched("a = linear x u", "b = linear x v", "c = linear y w", "d = linear x w", "e = linear x z")
    # a with b, then d with e; c reads something else
    assert found(graph, pair) == [("a", "b"), ("d", "e")]


def test_several_results_deep_below_what_they_share() -> None:
    @fusion
    def both_heads(op, q, k, v, w):
        return op.silu(op.softcap(op.rmsnorm(q, v))), op.silu(op.softcap(op.rmsnorm(k, w)))

    sketch = Sketch()
    sketch.add("s", "split_latent", "x", outputs=(act("q"), act("k")))
    for name in ("q", "k"):
        sketch.add(f"{name}.n", "rmsnorm", name, f"{name}.w")
        sketch.add(f"{name}.c", "softcap", f"{name}.n")
        sketch.add(f"{name}.r", "silu", f"{name}.c")
    assert found(sketch.graph(), both_heads) == [("q.n", "q.c", "q.r", "k.n", "k.c", "k.r")]


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_result_may_also_be_inside(norm_first: bool) -> None:
    """What leaves and is read inside too may be named as a result, in any place."""

    @fusion
    def rule(op, x, r, w):
        total = op.add(x, r)
        norm = op.rmsnorm(total, w)
        return (norm, total) if norm_first else (total, norm)

    assert found(sketched("s = add a b", "n = rmsnorm s w", "t = add s n"), rule) == [("s", "n")]


def test_second_results_are_no_way_in() -> None:
    rule = fusion(lambda op, x, w: op.gelu(op.rmsnorm(x, w)))
    sketch = Sketch()
    sketch.add("n", "rmsnorm", "x", "w", outputs=(act("n"), act("n.rstd")))
    sketch.add("g", "gelu", "n.rstd")
    assert found(sketch.graph(), rule) == []
    assert "which is not the first result of n" in explain(sketch.graph(), rule, "g")


def test_more_operands_than_the_op_has() -> None:
    rule = fusion(lambda op, x, y: op.gelu(x, y))
    assert "has 1 operands, the pattern gives gelu 2" in explain(sketched("g = gelu a"), rule, "g")


@pytest.mark.parametrize(("phase", "expected"), [("forward", ["g"]), ("backward", ["h"]), ("either", ["g", "h"])])
def test_phase(phase: str, expected: list[str]) -> None:
    sketch = Sketch()
    sketch.add("a", "silu", "x")
    sketch.add("g", "gelu", "a")
    sketch.add("b", "silu", "y", phase=Phase.BACKWARD)
    sketch.add("h", "gelu", "b", phase=Phase.BACKWARD)
    rule = fusion(phase=phase)(lambda op, x: op.gelu(op.silu(x)))
    assert [members[-1] for members in found(sketch.graph(), rule)] == expected
    _, report = fuse(sketch.graph(), [rule])
    assert report.rules[0].rejected == ({} if phase == "either" else {"phase": 1})


def matches(graph: Graph, rule: FusionRule) -> list[Match]:
    """What the rule's check sees."""
    seen: list[Match] = []
    fuse(graph, [rule.check(seen.append)])
    return seen


def test_what_a_check_sees() -> None:
    rule = fusion(lambda op, x, y, w: op.rmsnorm(op.gelu(op.add(x, y)), w))
    sketch = Sketch()
    sketch.add("s", "add", "a", "b")
    sketch.add("g", "gelu", "s")
    sketch.add("n", "rmsnorm", "g", "w", outputs=(act("n"), act("n.rstd"), act("n.spare")))
    sketch.add("t", "add", "g", "n")
    sketch.add("back", "rmsnorm_dw", "n.rstd", phase=Phase.BACKWARD)
    (m,) = matches(sketch.graph("t"), rule)
    assert [op.name for op in m.ops] == ["s", "g", "n"]
    assert [t.name for t in m.inputs] == ["a", "b", "w"]
    assert [t.name for t in m.interior] == ["s", "g"]
    assert [t.name for t in m.escaping] == ["g"]  # t reads it
    assert [t.name for t in m.outputs] == ["g", "n", "n.rstd"]  # nobody reads n.spare
    assert (m.x.name, m.y.name, m.w.name, m.x.nbytes) == ("a", "b", "w", MD)
    assert m.graph["t"].kind == "add"
    with pytest.raises(AttributeError, match="the match has no tensor 'z'; it has x, y, w"):
        _ = m.z


def test_checks_reject_with_their_reason_and_all_reasons_are_collected() -> None:
    rule = fusion(lambda op, x: op.gelu(op.silu(x)))

    @rule.check
    def narrow(m):
        if m.x.nbytes > MD // 2:
            m.reject(f"{m.x.nbytes} bytes are too many")

    @narrow.check
    def never(m):
        m.reject("not today")

    graph = sketched("a = silu x", "b = gelu a")
    _, report = fuse(graph, [never])
    (site,) = report.sites
    assert [(reason.code, reason.text) for reason in site.reasons] == [
        ("check", f"{MD} bytes are too many"),
        ("check", "not today"),
    ]
    assert report.rules[0].rejected == {"check": 1}  # sites, not reasons
    assert len(rule.checks) == 0 and len(fuse(graph, [rule])[0].groups) == 1  # the rule itself is a value
    assert f"[check] b: {MD} bytes are too many; [check] b: not today" in explain(graph, never, "b")


def test_a_failure_inside_a_check_is_not_swallowed() -> None:
    rule = fusion(lambda op, x: op.gelu(op.silu(x))).check(lambda m: m.reject(1 / 0))
    with pytest.raises(ZeroDivisionError):
        fuse(sketched("a = silu x", "b = gelu a"), [rule])


def test_explain_names_the_nearest_miss() -> None:
    rule = fusion(lambda op, x, r, w: op.rmsnorm(op.add(x, r), w))
    graph = sketched("m = gate_mul a b", "n = rmsnorm m w", "s = add a b", "o = rmsnorm s w", "p = rmsnorm c w")
    rule = attrs.evolve(rule, name="add_norm")
    assert explain(graph, rule, "n") == ("add_norm does not match at n: n reads %m, made by m (gate_mul), expected add")
    assert explain(graph, rule, "m") == "add_norm does not match at m: m is gate_mul, expected rmsnorm"
    assert explain(graph, rule, "s") == "add_norm fuses at s: s, o"  # any member may be asked about
    assert explain(graph, rule, "p").endswith("p reads %c, which enters the graph, expected add")
    assert explain(graph, rule, "o") == "add_norm fuses at o: s, o"
    with pytest.raises(KeyError, match="did you mean"):
        explain(graph, rule, "nn")


def test_explain_tells_of_the_deepest_attempt_and_of_gaps() -> None:
    rule = fusion(lambda op, x, y, z, w: op.rmsnorm(op.add(op.gelu(op.silu(x)), op.gate_mul(y, z)), w))
    graph = sketched("a = gelu x", "b = gate_mul y z", "s = add b a", "n = rmsnorm s w")
    assert "a reads %x, which enters the graph, expected silu" in explain(graph, rule, "n")
    across = sketched("s = add a b", "r = all_reduce s", "n = rmsnorm r w")
    norm = fusion(lambda op, x, r, w: op.rmsnorm(op.add(x, r), w))
    assert "is refused: [collective] r: (all_reduce) lies between s and n" in explain(across, norm, "n")


def two(op, x, a, b):
    return op.linear(x, a), op.linear(x, b)


def three(op, x, a, b, c):
    return op.linear(x, a), op.linear(x, b), op.linear(x, c)


def six(op, x, a, b, c, d, e, f):
    return tuple(op.linear(x, weight) for weight in (a, b, c, d, e, f))


@pytest.mark.parametrize(("pattern", "results"), [(two, 2), (three, 3), (six, 6)])
def test_many_equal_ops_are_grouped_without_end(pattern: Callable[..., object], results: int) -> None:
    """Any op with any other: each looks for partners that are still free."""
    graph = sketched(*(f"a{i} = linear x w{i}" for i in range(60)))
    fused, report = fuse(graph, [fusion(pattern)])
    assert len(fused.groups) == report.rules[0].matched == 60 // results
    assert sorted(name for group in fused.groups for name in group.members) == sorted(op.name for op in graph.ops)


def test_a_pattern_computes_nothing() -> None:
    for pattern in (
        lambda op, x, y: op.silu(x) * y,
        lambda op, x: op.add(*op.split_qkv(x)),
        lambda op, x: op.split_qkv(x)[1],
        lambda op, x, y: op.add(x, y) if x > y else op.add(y, x),
    ):
        with pytest.raises(TypeError, match="a pattern computes nothing"):
            fusion(pattern)


def test_checks_take_the_match_and_return_nothing() -> None:
    rule = fusion(lambda op, x, r, w: op.rmsnorm(op.add(x, r), w))
    with pytest.raises(PatternError, match="takes one argument, the match"):
        rule.check(lambda: None)
    graph = sketched("s = add a b", "o = rmsnorm s w")
    with pytest.raises(PatternError, match=r"returned False; call m\.reject"):
        fuse(graph, [rule.check(lambda m: False)])  # type: ignore[arg-type]


def test_the_gradient_norm_is_waited_for() -> None:
    program = lower(load_model("llama-3-8b", {"num_hidden_layers": 2}), Layout(seq=64))
    rule = fusion(phase="step")(lambda op, m, v, g, w: (op.adamw(m, v, g, w), op.grad_norm(g)))
    assert fuse(program, [rule])[1].rules[0].rejected == {"collective": 1}


def test_a_kernel_runs_once_per_piece_of_its_members() -> None:
    layout = Layout(seq=1024)
    program = lower(load_model("mixtral-8x7b", {"num_hidden_layers": 2}), layout)
    rule = fusion(phase="forward")(lambda op, x, w: op.swiglu(op.grouped_linear(x, w)))
    fused, report = fuse(program, [rule])
    assert report.rules[0].fused == 2
    before, after = (side.totals for side in attrs.astuple(compare(program, fused, load_target("h100")), recurse=False))
    assert before.kernels - after.kernels == 2 * (8 + 1 - 8)  # 8 GEMMs and a SwiGLU become 8 kernels, in two layers
