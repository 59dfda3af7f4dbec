"""Labels: the beginnings of schedules that end before the same block, and which of them dominate.

A label is what decides how a beginning can go on: its stock (the bytes kept before the block for
later backwards), the boundary values that it holds, and its time. One label dominates another if
whatever may follow the other may follow it, with no more bytes at any moment and no more time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jax_hremat._solve.families import Sets, Values


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels before one block; one row each.

    Attributes:
        stock_bytes: The stock.
        added_ms: The time added so far.
        charged_ms: A lower bound on the time of every schedule that begins so, less what the rest
            is charged (`_solve/relaxation.py`).
        held: Position in `sets` of the values held.
        sets: The sets of values held by some label.
        came_from: Block before which the label stood that this one extends.
        parent: Row of that label.
        family: Position of the family it was extended by, among those that begin at that block.
        column: Position of the column in that family.
    """

    stock_bytes: np.ndarray
    added_ms: np.ndarray
    charged_ms: np.ndarray
    held: np.ndarray
    sets: Sets
    came_from: np.ndarray
    parent: np.ndarray
    family: np.ndarray
    column: np.ndarray

    def __len__(self) -> int:
        return len(self.added_ms)

    def only(self, rows: np.ndarray) -> Labels:
        """Some of the labels."""
        return Labels(
            self.stock_bytes[rows],
            self.added_ms[rows],
            self.charged_ms[rows],
            self.held[rows],
            self.sets,
            *(field[rows] for field in (self.came_from, self.parent, self.family, self.column)),
        )


def start(values: Values, charged_ms: float) -> Labels:
    """The label before the first block."""
    nothing = np.zeros(1, int)
    charged = np.full(1, charged_ms)
    return Labels(np.zeros(1), np.zeros(1), charged, nothing, values.none, *(nothing,) * 4)


def together(labels: Sequence[Labels]) -> Labels:
    """All labels, each set of held values once."""

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(some, name) for some in labels])

    offsets = np.cumsum([0, *(len(some.sets) for some in labels)])
    held = np.concatenate([some.held + o for some, o in zip(labels, offsets, strict=False)])
    sets, place = np.unique(joined("sets"), axis=0, return_inverse=True)
    others = ("came_from", "parent", "family", "column")
    return Labels(
        joined("stock_bytes"),
        joined("added_ms"),
        joined("charged_ms"),
        place.ravel()[held],
        sets,
        *map(joined, others),
    )


def undominated(labels: Labels, values: Values) -> Labels:
    """The labels that no other dominates, as far as it is looked for: among those with the same
    held values, those with one value more or less, and those that would be smaller if they held
    nothing more."""
    labels = labels.only(_best(labels.held, labels.added_ms, labels.stock_bytes))
    if len(labels.sets) == 1:
        return labels
    held, added_ms, stock_bytes = labels.held, labels.added_ms, labels.stock_bytes
    at_most_bytes = stock_bytes + values.bytes_of(labels.sets)[held]
    beaten = _beaten(np.zeros(len(labels), int), added_ms, stock_bytes, at_most_bytes)
    place = {row.tobytes(): i for i, row in enumerate(labels.sets)}
    for value in np.flatnonzero(labels.sets.any(axis=0)):
        has_it = labels.sets[:, value]
        without = labels.sets.copy()
        without[:, value] = False
        fewer = [place.get(row.tobytes(), -1) for row in without]
        pair = np.array(fewer)[held]
        rows = np.flatnonzero(pair >= 0)
        more = has_it[held[rows]]
        pair, time_ms, stock = pair[rows], added_ms[rows], stock_bytes[rows]
        # One value fewer, and no more in the stock. Bytes are whole.
        beaten[rows] |= _beaten(
            pair, time_ms, np.where(more, stock + 0.5, -np.inf), np.where(more, np.inf, stock)
        )
        # One value more, and less in the stock by that.
        size_bytes = values.size_bytes[value]
        if size_bytes > 0:
            beaten[rows] |= _beaten(
                pair,
                time_ms,
                np.where(more, -np.inf, stock + 0.5),
                np.where(more, stock + size_bytes, np.inf),
            )
    return labels.only(np.flatnonzero(~beaten))


def _best(held: np.ndarray, added_ms: np.ndarray, stock_bytes: np.ndarray) -> np.ndarray:
    """The rows that no other row of the same set equals or beats in time and stock, by set and
    time; of equal rows the first."""
    order = np.lexsort((stock_bytes, added_ms, held))
    # Every set counts as lower than all sets before it, so that each has a minimum of its own.
    lowered = stock_bytes[order] - (1.0 + stock_bytes.max()) * held[order]
    least = np.minimum.accumulate(lowered)
    better = np.ones(len(order), bool)
    better[1:] = lowered[1:] < least[:-1]
    return order[better]


def _beaten(
    group: np.ndarray, added_ms: np.ndarray, needs: np.ndarray, offers: np.ndarray
) -> np.ndarray:
    """For each row, whether a row of the same group and of no more time offers less than it
    needs."""
    order = np.lexsort((offers, added_ms, group))
    apart = 1.0 + max(some[np.isfinite(some)].max(initial=0.0) for some in (needs, offers))
    shift = apart * group[order]
    least = np.minimum.accumulate(offers[order] - shift)
    beaten = np.empty(len(group), bool)
    beaten[order] = least < needs[order] - shift
    return beaten
