"""Output-buffer reuse: XLA places other buffers in the memory of a result before it is written.

The gradient of a weight has its memory allocated for the whole step, but is written only when the
backward reaches the first block that reads the weight. Until then its memory may hold a residual,
or any other buffer that is dead by then. Where weights are as large as activations, most of a
step's residuals are placed there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from jax_hremat._partition.blocks import Partition
from jax_hremat._trace.graph import Graph


class Result(NamedTuple):
    """A gradient that the step returns.

    Attributes:
        block: The block in whose backward the gradient is complete.
        size_bytes: Size of the gradient.
    """

    block: int
    size_bytes: int


def gradients_of(graph: Graph, partition: Partition) -> tuple[Result, ...]:
    """Gradients of the program's arguments, each complete in the backward of the first block that
    reads the argument."""
    block_of = {
        op: index
        for index, block in enumerate(partition.blocks)
        for op in range(block.start, block.stop)
    }
    return tuple(
        Result(min(block_of[op] for op in value.users), value.size_bytes)
        for value in graph.values
        if value.kind == "argument" and value.active and value.users
    )


def reused_bytes(sizes_bytes: Iterable[int], idle_bytes: Iterable[int]) -> int:
    """Bytes of the buffers placed in idle results: the largest buffer first, each in the smallest
    result that it fits in, as XLA's buffer assignment does.

    Unchecked: that a buffer is dead before the result is written, and that a buffer of another time
    may share its place.
    """
    idle = sorted(idle_bytes)
    reused = 0
    for size in sorted(sizes_bytes, reverse=True) if idle else ():
        place = bisect_left(idle, size)
        if place < len(idle):
            del idle[place]
            reused += size
    return reused
