"""policies: what a framework overlaps, as data. One word per mechanism, one source per word."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import attrs

from stepgraph.errors import InputError, Problem, did_you_mean

_ARGUMENTS = "NVIDIA/Megatron-LM megatron/training/arguments.py"


@attrs.frozen
class Word:
    """One mechanism that a policy can name.

    word: as in `--overlap`; field: which field of `Policy` it sets; hides: what runs beside what; source: where that
    is decided.
    """

    word: str
    field: str
    hides: str
    source: str


WORDS: tuple[Word, ...] = (
    Word(
        "tp-backward",
        "tp_backward",
        "backward of a column-parallel linear: input all-gather beside dgrad, dgrad reduce-scatter beside wgrad",
        "NVIDIA/Megatron-LM megatron/core/tensor_parallel/layers.py",
    ),
    Word(
        "overlap-grad-reduce",
        "grad_reduce",
        "gradient reduce-scatter (all-reduce with ZeRO 0) of a bucket beside the backward of the last micro-batch",
        f"{_ARGUMENTS} and megatron/core/distributed/param_and_grad_buffer.py",
    ),
    Word(
        "overlap-param-gather",
        "param_gather",
        "parameter all-gather of the next bucket beside the first micro-batch's forward",
        f"{_ARGUMENTS} and megatron/core/distributed/param_and_grad_buffer.py",
    ),
    Word(
        "tp-comm-overlap",
        "tp_comm",
        "tensor-parallel collectives in chunks beside the linear that they belong to",
        "NVIDIA/TransformerEngine transformer_engine/pytorch/module/base.py",
    ),
    Word(
        "overlap-moe-expert-parallel-comm",
        "expert_comm",
        "dispatch and combine beside the other micro-batch's attention and experts",
        "NVIDIA/Megatron-LM megatron/core/models/common/model_chunk_schedule_plan.py",
    ),
    Word(
        "moe-shared-expert-overlap",
        "shared_expert",
        "dispatch beside the shared expert's first linear, combine beside its second",
        "NVIDIA/Megatron-LM megatron/core/transformer/moe/shared_experts.py",
    ),
    Word(
        "fsdp-prefetch",
        "sharded",
        "parameters of the next unit beside this one, gradients of the last one beside backward, on one communicator",
        "pytorch/pytorch torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py",
    ),
    Word(
        "cp-ring",
        "ring",
        "keys and values of the next step beside this step's attention",
        "NVIDIA/TransformerEngine transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py",
    ),
)
"""Every mechanism, in the order in which they are listed to people."""

BY_WORD = MappingProxyType({word.word: word for word in WORDS})
"""Mechanisms by word."""

SETS = MappingProxyType(
    {
        "none": (),
        "megatron": ("tp-backward", "overlap-grad-reduce", "overlap-param-gather"),
    }
)
"""Words that stand for several. `megatron` has what every Megatron-LM run can have, whatever its layout."""

SMS = MappingProxyType({"nccl": 16, "pipeline": 16, "ring": 0})
"""Multiprocessors that a collective takes from compute, by method.

nccl: 16 channels reach peak bandwidth; Transformer Engine's bulk overlap takes as many. pipeline and ring: its other
methods; a ring copies by copy engine. Source: NVIDIA/nccl src/enqueue.cc; NVIDIA/TransformerEngine transformer_engine/pytorch/module/base.py.
"""


@attrs.frozen
class Policy:
    """What is overlapped.

    name: as it was asked for. The flags are those of `WORDS`, which has the source of each. asked: mechanisms that
    were named one by one, and so have to fit the layout; those of a set apply where there is something to overlap.
    contention: whether collectives that run beside compute slow it down.
    """

    name: str = "none"
    tp_backward: bool = False
    grad_reduce: bool = False
    param_gather: bool = False
    tp_comm: bool = False
    expert_comm: bool = False
    shared_expert: bool = False
    sharded: bool = False
    ring: bool = False
    asked: tuple[str, ...] = ()
    contention: bool = True

    @property
    def words(self) -> tuple[str, ...]:
        """The mechanisms in effect, as words."""
        return tuple(word.word for word in WORDS if getattr(self, word.field))

    @property
    def overlaps(self) -> bool:
        """Whether anything is overlapped at all."""
        return bool(self.words)


NONE = Policy()
"""Every collective waits for the op before it, and the next op for the collective."""


def parse_policy(text: str) -> Policy:
    """A policy from words and sets with commas between: `none`, `megatron`, `megatron,tp-comm-overlap`.

    Megatron-LM overlaps the backward of column-parallel linears without a flag, so tp-backward is part of everything but
    `none`. Raises: InputError (overlap) for unknown words, with suggestions, and for `none` beside others.
    """
    words = tuple(dict.fromkeys(word.strip().lower() for word in text.split(",")))
    problems = [_unknown(word) for word in words if word not in SETS and word not in BY_WORD]
    if "none" in words and len(words) > 1:
        problems.append(Problem("overlap", "--overlap", f"'none' beside {', '.join(words)}", "none alone"))
    if problems:
        raise InputError(problems)
    if words == ("none",):
        return NONE
    always = {"tp-backward"} if any(not word.startswith(("fsdp", "cp-")) for word in words) else set()
    chosen = always.union(*(SETS.get(word, (word,)) for word in words))
    asked = tuple(word for word in words if word in BY_WORD)
    flags: dict[str, Any] = {word.field: True for word in WORDS if word.word in chosen}
    return Policy(",".join(words), asked=asked, **flags)


def _unknown(word: str) -> Problem:
    known = (*SETS, *BY_WORD)
    return Problem("overlap", "--overlap", f"no policy {word!r}", ", ".join(known), did_you_mean(word, known))
