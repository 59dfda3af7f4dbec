"""What may follow before each block: the least time for each stock, whatever is held.

It is found from the last block back, as far as it matters: nothing matters that would make a
schedule slower than asked for, together with the least time in which a beginning gets by with so
small a stock. That time is bounded by Lagrangian relaxation: a beginning before block b with a
stock of at most s adds at least

    max_λ ( min_p Σ (T_p + λ K_p)  −  λ s )

where p ranges over the sequences of columns up to block b, T_p is the time of a column, and K_p is
what it adds to the stock if nothing was held before it, which is the least that it adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jax_hremat._solve.assumed_reuse import AssumedReuse
from jax_hremat._solve.column import Column
from jax_hremat._solve.families import Effects, Families, Sets, Values
from jax_hremat._solve.labels import new_minima

# The most prices λ of a byte in the stock.
_NUM_PRICES = 48
# Sums of times that differ by less than this count as equal.
ROUNDING_MS = 1e-9

# For each block the families of columns that begin there, those of the same blocks together.
ByBlock = Sequence[Sequence[Families]]


class Ahead(NamedTuple):
    """The least time of what may follow before a block: a step function of the stock.

    Attributes:
        stock_bytes: The largest stock of each step, ascending.
        added_ms: The time of each step, ascending, and infinity for larger stocks.
    """

    stock_bytes: np.ndarray
    added_ms: np.ndarray

    def least_ms(self, stock_bytes: np.ndarray) -> np.ndarray:
        """The least time from each stock on; infinite if nothing can follow."""
        step = np.searchsorted(self.stock_bytes, stock_bytes, side="left")
        return self.added_ms[step]

    def joined(self, stock_bytes: np.ndarray, added_ms: np.ndarray) -> Ahead:
        """The least time of this and of others, given by their stocks and times."""
        stock_bytes = np.concatenate((self.stock_bytes, stock_bytes))
        added_ms = np.concatenate((self.added_ms[:-1], added_ms))
        order = np.lexsort((-stock_bytes, added_ms))
        stock_bytes, added_ms = stock_bytes[order], added_ms[order]
        return Ahead(stock_bytes, np.append(added_ms, np.inf)).only(new_minima(-stock_bytes))

    def only(self, steps: np.ndarray) -> Ahead:
        """Some of the steps, as booleans; where one is left out, the next takes its place."""
        return Ahead(self.stock_bytes[steps], np.append(self.added_ms[:-1][steps], np.inf))


# Nothing needs to follow.
NOTHING = Ahead(np.full(1, np.inf), np.array([0.0, np.inf]))
# Nothing can follow.
_NONE = Ahead(np.zeros(0), np.full(1, np.inf))


class Room(NamedTuple):
    """What memory there is.

    Attributes:
        values: The boundary values.
        limit_bytes: The limit on the peak, arguments and outputs not counted.
        reused: What is assumed of output-buffer reuse.
    """

    values: Values
    limit_bytes: float
    reused: AssumedReuse

    def of(self, some: Families, held: Sets) -> tuple[Effects, np.ndarray, np.ndarray]:
        """What the columns of some families meet and leave behind for each set of held values; the
        most that the stock may be for the forwards, and for the backwards together with a column's
        peak."""
        met = some.effects(self.values, held)
        return met, *self._beside(some.blocks, met)

    def of_column(self, column: Column, held: Sets) -> tuple[Effects, float]:
        """What one column meets and leaves behind for one set of held values, and the most that the
        stock may be."""
        met = self.values.effects_of(column, held)
        most_bytes, room_bytes = self._beside(range(column.first, column.last + 1), met)
        return met, float(min(most_bytes[0, 0], room_bytes[0, 0] - column.backward_bytes))

    def _beside(self, blocks: range, met: Effects) -> tuple[np.ndarray, np.ndarray]:
        """What there is beside the forwards, and beside the backwards, of columns."""
        forward, backward = met.forward_bytes, met.backward_bytes
        if self.reused.forward:
            forward = forward - self.reused.forward[blocks.start : blocks.stop]
            backward = backward - self.reused.in_backward(blocks)
        return self.limit_bytes - forward.max(axis=2), self.limit_bytes - backward.max(axis=2)


class Beginnings:
    """Lower bounds on the time of beginnings, whatever the limit on the peak is."""

    def __init__(self, families: ByBlock) -> None:
        self._price_ms = _prices(families)
        # For each block and price: the least time and price of the beginnings before it.
        self._least_ms = np.full((len(families) + 1, len(self._price_ms)), np.inf)
        self._least_ms[0] = 0.0
        for block, some in enumerate(families):
            for each in some:
                kept_ms = each.alone.stock_bytes * self._price_ms
                own_ms = (each.least_ms[:, None] + kept_ms).min(axis=0)
                end = self._least_ms[each.blocks.stop]
                np.minimum(end, self._least_ms[block] + own_ms, out=end)

    def least_ms(self, block: int, stock_bytes: np.ndarray) -> np.ndarray:
        """No beginning before the block with so small a stock adds less time, for each stock."""
        least_ms, price_ms = self._least_ms[block], self._price_ms
        # The least time is concave in the price, so that the higher of two prices says more up to
        # where both say the same, and each price says most between its two neighbours.
        alike_bytes = np.diff(least_ms) / np.diff(price_ms)
        price = len(alike_bytes) - np.searchsorted(alike_bytes[::-1], stock_bytes)
        return least_ms[price] - price_ms[price] * stock_bytes


def _prices(families: ByBlock) -> np.ndarray:
    """Prices of a byte, in ms, ascending, the first of them zero: those at which columns are worth
    what they keep less than the plain blocks, evenly chosen among them."""
    most_bytes = [
        max((each.alone.stock_bytes.max() for each in some if len(each.blocks) == 1), default=0.0)
        for some in families
    ]
    upto_bytes = np.cumsum([0.0, *most_bytes])
    worth: list[np.ndarray] = []
    for each in (each for some in families for each in some):
        kept_bytes = each.alone.stock_bytes[:, 0]
        less_bytes = upto_bytes[each.blocks.stop] - upto_bytes[each.blocks.start] - kept_bytes
        saves = less_bytes > 0
        worth.append(each.least_ms[saves] / less_bytes[saves])
    every = np.concatenate(worth)
    if len(every):
        every = np.quantile(every, np.linspace(0.0, 1.0, _NUM_PRICES))
    return np.unique(np.append(every, 0.0))


def what_may_follow(
    families: ByBlock, beginnings: Beginnings, room: Room, within_ms: float
) -> Sequence[Ahead]:
    """What may follow before each block, and after the last, as far as it matters for schedules
    that add at most this time."""
    most_ms = within_ms + ROUNDING_MS
    # By the number of blocks that follow.
    ahead = [NOTHING]
    for block, some in reversed([*enumerate(families)]):
        found = _NONE
        # Shorter ones come first. Most of the longer are no better than what is found by then.
        for each in some:
            after = ahead[-len(each.blocks)]
            if each.added_ms.min() + after.added_ms[0] >= most_ms:
                continue
            stock_bytes, added_ms = _before(each, after, room)
            better = added_ms < np.minimum(found.least_ms(stock_bytes), most_ms)
            if better.any():
                found = found.joined(stock_bytes[better], added_ms[better])
        whole_ms = found.added_ms[:-1] + beginnings.least_ms(block, found.stock_bytes)
        ahead.append(found.only(whole_ms <= most_ms))
    return ahead[::-1]


def _before(some: Families, after: Ahead, room: Room) -> tuple[np.ndarray, np.ndarray]:
    """What may follow before the columns of some families, if `after` follows after them: stocks,
    and times from each on. The least time changes at no other stocks."""
    if not len(after.stock_bytes):
        return after.stock_bytes, after.added_ms[:-1]
    met, most_bytes, room_bytes = room.of(some, room.values.none)
    # One set, the empty one. For each column:
    kept_bytes, most_bytes, room_bytes = (
        figures[some.family, 0] for figures in (met.stock_bytes, most_bytes, room_bytes)
    )
    # What fits of what follows: at most these bytes in stock, which is so many steps.
    fits_bytes = np.minimum(room_bytes - some.backward_bytes, most_bytes) + kept_bytes
    fits = np.searchsorted(after.stock_bytes, fits_bytes, side="right")
    # Fewer than none can be in stock before, and with so few that a faster column of the family
    # fits, that one is taken.
    first = np.searchsorted(after.stock_bytes, kept_bytes, side="left")
    is_faster = some.family[1:] == some.family[:-1]
    first[:-1][is_faster] = np.maximum(first, fits)[1:][is_faster]
    count = np.maximum(fits - first, 0)
    column = np.repeat(np.arange(len(count)), count)
    step = np.arange(len(column)) + np.repeat(first - np.cumsum(count) + count, count)
    # Up to where a column no longer fits, and up to each step of what follows.
    at_most = (fits_bytes >= kept_bytes) & (fits < len(after.stock_bytes))
    return (
        np.concatenate(
            ((fits_bytes - kept_bytes)[at_most], after.stock_bytes[step] - kept_bytes[column])
        ),
        np.concatenate(
            (
                some.added_ms[at_most] + after.added_ms[fits[at_most]],
                some.added_ms[column] + after.added_ms[step],
            )
        ),
    )
