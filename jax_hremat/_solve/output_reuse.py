"""Output-buffer reuse: XLA places other buffers in the memory of a result before it is written.

The gradient of a weight has its memory allocated for the whole step, but is written only when the
backward reaches the first block that reads the weight. Until then its memory may hold a residual,
or any other buffer that is dead by then. Where weights are as large as activations, most of a
step's residuals are placed there.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from operator import and_, attrgetter
from typing import NamedTuple

from jax_hremat._cost.option_cost import LiveRange
from jax_hremat._partition.blocks import Partition
from jax_hremat._solve.lifetimes import Timeline
from jax_hremat._trace.graph import Graph

# Places that are looked at together.
_CHUNK = 16


class Result(NamedTuple):
    """A gradient that the step returns.

    Attributes:
        block: The block in whose backward the gradient is complete.
        size_bytes: Size of the gradient.
    """

    block: int
    size_bytes: int


def gradients_of(graph: Graph, partition: Partition) -> tuple[Result, ...]:
    """Gradients of the program's arguments, in their order, each complete in the backward of the
    first block that reads the argument."""
    block_of = partition.block_of
    return tuple(
        Result(min(block_of[op] for op in value.users), value.size_bytes)
        for value in graph.values
        if value.kind == "argument" and value.active and value.users
    )


class Placement(NamedTuple):
    """Which buffers of a step are in the memory of results.

    Attributes:
        reused_bytes: For each position of the step, the bytes of those that are.
        others: The buffers that are not.
    """

    reused_bytes: Sequence[int]
    others: Sequence[LiveRange]


def placed_in_results(timeline: Timeline, results: Sequence[Result], num_blocks: int) -> Placement:
    """Place the buffers of a step in the memory of results: the largest buffer first, of equal ones
    that made first, each in the smallest result that it fits in and that no other buffer occupies
    meanwhile, of equal ones the last in the order of the program's outputs, as XLA's buffer
    assignment does."""
    begins = timeline.begins
    end = begins[-1]
    # The positions from which on each result holds itself.
    written: dict[int, list[int]] = {}
    for result in sorted(reversed(results), key=lambda r: r.size_bytes):
        at = begins[2 * num_blocks - 1 - result.block]
        written.setdefault(result.size_bytes, []).append(_positions(at, end - 1))
    sizes = [*written]
    places = [*map(_Places, written.values())]
    change = [0] * (end + 1)
    others: list[LiveRange] = []
    in_order = sorted(timeline.buffers, key=attrgetter("first", "last", "of_constants"))
    for buffer in sorted(in_order, key=attrgetter("size_bytes"), reverse=True):
        size, first, last, _ = buffer
        lives = _positions(first, last)
        for some in itertools.islice(places, bisect_left(sizes, size), None):
            if some.take(lives):
                change[first] += size
                change[last + 1] -= size
                break
        else:
            others.append(buffer)
    return Placement([*accumulate(change[:-1])], others)


class _Places:
    """The memory of results of one size, given the positions at which each is taken, as bits."""

    def __init__(self, taken: Sequence[int]) -> None:
        self._chunks = [[*taken[i : i + _CHUNK]] for i in range(0, len(taken), _CHUNK)]
        # Positions at which all of a chunk are taken, and at which all are; there may be more.
        self._chunk_taken = [reduce(and_, chunk) for chunk in self._chunks]
        self._all_taken = reduce(and_, self._chunk_taken)

    def take(self, lives: int) -> bool:
        """Whether one of them is free throughout some positions; the first that is, is taken."""
        if self._all_taken & lives:
            return False
        for number, chunk in enumerate(self._chunks):
            if self._chunk_taken[number] & lives:
                continue
            for place, taken in enumerate(chunk):
                if not taken & lives:
                    chunk[place] = taken | lives
                    return True
            self._chunk_taken[number] = reduce(and_, chunk)
        self._all_taken = reduce(and_, self._chunk_taken)
        return False


def _positions(first: int, last: int) -> int:
    """The positions from one to another, as bits."""
    return (1 << last + 1) - (1 << first)
