"""The default partitioner: cut at the valleys of the width."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jax_hremat._partition.blocks import Block, make_block
from jax_hremat._partition.width import narrow_cuts, widths
from jax_hremat._program.graph import Graph

# A boundary is a valley of the width if the width on either side rises to this many times it.
_PROMINENCE = 1.2


def partition_by_width(graph: Graph) -> list[int]:
    """Cut the program at the valleys of its width.

    The width at a position is the bytes of the values made before it and read after it, long
    skip connections left out. Between any two heavy operations (matrix products, convolutions,
    loops, opaque calls) the narrowest position stands for all; of those, the ones where the
    width rises by `_PROMINENCE` on both sides are the boundaries. The rule only looks at what
    is near, so equal stretches of a program are cut alike and need no search for repetition.
    """
    cuts = [0, *_valleys(widths(graph), narrow_cuts(graph)), len(graph.operations)]
    blocks = [make_block(graph, a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    return [block.start for block in _split_off_known(graph, blocks)]


def _split_off_known(graph: Graph, blocks: Sequence[Block]) -> list[Block]:
    """Split blocks that begin or end with a copy of a repeated block.

    The first and the last layer of a stack often stand in one block with what is before or
    after the stack.
    """
    count = Counter(b.fingerprint for b in blocks)
    repeated = {b.fingerprint: len(b) for b in blocks if count[b.fingerprint] > 1}
    result: list[Block] = []
    for block in blocks:
        pieces = [block]
        for fingerprint, length in repeated.items():
            if length >= len(block) or block.fingerprint in repeated:
                continue
            head = make_block(graph, block.start, block.start + length)
            tail = make_block(graph, block.stop - length, block.stop)
            if tail.fingerprint == fingerprint:
                pieces = [make_block(graph, block.start, tail.start), tail]
                break
            if head.fingerprint == fingerprint:
                pieces = [head, make_block(graph, head.stop, block.stop)]
                break
        result += pieces
    return result


def _valleys(width: Sequence[int], narrowest: Sequence[int]) -> list[int]:
    """Positions of the prominent minima of the width, in order."""
    valleys: list[int] = []
    low: int | None = None
    high = 0
    for position in narrowest:
        here = width[position]
        if low is not None and here >= _PROMINENCE * width[low]:
            valleys.append(low)
            low, high = None, here
        elif low is None and high >= _PROMINENCE * here:
            low = position
        elif low is not None and here < width[low]:
            low = position
        if low is None:
            high = max(high, here)
    # After the last heavy operation comes the loss: nothing rises again, nothing is cut.
    return [v for v in valleys if v > 0]
