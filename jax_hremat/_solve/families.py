"""Families of columns: columns that a schedule tells apart only by time and backward peak.

All columns of a family cover the same blocks, keep and hold the same, and have the same forward
peaks. What follows them is the same, so of a family a schedule takes the fastest column whose
backward fits. The families that cover the same blocks are looked at together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from jax_hremat._solve.chain import Chain
from jax_hremat._solve.column import Column

# Sets of boundary values: one row for each set, one column for each value, as booleans.
Sets = np.ndarray


class Effects(NamedTuple):
    """What the columns of several families of the same blocks meet and leave behind, for each of
    several sets of held values. The first axis is that of the families, the second that of sets.

    Attributes:
        forward_bytes: For each block, what must fit beside the stock in its forward.
        backward_bytes: For each block, what must fit beside the stock and a column's own peak in
            its backward.
        stock_bytes: What the columns add to the stock.
        held: The sets of values held after the columns.
    """

    forward_bytes: np.ndarray
    backward_bytes: np.ndarray
    stock_bytes: np.ndarray
    held: Sets


@dataclass(frozen=True, slots=True)
class Families:
    """The families whose columns cover the same blocks, and their Pareto-optimal columns.

    Attributes:
        columns: The columns, family by family, each by ascending backward peak and descending time;
            as they are without prices.
        added_ms: The time of each column.
        backward_bytes: The backward peak that each column counts.
        kept_bytes: What each family keeps, as it counts.
        forward_bytes: The forward peaks that each family counts, one column for each block.
        first: The position of the first column of each family.
        family: The family of each column.
        holds: For each family and block, the values that the columns hold as of that block or
            earlier ones.
        alone: What the columns meet and leave behind if nothing is held.
    """

    columns: tuple[Column, ...]
    added_ms: np.ndarray
    backward_bytes: np.ndarray
    kept_bytes: np.ndarray
    forward_bytes: np.ndarray
    first: np.ndarray
    family: np.ndarray
    holds: Sets
    alone: Effects

    def __len__(self) -> int:
        return len(self.first)

    @property
    def blocks(self) -> range:
        """The blocks of each column."""
        return range(self.columns[0].first, self.columns[0].last + 1)

    def column(self, position: int) -> Column:
        """A column, with what it counts."""
        family = self.family[position]
        return self.columns[position].counting(
            float(self.kept_bytes[family]),
            self.forward_bytes[family],
            float(self.backward_bytes[position]),
        )

    def effects(self, values: Values, held: Sets) -> Effects:
        """What the columns meet and leave behind for each set of held values."""
        if not held.any():
            return self.alone
        return values.effects(self.blocks, self.kept_bytes, self.forward_bytes, self.holds, held)

    @property
    def least_ms(self) -> np.ndarray:
        """The least time of each family."""
        return np.minimum.reduceat(self.added_ms, self.first)

    def fastest(self, family: np.ndarray, room_bytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each pair of a family and a number of bytes, the time and the position of the
        family's fastest column whose backward peak is no higher; the time is infinite if there is
        none."""
        # One search in the peaks of all families, those of each family above those of the last.
        apart = 2.0 + self.backward_bytes.max()
        peaks = self.backward_bytes + apart * self.family
        most = np.clip(room_bytes, -1.0, apart - 2.0) + apart * family
        position = np.searchsorted(peaks, most, side="right") - 1
        return np.where(position < self.first[family], np.inf, self.added_ms[position]), position

    def least(self, costs: np.ndarray) -> list[int]:
        """The position of the first column of least cost in each family, given one cost for each
        column."""
        return np.lexsort((costs, self.family))[self.first].tolist()

    def smallest(self) -> Families:
        """Of each family the column of least backward peak, as if it took no time."""
        count = len(self)
        return replace(
            self,
            columns=tuple(self.columns[position] for position in self.first.tolist()),
            added_ms=np.zeros(count),
            backward_bytes=self.backward_bytes[self.first],
            first=np.arange(count),
            family=np.arange(count),
        )


class Values:
    """The boundary values of a chain, and what a schedule has of them while it runs some blocks.

    Attributes:
        size_bytes: Their sizes.
        none: The empty set of them alone.
    """

    def __init__(self, chain: Chain) -> None:
        self.size_bytes = np.array([v.size_bytes for v in chain.boundary_values], float)
        self.none: Sets = np.zeros((1, self.size_bytes.size), bool)
        self._last_reader = np.array([v.readers[-1] for v in chain.boundary_values], int)
        made = np.array([v.producer for v in chain.boundary_values], int)
        blocks = np.arange(len(chain))[:, None]
        # For each block, the bytes made before it and still to be read.
        self._waiting_bytes = ((made < blocks) & (blocks <= self._last_reader)) @ self.size_bytes

    def bytes_of(self, sets: Sets) -> np.ndarray:
        """The bytes of each set."""
        return sets @ self.size_bytes

    def holds(self, column: Column) -> Sets:
        """For each block of a column, the values held as of that block or earlier ones."""
        held = np.zeros((column.last - column.first + 1, self.size_bytes.size), bool)
        for value, block in column.holds:
            held[block - column.first :, value] = True
        return held

    def effects_of(self, column: Column, held: Sets) -> Effects:
        """What one column meets and leaves behind for each set of values held before it."""
        blocks = range(column.first, column.last + 1)
        kept, forward = np.array([column.kept_bytes]), np.array([column.forward_bytes])
        return self.effects(blocks, kept, forward, self.holds(column)[None], held)

    def effects(
        self,
        blocks: range,
        kept_bytes: np.ndarray,
        forward_bytes: np.ndarray,
        holds: Sets,
        held: Sets,
    ) -> Effects:
        """What the columns of families meet and leave behind.

        Args:
            blocks: The blocks that they cover.
            kept_bytes: What each family keeps.
            forward_bytes: The forward peaks of each family, one column for each block.
            holds: For each family, what it holds, as `holds` tells.
            held: Sets of values that the columns before hold.
        """
        # For each family, set and block: the values held up to the block, and up to the one before.
        upto = held[:, None, :] | holds[:, None]
        start = np.broadcast_to(held[:, None, :], (*upto.shape[:2], 1, upto.shape[3]))
        before = np.concatenate((start, upto[:, :, :-1]), axis=2)
        ended = self._last_reader < np.arange(blocks.start, blocks.stop)[:, None]
        still = self._last_reader > blocks[-1]
        return Effects(
            self.bytes_of(before & ended) + self._waiting_bytes[blocks] + forward_bytes[:, None],
            self.bytes_of(upto),
            self.bytes_of(upto[:, :, -1] & ~still) + kept_bytes[:, None],
            upto[:, :, -1] & still,
        )
