"""The default partitioner: cut at the local minima of the width."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from jax_hremat._partition.blocks import Block, make_block
from jax_hremat._partition.width import narrow_cuts, narrow_ends, widths
from jax_hremat._trace.graph import Graph

# A position is a local minimum if the width on both sides rises to this many times the width there.
_PROMINENCE = 1.2
# At least this many positions in a row without a peak between them are a stack of layers.
_STACK = 3


def partition_by_width(graph: Graph) -> list[int]:
    """Cut the program at the local minima of its width.

    The width at a position is the bytes of the values made before it and read after it, without
    long skip connections. Between any two heavy operations (matrix products, convolutions,
    loops, opaque calls) only the narrowest position is considered. Such a position is a boundary
    if the width rises by the factor `_PROMINENCE` on both sides; where the width stays low over
    several of them, all of them are boundaries. The rule is local, so equal parts of a program are
    cut alike without a search for repetition.

    A stack of plain dense layers has no maximum and so no minimum. It is cut before and after the
    element-wise operations between the layers, such as an activation.
    """
    width, narrowest = widths(graph), narrow_cuts(graph)
    inner = _minima(width, narrowest)
    if not inner and _is_plain_stack(width, narrowest):
        inner = [p for p in narrow_ends(graph) if p > 0]
    cuts = [0, *inner, len(graph.operations)]
    blocks = [make_block(graph, a, b) for a, b in itertools.pairwise(cuts)]
    return [block.start for block in _split_off_known(graph, blocks)]


def _split_off_known(graph: Graph, blocks: Sequence[Block]) -> list[Block]:
    """Split blocks that begin or end with a copy of a repeated block.

    The first and the last layer of a stack often share a block with the operations before or after
    the stack.
    """
    count = Counter(b.fingerprint for b in blocks)
    repeated = {b.fingerprint: len(b) for b in blocks if count[b.fingerprint] > 1}
    result: list[Block] = []
    for block in blocks:
        parts = [block]
        for fingerprint, length in repeated.items():
            if length >= len(block) or block.fingerprint in repeated:
                continue
            head = make_block(graph, block.start, block.start + length)
            tail = make_block(graph, block.stop - length, block.stop)
            if tail.fingerprint == fingerprint:
                parts = [make_block(graph, block.start, tail.start), tail]
                break
            if head.fingerprint == fingerprint:
                parts = [head, make_block(graph, head.stop, block.stop)]
                break
        result += parts
    return result


def _minima(width: Sequence[int], narrowest: Sequence[int]) -> list[int]:
    """Positions of the prominent minima of the width, in order: for each minimum its narrowest
    position, or all positions that are about as narrow if they are a stack."""
    found: list[int] = []
    # Positions since the width last fell; empty while it has only risen.
    fallen: list[int] = []
    high = 0
    for position in narrowest:
        here = width[position]
        low = min((width[p] for p in fallen), default=math.inf)
        if fallen and here >= _PROMINENCE * low:
            floor = [p for p in fallen if width[p] <= _PROMINENCE * low]
            found += floor if len(floor) >= _STACK else [min(floor, key=lambda p: width[p])]
            fallen, high = [], here
        elif fallen or high >= _PROMINENCE * here:
            fallen.append(position)
        else:
            high = max(high, here)
    # After the last heavy operation comes the loss, where the width does not rise again: no cut.
    return [v for v in found if v > 0]


def _is_plain_stack(width: Sequence[int], narrowest: Sequence[int]) -> bool:
    """Whether there are several layers and no peak of the width: no position where it is higher, by
    the factor `_PROMINENCE`, than at some position before and at some position after."""
    heights = [width[p] for p in narrowest if p > 0]
    before = accumulate(heights, min)
    after = reversed(list(accumulate(reversed(heights), min)))
    peak = any(h >= _PROMINENCE * max(b, a) for h, b, a in zip(heights, before, after, strict=True))
    return len(heights) >= _STACK and not peak
