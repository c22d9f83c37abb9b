"""What holds for every fusion, whatever the rule: on random graphs with rules cut out of them, and on real programs."""

from __future__ import annotations

from functools import cache

import attrs
import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_samples import contracted, graphs_with_rules, rules
from stepgraph.hwtargets import load_target
from stepgraph.ir.graph import Graph, Group
from stepgraph.ir.op import Phase
from stepgraph.ir.program import Program, seam_graph
from stepgraph.ir.verifier import verify_program
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import lower
from stepgraph.passes.base import Setting, setting
from stepgraph.passes.costing import Costs, costs
from stepgraph.passes.fusing.pattern import FusionRule
from stepgraph.passes.fusing.programs import fuse, unfuse
from stepgraph.passes.fusing.sets import BASIC
from stepgraph.passes.iteration import iterate
from stepgraph.passes.profiles import PROFILES
from stepgraph.passes.stepping.stagecosts import cost_stages

TARGET = load_target("h100")
SETTINGS = tuple(setting(TARGET, profile) for profile in sorted(PROFILES))
Case = tuple[Graph, tuple[FusionRule, ...]]


def seconds(cost: Costs) -> float:
    """A graph by itself: kernels one after the other, each launched."""
    return float(cost.time_s.sum()) + int(cost.kernels.sum()) * TARGET.launch.gap_s


@given(graphs_with_rules())
def test_fusing_never_moves_or_launches_more_never_takes_longer_and_computes_the_same(case: Case) -> None:
    graph, rules = case
    fused, _ = fuse(graph, rules)
    for chosen in SETTINGS:
        before, after = costs(graph, chosen), costs(fused, chosen)
        assert 0 <= after.hbm_bytes.sum() <= before.hbm_bytes.sum()
        assert (after.hbm_bytes >= 0).all()
        assert after.kernels.sum() <= before.kernels.sum()
        assert (after.flops == before.flops).all()
        assert seconds(after) <= seconds(before) * (1 + 1e-12)


@given(graphs_with_rules())
def test_fusing_can_be_undone_exactly(case: Case) -> None:
    graph, rules = case
    fused, report = fuse(graph, rules)
    assert fused.ops is graph.ops
    assert unfuse(fused) == graph
    assert (fused is graph) == (sum(rule.fused for rule in report.rules) == 0)
    first = rules[0].name
    assert unfuse(fused, first).groups == tuple(group for group in fused.groups if group.rule != first)


@given(graphs_with_rules())
def test_kernels_can_run_in_some_order(case: Case) -> None:
    graph, rules = case
    fused, _ = fuse(graph, rules)
    assert nx.is_directed_acyclic_graph(contracted(fused))


@given(graphs_with_rules())
def test_a_refused_kernel_for_a_cycle_would_have_made_one(case: Case) -> None:
    """No false alarms: together with the kernels of all earlier rules, the refused members cannot run."""
    graph, rules = case
    fused, report = fuse(graph, rules[:1])
    known = list(fused.groups)
    for site in report.sites:
        if {reason.code for reason in site.reasons} == {"cycle"}:
            free = [group for group in known if not set(group.members) & set(site.members)]
            tried = attrs.evolve(graph, groups=(*free, Group("tried", "", site.members)))
            assert not nx.is_directed_acyclic_graph(contracted(tried))


@given(graphs_with_rules(), st.data())
def test_a_kernel_of_one_op_changes_nothing(case: Case, data: st.DataObject) -> None:
    graph, _ = case
    chosen = data.draw(st.lists(st.sampled_from(graph.ops), unique=True))
    alone = attrs.evolve(graph, groups=tuple(Group(op.name, "alone", (op.name,)) for op in chosen))
    for law in SETTINGS:
        assert_same(costs(graph, law), costs(alone, law))


def assert_same(one: Costs, other: Costs) -> None:
    for field in ("flops", "hbm_bytes", "comm_bytes", "kernels", "compute_s", "hbm_s", "comm_s"):
        np.testing.assert_array_equal(getattr(one, field), getattr(other, field))


@given(graphs_with_rules(least=2, most=2))
def test_the_order_of_independent_rules_changes_no_number(case: Case) -> None:
    """Independent: alone, they take different ops, and neither keeps the other's kernels from running."""
    graph, rules = case
    alone = [fuse(graph, [rule])[0].groups for rule in rules]
    (one, found), (other, again) = fuse(graph, rules), fuse(graph, rules[::-1])
    members = [name for groups in alone for group in groups for name in group.members]
    codes = {reason.code for report in (found, again) for site in report.sites for reason in site.reasons}
    if len(members) > len(set(members)) or "cycle" in codes:
        return
    assert set(one.groups) == set(other.groups) == {group for groups in alone for group in groups}
    for chosen in SETTINGS:
        assert costs(one, chosen).hbm_bytes.sum() == costs(other, chosen).hbm_bytes.sum()
        assert costs(one, chosen).kernels.sum() == costs(other, chosen).kernels.sum()


PROGRAMS = (
    ("llama-3-8b", {"num_hidden_layers": 4}, Layout(seq=256)),
    ("llama-3-8b", {"num_hidden_layers": 4}, Layout(seq=256, tp=2, pp=2, global_batch=8)),
    ("llama-3-8b", {"num_hidden_layers": 3}, Layout(seq=256, tp=2, sp=False, recompute="full")),
    ("llama-3-8b", {"num_hidden_layers": 4}, Layout(seq=256, pp=2, recompute="selective", global_batch=4)),
    ("deepseek-v3", {"num_hidden_layers": 6}, Layout(seq=256, ep=4, dp=4, global_batch=4)),
    ("deepseek-v3", {"num_hidden_layers": 5}, Layout(seq=256, mtp=1, recompute="full")),
    ("gemma-2-9b", {"num_hidden_layers": 4}, Layout(seq=256, tp=2)),
    ("gpt2-xl", {"n_layer": 4}, Layout(seq=256)),
    ("gpt-oss-20b", {"num_hidden_layers": 4}, Layout(seq=256, tp=2, ep=2, dp=2, global_batch=4)),
)
IDS = [f"{name}-{index}" for index, (name, _, _) in enumerate(PROGRAMS)]


@cache
def program_of(index: int) -> Program:
    name, overrides, layout = PROGRAMS[index]
    return lower(load_model(name, overrides), layout)


@cache
def fused_of(index: int) -> Program:
    return fuse(program_of(index), BASIC)[0]


def totals(graph: Graph, chosen: Setting) -> dict[Phase, tuple[int, int, int]]:
    """Kernels, bytes and FLOPs of one graph, by phase."""
    cost = costs(graph, chosen)
    found = {}
    for phase in Phase:
        at = [i for i, op in enumerate(graph.ops) if op.phase is phase]
        found[phase] = (int(cost.kernels[at].sum()), int(cost.hbm_bytes[at].sum()), int(cost.flops[at].sum()))
    return found


@pytest.mark.parametrize("index", range(len(PROGRAMS)), ids=IDS)
@pytest.mark.parametrize("law", SETTINGS, ids=sorted(PROFILES))
def test_a_fused_program_costs_what_its_stages_written_out_cost(index: int, law: Setting) -> None:
    program = fused_of(index)
    stages = cost_stages(program, {graph.name: costs(graph, law) for graph in program.templates}, law)
    for stage, cost in enumerate(stages):
        for phase, counted in totals(program.unroll(stage), law).items():
            part = {Phase.FORWARD: cost.forward, Phase.BACKWARD: cost.backward, Phase.STEP: cost.step}[phase]
            assert (part.kernels, part.hbm_bytes, part.flops) == counted


@pytest.mark.parametrize("index", range(len(PROGRAMS)), ids=IDS)
def test_a_fused_program_is_sound_and_comes_apart_again(index: int) -> None:
    program, fused = program_of(index), fused_of(index)
    verify_program(fused)
    assert all(nx.is_directed_acyclic_graph(contracted(fused.unroll(i))) for i in range(len(fused.stages)))
    assert unfuse(fused) == program


@pytest.mark.parametrize("index", range(len(PROGRAMS)), ids=IDS)
@pytest.mark.parametrize("law", SETTINGS, ids=sorted(PROFILES))
def test_a_step_without_overlap_never_gets_slower(index: int, law: Setting) -> None:
    assert iterate(fused_of(index), law).step_s < iterate(program_of(index), law).step_s


@pytest.mark.parametrize("index", range(len(PROGRAMS)), ids=IDS)
def test_what_is_fused_stays_when_more_rules_follow(index: int) -> None:
    """Rule by rule, each on what the ones before it left, is the same as all at once."""
    program = program_of(index)
    for rule in BASIC:
        program, _ = fuse(program, [rule])
    assert kernels(program) == kernels(fused_of(index))
    again, report = fuse(program, BASIC)
    assert again is program
    assert all(rule.fused == 0 for rule in report.rules)


def kernels(program: Program) -> dict[str, set[Group]]:
    """Kernels by the template or seam that they are in."""
    inside = {graph.name: set(graph.groups) for graph in program.templates}
    return inside | {f"{seam.left} -> {seam.right}": set(seam.groups) for seam in program.seam_groups}


SMALL = (
    lower(load_model("llama-3-8b", {"num_hidden_layers": 4}), Layout(seq=64, tp=2, pp=2, global_batch=4)),
    lower(load_model("llama-3-8b", {"num_hidden_layers": 3}), Layout(seq=64, recompute="full")),
    lower(load_model("deepseek-v3", {"num_hidden_layers": 5}), Layout(seq=64)),
)


@st.composite
def programs_with_rules(draw: st.DrawFn) -> tuple[Program, tuple[FusionRule, ...]]:
    """A real program, and rules cut out of its seams."""
    program = draw(st.sampled_from(SMALL))
    pairs = sorted({(seam.left, seam.right) for stage in program.stages for seam in stage.seams})
    graphs = [seam_graph(program, *pair) for pair in pairs]
    return program, tuple(draw(rules(draw(st.sampled_from(graphs)), f"r{i}")) for i in range(draw(st.integers(1, 4))))


@settings(max_examples=60)
@given(programs_with_rules())
def test_random_rules_leave_real_programs_sound_and_rolled_as_written_out(
    case: tuple[Program, tuple[FusionRule, ...]],
) -> None:
    program, chosen = case
    fused, report = fuse(program, chosen)
    verify_program(fused)
    assert unfuse(fused) == program
    assert (fused is program) == (not any(rule.fused for rule in report.rules))
    law = SETTINGS[1]
    stages = cost_stages(fused, {graph.name: costs(graph, law) for graph in fused.templates}, law)
    for index, stage in enumerate(stages):
        counted = totals(fused.unroll(index), law)
        assert (stage.forward.kernels, stage.forward.hbm_bytes, stage.forward.flops) == counted[Phase.FORWARD]
        assert (stage.backward.kernels, stage.backward.hbm_bytes, stage.backward.flops) == counted[Phase.BACKWARD]
    assert iterate(fused, law).step_s <= iterate(program, law).step_s * (1 + 1e-12)


@settings(max_examples=5)
@given(st.permutations(range(len(BASIC))))
def test_rule_sets_in_any_order_give_sound_programs(order: list[int]) -> None:
    program = program_of(7)
    fused, _ = fuse(program, [BASIC[i] for i in order])
    verify_program(fused)
    for law in SETTINGS:
        assert iterate(fused, law).step_s <= iterate(program, law).step_s
