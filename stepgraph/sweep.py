"""Sweep: what one training step costs for several micro-batch sizes, as typed numbers."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from stepgraph.errors import Problem, refuse
from stepgraph.flips import Flips
from stepgraph.growth import Growth, MicroBatchCost, StepPart
from stepgraph.report import Bubble, Prediction

SIZES = (1, 2, 4, 8)
"""Micro-batch sizes that are tried unless others are asked for."""


@attrs.frozen
class SweptSize:
    """One micro-batch size: the step, what a micro-batch costs on the sweep's rank, and what grew too fast.

    regime: "starved" (n < 2P), "tolerable" (n < 4P), "comfortable", or "no pipeline"; with V chunks per rank n V counts.
    """

    micro_batch: int
    n_microbatches: int
    step_time_s: float
    mfu_active: float
    bubble: Bubble
    regime: str
    per_micro_batch_s: MicroBatchCost
    per_step_s: StepPart
    faster_than_linear: tuple[Growth, ...] = ()


@attrs.frozen
class RefusedSize:
    """A micro-batch size that the layout does not allow, and why."""

    micro_batch: int
    problems: tuple[Problem, ...]

    @property
    def reason(self) -> str:
        """All problems in one text."""
        return " ".join(map(str, self.problems))


@attrs.frozen
class Sweep:
    """Several micro-batch sizes at one layout and global batch.

    best: the prediction of the fastest size; its slowest rank is the one whose costs are shown for all sizes. flips:
    among `sizes`, those that the layout allows.
    """

    sizes: tuple[SweptSize, ...]
    refused: tuple[RefusedSize, ...]
    best: Prediction
    global_batch: int
    flips: Flips
    notes: tuple[str, ...]

    @property
    def best_micro_batch(self) -> int:
        """The fastest size."""
        return self.best.layout.micro_batch

    @property
    def entries(self) -> tuple[SweptSize | RefusedSize, ...]:
        """All sizes that were asked for, in rising order."""
        both: tuple[SweptSize | RefusedSize, ...] = (*self.sizes, *self.refused)
        return tuple(sorted(both, key=lambda size: size.micro_batch))

    def to_json(self) -> dict[str, object]:
        """Plain numbers, strings, lists and dictionaries, ready for `json.dumps`."""
        flips = self.flips
        below, above = (flip.to_json() if flip else None for flip in (flips.below, flips.above))
        nearest = flips.nearest(self.global_batch)
        layout = attrs.asdict(self.best.layout)
        del layout["micro_batch"]
        return {
            "model": self.best.model,
            "target": self.best.target,
            "gpus": self.best.gpus,
            "layout": layout,
            "profile": self.best.profile,
            "eta": self.best.eta,
            "launch": self.best.launch,
            "cuda_graphs": self.best.cuda_graphs,
            "overlap": self.best.overlap,
            "p2p_mode": self.best.p2p_mode,
            "rank": self.best.rank,
            "sweep": [_entry(size) for size in self.entries],
            "best_micro_batch": self.best_micro_batch,
            "global_batch": self.global_batch,
            "flip": nearest.to_json() if nearest else None,
            "flip_below": below,
            "flip_above": above,
            "searched": {"lowest": flips.lowest, "highest": flips.highest},
            "warnings": list(self.best.warnings),
            "notes": list(self.notes),
        }


def _entry(size: SweptSize | RefusedSize) -> dict[str, object]:
    if isinstance(size, RefusedSize):
        return {"micro_batch": size.micro_batch, "refused": size.reason}
    return attrs.asdict(size)


def checked_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Micro-batch sizes in rising order. Raises: InputError (sweep-sizes) for none, for repeated ones, for no sizes."""
    wrong = [size for size in sizes if isinstance(size, bool) or not isinstance(size, int) or size < 1]
    if not sizes or wrong or len(set(sizes)) < len(sizes):
        shown = ", ".join(str(size)[:20] for size in sizes) or "nothing"
        raise refuse("sweep-sizes", "--sweep-micro-batch", shown, "different sizes of at least 1, as in 1,2,4,8")
    return tuple(sorted(sizes))


def regime_of(microbatches: int, ranks: int, chunks: int = 1) -> str:
    """How full the pipeline is: n V against 2P (a bubble of 50 %) and 4P (25 %).

    Source: How to Think About Asymptotic Times, section 10.
    """
    if ranks == 1:
        return "no pipeline"
    if microbatches * chunks < 2 * ranks:
        return "starved"
    return "tolerable" if microbatches * chunks < 4 * ranks else "comfortable"
