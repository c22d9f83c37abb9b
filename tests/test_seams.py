"""Kernels in programs: the graph of a seam, and what comes along when a stage is written out."""

from __future__ import annotations

from functools import cache

import attrs
import pytest

from stepgraph.errors import InputError
from stepgraph.ir.graph import Graph, Group
from stepgraph.ir.op import Phase
from stepgraph.ir.program import Program, SeamGroups, seam_graph
from stepgraph.ir.text import dump_program, parse_program
from stepgraph.ir.verifier import verify, verify_program
from stepgraph.lowering.huggingface import load_model
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.lowering import lower

SPAN = Group("span", "add_rmsnorm", ("left.mlp.residual", "right.attn.norm"))
BACK = Group("right.back", "sums", ("right.attn.norm.dw", "left.mlp.down.dw"))
INNER = Group("inner", "add_rmsnorm", ("attn.residual", "mlp.norm"), 2, 0.5)


@cache
def plain(recompute: str = "none") -> Program:
    """One stage: embedding, three layers, head."""
    layout = Layout(seq=64, tp=2, recompute=recompute)
    return lower(load_model("llama-3-8b", {"num_hidden_layers": 3}), layout)


def fused() -> Program:
    """The program with a kernel inside the layer and two across the seam between layers."""
    program = plain()
    dense = attrs.evolve(program["dense"], groups=(INNER,))
    templates = tuple(dense if graph.name == "dense" else graph for graph in program.templates)
    return attrs.evolve(program, templates=templates, seam_groups=(SeamGroups("dense", "dense", (SPAN, BACK)),))


def members(graph: Graph) -> dict[str, tuple[str, ...]]:
    return {group.name: group.members for group in graph.groups}


def test_a_seam_is_both_layers_joined() -> None:
    program = plain()
    seam, dense = seam_graph(program, "dense", "dense"), program["dense"]
    assert seam.name == "dense -> dense"
    assert len(seam.ops) == 2 * len(dense.ops)
    assert seam["right.attn.norm"].inputs[0] == seam["left.mlp.residual"].outputs[0]
    # the gradient goes the other way: right before left
    assert seam["left.mlp.residual.grad.all_gather"].inputs[0] == seam["right.x.grad"].outputs[0]
    backward = [op.name.split(".")[0] for op in seam.phase(Phase.BACKWARD)]
    assert backward == sorted(backward, reverse=True)
    assert seam.facts == dense.facts
    ports = seam.ports
    assert (ports.enters, ports.leaves) == ("left.x", "right.mlp.residual")
    assert (ports.grad_enters, ports.grad_leaves) == ("right.mlp.residual.grad", "left.x.grad")
    assert not {t.name for t in seam.outputs} & {"left.mlp.residual", "right.x.grad"}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("pair", [("embedding", "dense"), ("dense", "dense"), ("dense", "head")])
def test_every_seam_is_sound(recompute: str, pair: tuple[str, str]) -> None:
    verify(seam_graph(plain(recompute), *pair))


def test_a_seam_has_the_kernels_of_both_layers_and_its_own() -> None:
    found = members(seam_graph(fused(), "dense", "dense"))
    assert found == {
        "left.inner": ("left.attn.residual", "left.mlp.norm"),
        "span": SPAN.members,
        "right.inner": ("right.attn.residual", "right.mlp.norm"),
        "right.back": BACK.members,
    }
    assert list(found) == ["left.inner", "span", "right.inner", "right.back"]  # as their first members stand
    assert set(members(seam_graph(fused(), "dense", "head"))) == {"left.inner"}
    inner = seam_graph(fused(), "dense", "head").groups[0]
    assert (inner.rule, inner.kernels, inner.efficiency) == ("add_rmsnorm", 2, 0.5)


def test_a_seam_needs_a_stream() -> None:
    with pytest.raises(InputError, match=r"no stream leaves dense and enters embedding.*\[no-seam\]"):
        seam_graph(plain(), "dense", "embedding")
    with pytest.raises(KeyError, match="did you mean 'dense'"):
        seam_graph(plain(), "dense", "dens")


def test_writing_out_takes_kernels_along() -> None:
    graph = fused().unroll()
    # L0 embedding, L1 L2 L3 layers, L4 head: three layers, two seams between them
    assert members(graph) == {
        "L1.inner": ("L1.attn.residual", "L1.mlp.norm"),
        "L1.span": ("L1.mlp.residual", "L2.attn.norm"),
        "L2.inner": ("L2.attn.residual", "L2.mlp.norm"),
        "L2.span": ("L2.mlp.residual", "L3.attn.norm"),
        "L3.inner": ("L3.attn.residual", "L3.mlp.norm"),
        "L3.back": ("L3.attn.norm.dw", "L2.mlp.down.dw"),
        "L2.back": ("L2.attn.norm.dw", "L1.mlp.down.dw"),
    }
    verify(graph)


def test_kernels_of_the_step_keep_their_names() -> None:
    program = plain()
    step = program[program.stages[0].step]
    group = Group("adam", "multi", (step.ops[-1].name,))
    templates = tuple(attrs.evolve(g, groups=(group,)) if g is step else g for g in program.templates)
    assert attrs.evolve(program, templates=templates).unroll().groups == (group,)


def test_ops_are_where_they_were() -> None:
    assert fused().unroll().ops == plain().unroll().ops


def test_a_fused_program_is_sound_and_comes_back_from_its_text() -> None:
    verify_program(fused())
    text = dump_program(fused())
    assert parse_program(text) == fused()
    assert "\nseam dense dense\n  kernel span = left.mlp.residual right.attn.norm rule=add_rmsnorm\n" in text
