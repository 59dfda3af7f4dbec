"""Families of columns: columns that a schedule tells apart only by time and backward peak.

All columns of a family cover the same blocks, keep and hold the same, and have the same forward
peaks. What follows them is the same, so of a family a schedule takes the fastest column whose
backward fits.
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
    """What a family's columns meet and leave behind, for each of several sets of held values.

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
class Family:
    """The Pareto-optimal columns of a family, by ascending backward peak and descending time.

    Attributes:
        columns: The columns.
        added_ms: Their times.
        backward_bytes: Their backward peaks.
        holds: For each block, the values that the columns hold as of that block or earlier ones.
        alone: What the columns meet and leave behind if nothing is held.
    """

    columns: tuple[Column, ...]
    added_ms: np.ndarray
    backward_bytes: np.ndarray
    holds: Sets
    alone: Effects

    @property
    def blocks(self) -> range:
        """The blocks of each column."""
        return range(self.columns[0].first, self.columns[0].last + 1)

    def fastest(self, room_bytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each number of bytes, the time and the position of the fastest column whose backward
        peak is no higher; the time is infinite if there is none."""
        position = np.searchsorted(self.backward_bytes, room_bytes, side="right") - 1
        return np.where(position < 0, np.inf, self.added_ms[position]), position

    def needs_no_more(self, other: Family) -> bool:
        """Whether the column of least backward peak fits wherever that of another family of the
        same blocks does."""
        own, others = self.columns[0], other.columns[0]
        return (
            own.kept_bytes <= others.kept_bytes
            and own.backward_bytes <= others.backward_bytes
            and all(a <= b for a, b in zip(own.forward_bytes, others.forward_bytes, strict=True))
            and not (self.holds & ~other.holds).any()
        )


class Values:
    """The boundary values of a chain, and what a schedule has of them while it runs a family.

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

    def effects(self, column: Column, holds: Sets, held: Sets) -> Effects:
        """What a column, and all of its family, meet and leave behind.

        Args:
            column: The column.
            holds: What it holds, as `holds` tells.
            held: Sets of values that the columns before hold.
        """
        blocks = range(column.first, column.last + 1)
        # For each set and block: the values held up to the block, and up to the block before.
        upto = held[:, None, :] | holds
        before = np.concatenate((held[:, None, :], upto[:, :-1]), axis=1)
        ended = self._last_reader < np.arange(blocks.start, blocks.stop)[:, None]
        still = self._last_reader > blocks[-1]
        return Effects(
            self.bytes_of(before & ended) + self._waiting_bytes[blocks] + column.forward_bytes,
            self.bytes_of(upto),
            self.bytes_of(upto[:, -1] & ~still) + column.kept_bytes,
            upto[:, -1] & still,
        )


def families(columns: Iterable[Column], values: Values, num_blocks: int) -> list[list[Family]]:
    """The families of columns, by first block."""
    alike: dict[tuple[object, ...], list[Column]] = {}
    for p in columns:
        key = (p.first, p.last, p.holds, p.kept_bytes, p.forward_bytes)
        alike.setdefault(key, []).append(p)
    found: list[list[Family]] = [[] for _ in range(num_blocks)]
    for some in alike.values():
        found[some[0].first].append(_family(some, values))
    return found


def _family(columns: Sequence[Column], values: Values) -> Family:
    chosen: list[Column] = []
    for p in sorted(columns, key=lambda p: (p.backward_bytes, p.added_ms, p.options)):
        if not chosen or p.added_ms < chosen[-1].added_ms:
            chosen.append(p)
    holds = values.holds(chosen[0])
    return Family(
        columns=tuple(chosen),
        added_ms=np.array([p.added_ms for p in chosen]),
        backward_bytes=np.array([p.backward_bytes for p in chosen], float),
        holds=holds,
        alone=values.effects(chosen[0], holds, values.none),
    )


def smallest(some: Sequence[Family]) -> list[Family]:
    """Of families that begin at one block, the columns that fit wherever others of the same blocks
    do, as if they took no time."""
    chosen: list[Family] = []
    for family in sorted(
        some, key=lambda f: (f.columns[0].kept_bytes, f.columns[0].backward_bytes)
    ):
        alike = (other for other in chosen if other.blocks == family.blocks)
        if not any(other.needs_no_more(family) for other in alike):
            least = replace(
                family,
                columns=family.columns[:1],
                added_ms=np.zeros(1),
                backward_bytes=family.backward_bytes[:1],
            )
            chosen.append(least)
    return chosen
