"""What training software does to a model so that it fits its layout: padding, and copies of key/value heads."""

from __future__ import annotations

import attrs

from stepgraph.lowering.layout import Layout
from stepgraph.lowering.model import Attention, Layer, Model


def fit_model(model: Model, layout: Layout) -> tuple[Model, tuple[str, ...]]:
    """The model as its ranks run it, and a note for each change.

    Vocabulary: padded to a multiple of pad_vocab x tp (pad_vocab 1 leaves it alone). Key/value heads: with fewer than
    tp, every rank holds one, so tp / kv_heads ranks hold the same.
    Source: NVIDIA/Megatron-LM megatron/training/tokenizer (make-vocab-size-divisible-by); megatron/core/transformer/
    attention.py for the heads.
    """
    notes = []
    if layout.pad_vocab > 1:
        multiple = layout.pad_vocab * layout.tp
        padded = -(-model.vocab // multiple) * multiple
        if padded != model.vocab:
            notes.append(f"vocab: {model.vocab} padded to {padded}, a multiple of {layout.pad_vocab} x tp")
        model = attrs.evolve(model, vocab=padded)
    layers = {layer: _with_copies(layer, layout.tp) for layer in model.distinct_layers}
    if any(layer != fitted for layer, fitted in layers.items()):
        notes.append(f"kv_heads: fewer than tp = {layout.tp}; each rank holds one, copies count as work of their own")
        model = attrs.evolve(model, layers=tuple(layers[layer] for layer in model.layers))
    return model, tuple(notes)


def _with_copies(layer: Layer, tp: int) -> Layer:
    attention = layer.attention
    if not isinstance(attention, Attention) or attention.kv_heads >= tp or tp % attention.kv_heads:
        return layer
    return attrs.evolve(layer, attention=attrs.evolve(attention, kv_heads=tp))
