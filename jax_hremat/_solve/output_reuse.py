"""Memory of results that are not there yet, in which XLA puts other buffers.

The gradient of a weight has its memory for the whole step, and is written when the backward comes
to the first block that reads the weight. Until then a residual, or anything else that is gone by
then, may lie there. Where weights are as large as activations, that is most of a step's residuals.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from jax_hremat._partition.blocks import Partition
from jax_hremat._trace.graph import Graph


class Result(NamedTuple):
    """A gradient.

    Attributes:
        block: The block in whose backward it is complete.
        size_bytes: Its bytes.
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
    """Bytes of the buffers that find a place in idle results: the largest first, each in the
    smallest that it fits in, as XLA's buffer assignment does.

    Unchecked: that a buffer is gone before the result is written, and that another one of another
    time may share its place.
    """
    idle = sorted(idle_bytes)
    reused = 0
    for size in sorted(sizes_bytes, reverse=True) if idle else ():
        place = bisect_left(idle, size)
        if place < len(idle):
            del idle[place]
            reused += size
    return reused
