"""Fusing for users: the same as `fuse`, and the result is verified."""

from __future__ import annotations

from collections.abc import Sequence

from stepgraph.errors import refuse
from stepgraph.ir.program import Program
from stepgraph.ir.verifier import VerifyError, verify_program
from stepgraph.passes.fusing.grouping import AnyRule, FusionReport
from stepgraph.passes.fusing.programs import fuse


def fuse_soundly(program: Program, rules: Sequence[AnyRule]) -> tuple[Program, FusionReport]:
    """Fuse a program and verify it where kernels span layers.

    The engine looks for cycles inside a layer and across one seam; a chain of kernels over several layers is only seen
    with the stage written out. Raises: InputError (kernels) when such a chain waits for itself.
    """
    fused, report = fuse(program, rules)
    if fused.seam_groups:
        try:
            verify_program(fused)
        except VerifyError as error:
            fix = "leave out one of the rules whose kernels span two layers"
            raise refuse("kernels", "--fusions", f"kernels wait for each other\n{error}", "no cycle", fix) from error
    return fused, report
