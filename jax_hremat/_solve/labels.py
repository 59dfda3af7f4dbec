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
        origin: Where each comes from, in four columns: the block before which the label stood that
            it extends, the row of that label, the position of the family that extended it among
            those that begin at that block, and the position of the column in that family.
    """

    stock_bytes: np.ndarray
    added_ms: np.ndarray
    charged_ms: np.ndarray
    held: np.ndarray
    sets: Sets
    origin: np.ndarray

    def __len__(self) -> int:
        return len(self.added_ms)

    def only(self, rows: np.ndarray) -> Labels:
        """Some of the labels, with the sets that they hold."""
        held = self.held[rows]
        used = np.zeros(len(self.sets), bool)
        used[held] = True
        return Labels(
            self.stock_bytes[rows],
            self.added_ms[rows],
            self.charged_ms[rows],
            (used.cumsum() - 1)[held],
            self.sets[used],
            self.origin[rows],
        )


def start(values: Values, charged_ms: float) -> Labels:
    """The label before the first block."""
    return Labels(
        stock_bytes=np.zeros(1),
        added_ms=np.zeros(1),
        charged_ms=np.full(1, charged_ms),
        held=np.zeros(1, int),
        sets=values.none,
        origin=np.zeros((1, 4), int),
    )


def together(labels: Sequence[Labels]) -> Labels:
    """All labels, each set of held values once."""
    offsets = np.cumsum([0, *(len(some.sets) for some in labels)])
    held = np.concatenate([some.held + o for some, o in zip(labels, offsets, strict=False)])
    sets, place = _distinct(np.concatenate([some.sets for some in labels]))
    return Labels(
        stock_bytes=np.concatenate([some.stock_bytes for some in labels]),
        added_ms=np.concatenate([some.added_ms for some in labels]),
        charged_ms=np.concatenate([some.charged_ms for some in labels]),
        held=place[held],
        sets=sets,
        origin=np.concatenate([some.origin for some in labels]),
    )


def _distinct(sets: Sets) -> tuple[Sets, np.ndarray]:
    """Each set once, in lexicographic order, and for each given one its position among them."""
    # As words of 64 bits, at least one even if there are no values at all.
    padded = np.pad(sets, ((0, 0), (0, 64 - sets.shape[1] % 64)))
    words = np.packbits(padded, axis=1).view(">u8").astype(np.uint64)
    order = np.lexsort(words.T[::-1])
    new = np.ones(len(sets), bool)
    new[1:] = (words[order[1:]] != words[order[:-1]]).any(axis=1)
    place = np.empty(len(sets), int)
    place[order] = new.cumsum() - 1
    return sets[order[new]], place


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
    return order[new_minima(lowered)]


def new_minima(figures: np.ndarray) -> np.ndarray:
    """Whether each figure is less than all before it."""
    new = np.ones(len(figures), bool)
    new[1:] = figures[1:] < np.minimum.accumulate(figures)[:-1]
    return new


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
