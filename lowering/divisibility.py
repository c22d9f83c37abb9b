"""What has to divide what: a filled-in layout against a model, each refusal with the nearest values that work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from stepgraph.errors import Problem
from stepgraph.lowering.layout import Layout
from stepgraph.lowering.model import Attention, Layer, Mlp, Model
from stepgraph.lowering.nearest import divisors, either, listed, multiples_around, nearest

_WORDS = {"heads": "heads", "kv-heads": "key/value heads", "ffn": "columns of the MLP", "vocab": "vocabulary entries"}


USUAL_PADDING = 128
"""What a refusal offers. Source: NVIDIA/Megatron-LM megatron/training/arguments.py, make-vocab-size-divisible-by."""


def padding_problems(layout: Layout, model: Model) -> Iterator[Problem]:
    """A padding that is longer than the vocabulary; the model is the one that is not padded yet."""
    if layout.pad_vocab > model.vocab:
        what = f"a multiple of {layout.pad_vocab} for a vocabulary of {model.vocab}"
        yield Problem(
            "pad-vocab", "pad_vocab", what, f"1 to {model.vocab}", f"{min(USUAL_PADDING, model.vocab)} is usual"
        )


def _switch_problems(layout: Layout, model: Model) -> Iterator[Problem]:
    if layout.sp and layout.tp == 1:
        yield Problem("sp-needs-tp", "sp", "on without a tensor axis to split over", "tp of 2 or more, or sp off")
    if layout.tp_regather and not layout.sp:
        yield Problem("regather-needs-sp", "tp_regather", "on without sp: there is nothing to gather", "sp on, or off")


def _tp_problems(layout: Layout, model: Model) -> Iterator[Problem]:
    """What the tensor axis splits, each width against tp."""
    widths = {
        "heads": sorted({layer.attention.heads for layer in model.distinct_layers}),
        "ffn": sorted({mlp.ffn for layer in model.distinct_layers for mlp in _split_mlps(layer)}),
        "vocab": [model.vocab],
    }
    common = math.gcd(*(width for group in widths.values() for width in group))
    grouped = (layer.attention for layer in model.distinct_layers if isinstance(layer.attention, Attention))
    kv_widths = sorted({attention.kv_heads for attention in grouped})
    fitting = [tp for tp in divisors(common) if all(_kv_heads_fit(width, tp) for width in kv_widths)]
    for name, group in widths.items():
        yield from (_tp_problem(name, width, layout.tp, fitting) for width in group if width % layout.tp)
    yield from (_kv_problem(width, layout.tp, fitting) for width in kv_widths if not _kv_heads_fit(width, layout.tp))


def _split_mlps(layer: Layer) -> tuple[Mlp, ...]:
    """The feed-forward parts of a layer that the tensor axis splits: the MLP, or the shared expert."""
    if isinstance(layer.mlp, Mlp):
        return (layer.mlp,)
    return (layer.mlp.shared,) if layer.mlp.shared else ()


def _kv_heads_fit(kv_heads: int, tp: int) -> bool:
    """Ranks share the key/value heads evenly, or each head is repeated on as many ranks as every other."""
    return kv_heads % tp == 0 or tp % kv_heads == 0


def _tp_problem(name: str, width: int, tp: int, fitting: list[int]) -> Problem:
    what = f"tp = {tp} does not divide {width} {_WORDS[name]}"
    fix = _nearest_tp(tp, fitting)
    if name == "vocab":
        fix += f"; or pad the vocabulary: --pad-vocab {min(USUAL_PADDING, width)}"
    return Problem(f"tp-{name}", "tp", what, f"tp that divides {width}: {listed(divisors(width))}", fix)


def _kv_problem(width: int, tp: int, fitting: list[int]) -> Problem:
    what = f"tp = {tp} neither divides {width} {_WORDS['kv-heads']} nor is a multiple of them"
    expected = f"a multiple of {width}, or tp that divides it: {listed(divisors(width))}"
    return Problem("tp-kv-heads", "tp", what, expected, _nearest_tp(tp, fitting))


def _nearest_tp(tp: int, fitting: list[int]) -> str:
    return f"nearest tp that fits the whole model: {either(nearest(fitting, tp))}"


def _seq_problems(layout: Layout, model: Model) -> Iterator[Problem]:
    seq = layout.seq or 1
    if layout.sp and seq % layout.tp:
        what = f"{seq} tokens do not divide by tp = {layout.tp}, which sp splits them by"
        near = [value for value in multiples_around(seq, layout.tp) if _fits(value, model)]
        yield Problem("sp-seq", "seq", what, f"a multiple of {layout.tp}", f"nearest: {either(near)}" if near else "")
    if not _fits(seq, model):
        what = f"{seq} tokens are more than the {model.max_positions} rows of the position table"
        yield Problem("seq-positions", "seq", what, fix=f"nearest possible: {model.max_positions}")


def _batch_problems(layout: Layout, model: Model) -> Iterator[Problem]:
    batch, share = layout.global_batch or 1, layout.dp * layout.micro_batch
    if batch % share:
        what = (
            f"{batch} sequences are not a multiple of dp * micro_batch = {layout.dp} * {layout.micro_batch} = {share}"
        )
        near = either(multiples_around(batch, share))
        yield Problem("batch-multiple", "global_batch", what, f"a multiple of {share}", f"nearest: {near}")


def _fits(seq: int, model: Model) -> bool:
    return seq <= model.max_positions or not model.learned_positions


CHECKS: tuple[Callable[[Layout, Model], Iterable[Problem]], ...] = (
    _switch_problems,
    _tp_problems,
    _seq_problems,
    _batch_problems,
)
"""Every check of a filled-in layout against a model."""
