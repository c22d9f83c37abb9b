"""How a model is laid out on ranks: what the user said, before anything is checked."""

from __future__ import annotations

from fractions import Fraction

import attrs

from stepgraph.errors import refuse


@attrs.frozen(kw_only=True)
class Layout:
    """Parallel sizes and batch of one training step; None means "to be resolved".

    tp, cp, ep, etp, pp, dp: sizes of the tensor, context, expert, expert-tensor, pipeline and data axes; vpp: model
    chunks per pipeline stage; sp: split norms and residuals along the sequence over the tensor axis; tp_regather:
    gather the sequence again in backward instead of saving the gathered copy; micro_batch: sequences per micro-batch
    and data rank; global_batch: sequences per step; seq: tokens per sequence; recompute: activations that backward
    computes again; zero: 0 = optimizer state on every rank, 1 = split over the data axis; schedule: pipeline order
    (None: 1f1b, or interleaved when vpp > 1);
    capacity_factor: experts get this times an even share of tokens, padded or dropped (None: dropless);
    expert_imbalance: how much more than an even share the busiest rank's experts get when dropless; pad_vocab: the
    vocabulary is padded to a multiple of this times tp; pipeline_layout: stages in Megatron-LM's notation;
    first_stage_layers, last_stage_layers: layers of the outermost stages; mtp: multi-token prediction modules.
    """

    tp: int = 1
    sp: bool | None = None
    cp: int = 1
    ep: int = 1
    etp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    micro_batch: int = 1
    global_batch: int | None = None
    seq: int | None = None
    recompute: str = "none"
    zero: int = 1
    schedule: str | None = None
    tp_regather: bool | None = None
    capacity_factor: float | None = None
    expert_imbalance: float = 1.0
    pad_vocab: int = 1
    pipeline_layout: str | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    mtp: int = 0

    @property
    def gpus(self) -> int:
        """How many ranks there are: tp * cp * pp * dp (experts reuse the same ranks)."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def load(self) -> tuple[int, int]:
        """(part, whole) by which the busiest experts' tokens exceed an even share: the digits as they were written."""
        share = self.expert_imbalance if self.capacity_factor is None else self.capacity_factor
        return Fraction(str(share)).as_integer_ratio()

    @property
    def split(self) -> tuple[str | None, int | None, int | None]:
        """What was said about the pipeline's stages besides their number."""
        return self.pipeline_layout, self.first_stage_layers, self.last_stage_layers

    @property
    def n_microbatches(self) -> int:
        """Micro-batches per step and pipeline: global_batch / (dp * micro_batch).

        Raises: InputError (layout-unresolved) while the global batch is None.
        """
        if self.global_batch is None:
            raise refuse("layout-unresolved", "global_batch", "is not known yet", fix="resolve the layout first")
        return self.global_batch // (self.dp * self.micro_batch)
