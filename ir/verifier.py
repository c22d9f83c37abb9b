"""The verifier: is this graph one that the algebra allows? Run after every pass in tests, and on demand.

| code | what must hold |
|---|---|
| op-name | no two ops have the same name |
| tensor-twice, tensor-differs | a tensor is made once, and is the same wherever it stands |
| tensor-form, divides | one letter per size, placements in mesh order, split sizes divide |
| axis-differs | an axis has one size and stride |
| unknown-kind | every kind has a row |
| phase-order, phase-read | forward, backward, step; nothing is read before the phase that makes it |
| use-before-def, undefined | what is read was made before, or enters the graph |
| arity, letters, sizes | operands and results are those of the row's loop nest |
| group | exactly what moves data between ranks has one |
| at, whole | an axis splits one letter of the op, none that must stay whole |
| pending | a pending sum enters linear ops and conversions only |
| operand-place, result-place | the one rule, computed again |
| conversion, param-moved | a conversion changes what its kind says; parameters stay at home |
| role, of | known roles; partners are forward ops of the graph |
| backward, gradient | an op that a gradient reaches is answered as its row says |
| group-members, group-launch | a fused kernel holds ops of the graph, in order, no other's; launches and rate make sense |
| group-phase, group-collective | its members run in one phase, recomputed ops apart; no collective, send or receive inside |
| group-cycle | fused kernels can run in some order: contracted, the graph has no cycle |
| ports, outputs, facts | they name what is there, and facts are known and true |
| stage, boundary, seam | (programs) stages name templates, hops stand at their ends, neighbours hand on one form |
| group-seam | (programs) kernels across a seam join neighbours, and fit where a layer meets both of its own |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from stepgraph.ir.answers import forward_ops_answered, partners_exist, roles_known
from stepgraph.ir.basics import (
    axes_agree,
    kinds_known,
    phases_in_order,
    reads_defined,
    tensors_agree,
    tensors_made_once,
    tensors_well_formed,
    unique_op_names,
)
from stepgraph.ir.boundaries import facts_true, outputs_exist, ports_fit, stages_fit, streams_join
from stepgraph.ir.faults import Fault, VerifyError
from stepgraph.ir.graph import Graph
from stepgraph.ir.groupchecks import kernels_can_run, members_fit, nothing_moves_inside, phases_unmixed, seams_fused
from stepgraph.ir.moves import conversions_convert
from stepgraph.ir.nests import operands_fit, placements_follow
from stepgraph.ir.program import Program

__all__ = ["verify", "verify_program", "VerifyError", "Fault", "MOST"]

MOST = 20
"""Problems that one error reports."""

LEVELS: tuple[tuple[Callable[[Graph], Iterator[Fault]], ...], ...] = (
    (unique_op_names, tensors_made_once, tensors_agree, tensors_well_formed, axes_agree, kinds_known),
    (phases_in_order, reads_defined, operands_fit, outputs_exist, ports_fit, members_fit),
    (placements_follow, conversions_convert, roles_known, partners_exist, forward_ops_answered, facts_true),
    (phases_unmixed, nothing_moves_inside, kernels_can_run),
)
"""Checks, each level relying on the one before: when one finds something, those behind it would report echoes."""


def verify(graph: Graph) -> None:
    """Check a graph against the rules of the module's table.

    A graph without the fact "placed" is not checked for placements, one without "backward" not for its backward ops.

    Raises: VerifyError with up to 20 problems: all of the first level of checks that finds any (names, tensors and
    kinds; order, operands and members of groups; placements, backward ops and facts; groups).
    """
    faults = tuple(islice(_faults(graph), MOST))
    if faults:
        raise VerifyError(f"graph {graph.name!r}", faults)


def verify_program(program: Program) -> None:
    """Check every template, then that stages name templates, hops stand at their ends, neighbours join and kernels
    across seams fit.

    Raises: VerifyError with up to 20 problems.
    """
    faults = tuple(islice(_program_faults(program), MOST))
    if faults:
        raise VerifyError(f"program {program.name!r}", faults, several_graphs=True)


def _faults(graph: Graph) -> Iterator[Fault]:
    for level in LEVELS:
        found = [fault for check in level for fault in islice(check(graph), MOST)]
        if found:
            yield from found
            return


def _program_faults(program: Program) -> Iterator[Fault]:
    found = [fault for graph in program.templates for fault in _faults(graph)]
    found += list(stages_fit(program))
    found = found or list(streams_join(program))
    yield from found or seams_fused(program)
