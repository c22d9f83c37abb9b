"""How software executes one kind of op: the row of a profile."""

from __future__ import annotations

import attrs


@attrs.frozen
class Execution:
    """How one kind runs.

    reads, writes: HBM passes over each operand and each result; a single number stands for all of them.
    kernels: launches of one execution; with elements_per_kernel, one per that many elements of the first operand;
    with per_expert, so many for each local expert.
    """

    kind: str
    reads: tuple[float, ...]
    writes: tuple[float, ...]
    kernels: int
    source: str
    elements_per_kernel: int = 0
    per_expert: bool = False


ELEMENTS_PER_LAUNCH = 65536 * 320
"""What one multi-tensor launch updates: 320 blocks of 65,536 elements."""
