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


class Buffer(NamedTuple):
    """A buffer, alive at consecutive moments of the step: all forwards, then all backwards.

    Attributes:
        size_bytes: Its size.
        first: The first moment at which it is counted.
        last: The last one.
        end: The last moment at which its memory is not free; what is read in its own block's
            backward is counted there among the buffers of that backward.
    """

    size_bytes: int
    first: int
    last: int
    end: int


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


def reused_bytes(
    buffers: Iterable[Buffer], results: Iterable[Result], num_blocks: int
) -> list[int]:
    """For each moment, all forwards and then all backwards, the bytes of the buffers placed in the
    memory of results: the largest buffer first, of equal ones that made first, each in the smallest
    result that it fits in and that no other buffer occupies meanwhile, as XLA's buffer assignment
    does.

    Unchecked: buffers that live within one moment only in part are taken to live throughout it.
    """
    num_moments = 2 * num_blocks
    ordered = sorted(results, key=lambda r: (r.size_bytes, r.block))
    sizes = [r.size_bytes for r in ordered]
    # For each result the moments at which its memory is taken, as bits: at first those from which
    # on it holds the result.
    taken = [_moments(num_moments - 1 - r.block, num_moments - 1) for r in ordered]
    reused = [0] * num_moments
    for buffer in sorted(buffers, key=lambda b: (-b.size_bytes, b.first, b.last, b.end)):
        lives = _moments(buffer.first, buffer.end)
        fitting = range(bisect_left(sizes, buffer.size_bytes), len(sizes))
        place = next((place for place in fitting if not taken[place] & lives), None)
        if place is not None:
            taken[place] |= lives
            for moment in range(buffer.first, buffer.last + 1):
                reused[moment] += buffer.size_bytes
    return reused


def _moments(first: int, last: int) -> int:
    """The moments from one to another, as bits."""
    return (1 << last + 1) - (1 << first)
