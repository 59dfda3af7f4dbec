"""Families of columns: columns that a schedule tells apart only by time and backward peak.

All columns of a family cover the same blocks, keep and hold the same, and have the same forward
peaks. What follows them is the same, so of a family a schedule takes the fastest column whose
backward fits. The families that cover the same blocks are looked at together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        columns: The columns, family by family, each by ascending backward peak and descending time.
        added_ms: The time of each column.
        backward_bytes: The backward peak of each column.
        first: The position of the first column of each family.
        family: The family of each column.
        holds: For each family and block, the values that the columns hold as of that block or
            earlier ones.
        alone: What the columns meet and leave behind if nothing is held.
    """

    columns: tuple[Column, ...]
    added_ms: np.ndarray
    backward_bytes: np.ndarray
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

    @property
    def one_of_each(self) -> tuple[Column, ...]:
        """The first column of each family."""
        return tuple(self.columns[position] for position in self.first.tolist())

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
            columns=self.one_of_each,
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

    def effects(self, columns: Sequence[Column], holds: Sets, held: Sets) -> Effects:
        """What the columns of families of the same blocks meet and leave behind.

        Args:
            columns: One column of each family.
            holds: For each of them, what it holds, as `holds` tells.
            held: Sets of values that the columns before hold.
        """
        blocks = range(columns[0].first, columns[0].last + 1)
        # For each family, set and block: the values held up to the block, and up to the one before.
        upto = held[:, None, :] | holds[:, None]
        start = np.broadcast_to(held[:, None, :], (*upto.shape[:2], 1, upto.shape[3]))
        before = np.concatenate((start, upto[:, :, :-1]), axis=2)
        ended = self._last_reader < np.arange(blocks.start, blocks.stop)[:, None]
        still = self._last_reader > blocks[-1]
        forward_bytes = np.array([column.forward_bytes for column in columns], float)
        kept_bytes = np.array([column.kept_bytes for column in columns], float)
        return Effects(
            self.bytes_of(before & ended) + self._waiting_bytes[blocks] + forward_bytes[:, None],
            self.bytes_of(upto),
            self.bytes_of(upto[:, :, -1] & ~still) + kept_bytes[:, None],
            upto[:, :, -1] & still,
        )


def families(columns: Iterable[Column], values: Values, num_blocks: int) -> list[list[Families]]:
    """The families of columns, by first block, then by last block."""
    alike: dict[tuple[int, int], dict[object, list[Column]]] = {}
    for p in columns:
        key = p.holds, p.kept_bytes, p.forward_bytes
        alike.setdefault((p.first, p.last), {}).setdefault(key, []).append(p)
    found: list[list[Families]] = [[] for _ in range(num_blocks)]
    for (first, _), some in sorted(alike.items()):
        found[first].append(
            _together([_pareto_optimal(family) for family in some.values()], values)
        )
    return found


def _pareto_optimal(family: Iterable[Column]) -> list[Column]:
    chosen: list[Column] = []
    for p in sorted(family, key=lambda p: (p.backward_bytes, p.added_ms, p.options)):
        if not chosen or p.added_ms < chosen[-1].added_ms:
            chosen.append(p)
    return chosen


def _together(some: Sequence[Sequence[Column]], values: Values) -> Families:
    """The families of the same blocks."""
    columns = tuple(column for family in some for column in family)
    counts = [len(family) for family in some]
    one_of_each = [family[0] for family in some]
    holds = np.array([values.holds(column) for column in one_of_each])
    return Families(
        columns=columns,
        added_ms=np.array([p.added_ms for p in columns]),
        backward_bytes=np.array([p.backward_bytes for p in columns], float),
        first=np.cumsum([0, *counts[:-1]]),
        family=np.repeat(np.arange(len(some)), counts),
        holds=holds,
        alone=values.effects(one_of_each, holds, values.none),
    )
