"""Columns of the root program: single blocks and groups of blocks, each in chosen options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

# The most blocks in a group.
MAX_GROUP = 8
MIB = 2.0**20


@dataclass(frozen=True, slots=True)
class Column:
    """A block in one option, or a group of blocks with one option each.

    Attributes:
        first: First block.
        last: Last block.
        options: Position of the option of each block.
        added_ms: Time above that of the fastest options; a group's recompute is included.
        kept_bytes: Bytes kept until the column's backward, boundary values not counted.
        forward_bytes: Peak of each block's forward, plus what the group keeps of the blocks before.
        backward_bytes: Peak of the column's backward, including pending cotangents and, for a
            group, everything held since its recompute.
        holds: (boundary value, block) pairs: the column holds the value, from the forward on, for
            the backward of that block.
        keeps: What a group keeps of its blocks, in the form of `Selection.keeps`.
        inner: The groups inside a group, in the order of `Selection.groups`.
    """

    first: int
    last: int
    options: tuple[int, ...]
    added_ms: float
    kept_bytes: int
    forward_bytes: tuple[int, ...]
    backward_bytes: int
    holds: tuple[tuple[int, int], ...]
    keeps: tuple[tuple[int, int], ...] = ()
    inner: tuple[tuple[int, int], ...] = ()

    def counting(
        self, kept_bytes: float, forward_bytes: Iterable[float], backward_bytes: float
    ) -> Column:
        """The same column, with what it counts at prices."""
        return replace(
            self,
            kept_bytes=int(kept_bytes),
            forward_bytes=tuple(map(int, forward_bytes)),
            backward_bytes=int(backward_bytes),
        )

    def moved(self, by: int, value_of: Mapping[int, int]) -> Column:
        """The same column of equal blocks, `by` blocks later, given their values for those here."""
        return replace(
            self,
            first=self.first + by,
            last=self.last + by,
            holds=tuple((value_of[v], block + by) for v, block in self.holds),
            keeps=tuple((block + by, option) for block, option in self.keeps),
            inner=tuple((a + by, b + by) for a, b in self.inner),
        )
