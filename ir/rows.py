"""What a row of the op table can say, and the counts that follow from it."""

from __future__ import annotations

import enum
from math import prod

import attrs

from stepgraph.ir.op import Op


class Rule(enum.Enum):
    """Which cost rule an op is under."""

    GEMM = "gemm"
    ATTENTION = "attention"
    HBM = "hbm"
    TOPK = "topk"
    COLLECTIVE = "collective"
    POINT_TO_POINT = "p2p"
    FREE = "free"  # a view: nothing runs


class Flops(enum.Enum):
    """How FLOPs follow from the loop nest; a multiply-add is 2.

    CONTRACTION: 2 x the product of all letters, of which routed operands have a fraction. ATTENTION: 2 b h (c + w)
    per pair of a query and a key that sees it (two matmuls, of key width c and value width w): all s t pairs, half of
    them when causal, fewer in windows and chunks. ATTENTION_BACKWARD: 2 b h (3 c + 2 w) per pair, because a flash kernel
    computes the scores once more: three matmuls of width c (scores, dQ, dK) and two of width w (dP, dV). ADAMW: 11 per parameter. NONE: vector work, which the HBM rule stands for.
    """

    CONTRACTION = "2 x letters"
    ATTENTION = "2 b h (c + w) pairs"
    ATTENTION_BACKWARD = "2 b h (3 c + 2 w) pairs"
    ADAMW = "11 p"
    NONE = "-"


@attrs.frozen
class Grad:
    """One backward op of a kind.

    role: "dx" or "dw". kind: the backward op's row. reads: its operands, in order: "dy<i>" the gradient of output
    i, "x<i>" an operand of the forward op, "y<i>" an output of it. of: the operands whose gradients it yields.
    """

    role: str
    kind: str
    reads: tuple[str, ...]
    of: tuple[int, ...]


@attrs.frozen
class Row:
    """What one kind of op computes.

    spec: its loop nest, einsum-like; "" means that the operands' own letters say it. whole: letters that no axis may
    split. inner: letters that may be split although the op then pays collectives of its own. linear: a pending sum
    may pass through. commutative: operands may change places. hands_on: its result is its first operand, as it was.
    awaited: all ranks wait for its result, although no collective of the graph says so. passes: operands that receive the output's gradient as it is. spreads: a result may have letters
    of no operand, as the gradient of what a sum or a view took away has. grads: its backward ops.
    """

    kind: str
    rule: Rule
    meaning: str
    source: str
    spec: str = ""
    whole: str = ""
    inner: str = ""
    reductions: tuple[str, ...] = ()
    linear: bool = False
    commutative: bool = False
    hands_on: bool = False
    awaited: bool = False
    flops: Flops = Flops.NONE
    passes: tuple[int, ...] = ()
    spreads: bool = False
    grads: tuple[Grad, ...] = ()

    @property
    def is_view(self) -> bool:
        """Whether its results are its operands' bytes under other names."""
        return self.rule is Rule.FREE or self.hands_on

    @property
    def needs_gradient(self) -> bool:
        """Whether autograd has something to emit for it."""
        return bool(self.grads or self.passes)


Spec = tuple[tuple[str, ...], tuple[str, ...]]
"""Letters of each operand and of each result."""


def spec_of(op: Op, row: Row) -> Spec:
    """The op's loop nest: the row's, or else the letters of its tensors."""
    if not row.spec:
        return tuple(t.dims for t in op.inputs), tuple(t.dims for t in op.outputs)
    left, right = row.spec.split("->")
    return tuple(left.split(",")), tuple(right.split(","))


def extents(op: Op, row: Row) -> dict[str, int]:
    """Trip count of every letter on one rank.

    Where operands disagree (grouped-query attention has fewer key heads than query heads) the first operand counts.
    """
    reads, writes = spec_of(op, row)
    sizes: dict[str, int] = {}
    for letters, tensor in zip(reads + writes, op.inputs + op.outputs, strict=True):
        for letter, size in zip(letters, tensor.local_shape, strict=True):
            sizes.setdefault(letter, size)
    return sizes


def attention_pairs(op: Op, queries: int, keys: int) -> int:
    """Pairs of a query and a key that it sees, for one sequence and head.

    All: s t. Causal: half. A window of W keys, causal: W s - W^2 / 2. Chunks of C, causal: C^2 / 2 in each. The
    diagonal counts half, as in the usual s^2 / 2.
    """
    if not op.attr("causal"):
        return queries * keys
    window, chunk = int(op.attr("window") or 0), int(op.attr("chunk") or 0)
    if window and window < keys:
        return (window * queries - window * window // 2) if queries == keys else queries * window
    if chunk and chunk < keys:
        whole, rest = divmod(keys, chunk)
        return (whole * chunk * chunk + rest * rest) * queries // keys // 2
    return queries * keys // 2


def flops_of(op: Op, row: Row) -> int:
    """FLOPs that one rank executes for the op.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198) appendix A for matmuls and attention; Dao et al. 2022
    (arXiv:2205.14135) for the recomputation in flash attention's backward.
    """
    if row.flops is Flops.NONE:
        return 0
    sizes = extents(op, row)
    if row.flops in (Flops.ATTENTION, Flops.ATTENTION_BACKWARD):
        c, w = sizes["c"], sizes["w"]
        widths = c + w if row.flops is Flops.ATTENTION else 3 * c + 2 * w
        return 2 * sizes["b"] * sizes["h"] * widths * attention_pairs(op, sizes["s"], sizes["t"])
    part, whole = op.inputs[0].fraction
    per_point = 11 if row.flops is Flops.ADAMW else 2
    return -(-per_point * prod(sizes.values()) * part // whole)
