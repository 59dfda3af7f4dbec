"""The search for the schedules of some columns within a limit, by label setting.

A schedule is a sequence of columns. What follows a beginning depends on three things alone: the
stock, the values held, and the time (`_solve/labels.py`). So beginnings are extended by one column
at a time, and of those that end before the same block only the undominated are kept. This is the
dynamic program of rotor's persistent schedules (Beaumont et al. 2020) with several options for a
block, groups of blocks, and values that skip blocks; memory is not discretized.

A beginning is left out if it cannot become faster than wanted: no schedule goes on from it in less
time than `_solve/ahead.py` says, which leaves out what the beginning holds. That bound is exact
where no value is read later than in the next block. Where that leaves too many, the duals of the
linear relaxation bound them too (`_solve/relaxation.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jax_hremat._solve.ahead import (
    NOTHING,
    ROUNDING_MS,
    Ahead,
    Beginnings,
    ByBlock,
    Room,
    what_may_follow,
)
from jax_hremat._solve.assumed_reuse import NO_PRICES, AssumedReuse, Prices
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.chain import Chain
from jax_hremat._solve.column import Column
from jax_hremat._solve.families import Families, Values
from jax_hremat._solve.labels import Labels, start, together, undominated
from jax_hremat._solve.priced import Spared, priced_chain
from jax_hremat._solve.relaxation import Charges, Relaxation
from jax_hremat._solve.spans import Span

# What may follow is looked for within this part of the time of the step first, or, with a guess,
# within hardly more than that; and then within this many times as much.
_FIRST_WIDTH = 0.005
_BEYOND_GUESS = 1.02
_WIDER = 1.5


class _Wanted(NamedTuple):
    """What is asked for: a schedule that adds at most some time.

    Attributes:
        added_ms: That time.
        ahead: What may follow before each block, and after the last.
        charges: What the relaxation charges all columns, if it is known.
    """

    added_ms: float
    ahead: Sequence[Ahead]
    charges: Charges | None

    def start(self, values: Values) -> Labels:
        """The label before the first block."""
        return start(values, 0.0 if self.charges is None else self.charges.value_ms)

    def charged_ms(self, block: int, position: int, column: np.ndarray) -> np.ndarray:
        """What columns are charged, those of one position among the families that begin at a
        block."""
        if self.charges is None:
            return np.zeros(len(column))
        return self.charges.reduced_ms[block][position][column]

    def rows(
        self,
        block: int,
        stock_bytes: np.ndarray,
        added_ms: np.ndarray,
        charged_ms: np.ndarray,
    ) -> np.ndarray:
        """The rows of labels before a block that may lead to such a schedule."""
        hoped_ms = added_ms + self.ahead[block].least_ms(stock_bytes)
        if self.charges is not None:
            hoped_ms = np.maximum(hoped_ms, charged_ms + self.charges.ahead_ms[block])
        return np.flatnonzero(hoped_ms <= self.added_ms + ROUNDING_MS)

    def best(self, labels: Labels, block: int, count: int) -> Labels:
        """Of labels before a block the most hopeful."""
        hoped_ms = labels.added_ms + self.ahead[block].least_ms(labels.stock_bytes)
        return labels.only(np.sort(np.argsort(hoped_ms, kind="stable")[:count]))


class Found(NamedTuple):
    """The best schedule of one search.

    Attributes:
        columns: Its columns, as they are without prices; None if there is none as fast as wanted.
        added_ms: Its time.
        is_exact: Whether no label was dropped for their number.
    """

    columns: tuple[Column, ...] | None
    added_ms: float
    is_exact: bool


class Columns:
    """Columns to choose from, with what they count at prices.

    Attributes:
        base_ms: The time of the fastest options.
        values: The boundary values of their chain.
        families: The columns as families.
        smallest: Those that fit wherever any do, as if they took no time.
    """

    def __init__(
        self, chain: Chain, spans: Sequence[Sequence[Span]], prices: Prices = NO_PRICES
    ) -> None:
        self._chain = priced_chain(chain, prices)
        self._spans = spans
        self._spared = Spared(chain, prices)
        self.base_ms = chain.fastest_ms
        self.values = Values(self._chain)
        self.families: ByBlock = [
            [span.families(self.values, self._spared) for span in some] for some in spans
        ]
        self.smallest: ByBlock = [[each.smallest() for each in some] for some in self.families]

    def counted(self, schedule: Sequence[Column]) -> list[Column]:
        """The columns of a schedule, which are as they are without prices, with what they count."""
        return [self._span_of(column).counted(column, self._spared) for column in schedule]

    def _span_of(self, column: Column) -> Span:
        return next(s for s in self._spans[column.first] if s.blocks[-1] == column.last)

    def counted_bytes(self, schedule: Sequence[Column]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What is counted in the forward and in the backward of each block of a schedule, whose
        columns are as they are without prices."""
        forward: list[float] = []
        backward: list[float] = []
        stock_bytes, held = 0.0, self.values.none
        for column in self.counted(schedule):
            met = self.values.effects_of(column, held)
            forward += (stock_bytes + met.forward_bytes[0, 0]).tolist()
            backward += (stock_bytes + met.backward_bytes[0, 0] + column.backward_bytes).tolist()
            stock_bytes += float(met.stock_bytes[0, 0])
            held = met.held[0]
        return tuple(map(int, forward)), tuple(map(int, backward))

    @functools.cached_property
    def beginnings(self) -> Beginnings:
        """Bounds on the time of their beginnings."""
        return Beginnings(self.families)

    @functools.cached_property
    def relaxation(self) -> Relaxation:
        """The relaxation of the root program over all of them."""
        return Relaxation(self._chain, self.families)


class Search:
    """The schedules of some columns within a limit."""

    def __init__(
        self, columns: Columns, limit: float, max_labels: int, reused: AssumedReuse
    ) -> None:
        self._columns = columns
        self._values = columns.values
        self._room = Room(columns.values, limit, reused)
        self._max_labels = max_labels
        self._charges: Charges | None = None
        self._is_sharp = False
        # For the most time asked for so far.
        self._known_ahead: tuple[float, Sequence[Ahead]] = (-1.0, ())

    def feasible(self) -> Found:
        """A schedule of columns of least backward peaks."""
        columns = self._columns.smallest
        anything = _Wanted(math.inf, [NOTHING] * (len(columns) + 1), None)
        found = self._labelled(columns, anything)
        if found.columns is None:
            return found
        return found._replace(added_ms=sum(column.added_ms for column in found.columns))

    def fastest(self, wanted_ms: float) -> Found:
        """The fastest schedule, if it adds at most `wanted_ms`."""
        wanted = _Wanted(wanted_ms, self._ahead(wanted_ms), self._charges)
        return self._labelled(self._columns.families, wanted)

    def sharpen(self, config: SolverConfig) -> bool:
        """Bound schedules by the relaxation as well; whether that is new."""
        if self._is_sharp:
            return False
        self._is_sharp = True
        self._charges = self._columns.relaxation.charges(
            self._room.limit_bytes, config, self._room.reused
        )
        return self._charges is not None

    def least_ms(self, known_ms: float, guess_ms: float = 0.0) -> float:
        """No schedule adds less time, given the time that one adds, and a guess of the least."""
        within_ms = max(_FIRST_WIDTH * self._columns.base_ms, _BEYOND_GUESS * guess_ms)
        least_ms = self._least_within(within_ms)
        while math.isinf(least_ms) and within_ms < known_ms:
            within_ms *= _WIDER
            least_ms = self._least_within(within_ms)
        least_ms = min(least_ms, known_ms)
        return least_ms if self._charges is None else max(least_ms, self._charges.least_ms)

    def _least_within(self, within_ms: float) -> float:
        """The least time of what may follow from the start on; infinite if that is more."""
        return float(self._ahead(within_ms)[0].least_ms(np.zeros(1))[0])

    def _ahead(self, within_ms: float) -> Sequence[Ahead]:
        """What may follow before each block, and after the last, in at most this time."""
        if within_ms > self._known_ahead[0]:
            families, beginnings = self._columns.families, self._columns.beginnings
            ahead = what_may_follow(families, beginnings, self._room, within_ms)
            self._known_ahead = within_ms, ahead
        return self._known_ahead[1]

    def _labelled(self, columns: ByBlock, wanted: _Wanted) -> Found:
        """The fastest schedule of some families, as far as wanted."""
        count = len(columns)
        waiting: list[list[Labels]] = [[] for _ in range(count + 1)]
        waiting[0].append(wanted.start(self._values))
        labels: list[Labels | None] = []
        is_exact = True
        for block in range(count + 1):
            here = None
            if waiting[block]:
                here = undominated(together(waiting[block]), self._values)
                if len(here) > self._max_labels:
                    is_exact = False
                    here = wanted.best(here, block, self._max_labels)
            waiting[block] = []
            labels.append(here)
            if here is None or block == count:
                continue
            for position, some in enumerate(columns[block]):
                longer = self._extended(here, block, position, some, wanted)
                if len(longer):
                    waiting[some.blocks.stop].append(longer)
        last = labels[count]
        if last is None:
            return Found(None, math.inf, is_exact)
        best = int(np.argmin(last.added_ms))
        return Found(_columns_of(columns, labels, best), float(last.added_ms[best]), is_exact)

    def _extended(
        self, labels: Labels, block: int, position: int, some: Families, wanted: _Wanted
    ) -> Labels:
        """The labels extended by the fastest column of each family that fits, as far as wanted."""
        met, most_bytes, room_bytes = self._room.of(some, labels.sets)
        every = np.arange(len(some))[:, None]
        own_ms, column = some.fastest(every, room_bytes[:, labels.held] - labels.stock_bytes)
        fits = (labels.stock_bytes <= most_bytes[:, labels.held]) & np.isfinite(own_ms)
        family, row = np.nonzero(fits)
        own_ms, column, held = own_ms[fits], column[fits], labels.held[row]
        stock_bytes = labels.stock_bytes[row] + met.stock_bytes[family, held]
        added_ms = labels.added_ms[row] + own_ms
        charged_ms = labels.charged_ms[row] + wanted.charged_ms(block, position, column)
        rows = wanted.rows(some.blocks.stop, stock_bytes, added_ms, charged_ms)
        family, row, column, held = family[rows], row[rows], column[rows], held[rows]
        return Labels(
            stock_bytes=stock_bytes[rows],
            added_ms=added_ms[rows],
            charged_ms=charged_ms[rows],
            held=len(labels.sets) * family + held,
            sets=np.concatenate(met.held),
            origin=np.column_stack(np.broadcast_arrays(block, row, position, column)),
        )


def _columns_of(columns: ByBlock, labels: Sequence[Labels | None], row: int) -> tuple[Column, ...]:
    """The columns by which a label after the last block was reached."""
    found: list[Column] = []
    block = len(columns)
    while block > 0:
        here = labels[block]
        assert here is not None
        block, row, position, column = here.origin[row].tolist()
        found.append(columns[block][position].columns[column])
    return tuple(reversed(found))
