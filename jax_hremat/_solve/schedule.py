"""The schedules of a chain: the fastest within a peak, and that of the least peak.

The root program (`_solve/root_program.py`) is solved by label setting, exactly. A schedule is a
sequence of columns. What follows a beginning depends on three things alone: the stock, the values
held, and the time (`_solve/labels.py`). So beginnings are extended by one column at a time, and of
those that end before the same block only the undominated are kept. This is the dynamic program of
rotor's persistent schedules (Beaumont et al. 2020) with several options for a block, groups of
blocks, and values that skip blocks; memory is not discretized.

A beginning is left out if it cannot become faster than wanted: no schedule goes on from it in less
time than the bound of `_Ahead`, which leaves out what the beginning holds. The bound is exact where
no value is read later than in the next block. Where that leaves too many, the duals of the linear
relaxation bound them too (`_solve/relaxation.py`).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jax_hremat._solve.backend import Outcome, SolverConfig, Status
from jax_hremat._solve.chain import Chain, Schedule, selection_of
from jax_hremat._solve.column import MIB, Column
from jax_hremat._solve.families import Effects, Family, Sets, Values, families, smallest
from jax_hremat._solve.groups import group_columns, single_columns
from jax_hremat._solve.labels import Labels, new_minima, start, together, undominated
from jax_hremat._solve.output_reuse import NO_REUSE, ReusedBytes
from jax_hremat._solve.prediction import predict
from jax_hremat._solve.relaxation import Charges, Relaxation

# The first search looks for schedules as fast as the lower bound, the second for those slower by at
# most this part of the step's time, each further one by at most twice as much as the one before.
_FIRST_STEP = 0.001
# What may follow is looked for within this part of the step's time first, and then within this many
# times as much.
_FIRST_WIDTH = 0.005
_WIDER = 4.0
# It is looked for within this many times a time that no schedule undercuts, where that is more.
_FROM_KNOWN = 2.0
# A least peak is found to within this part.
_PRECISION = 1e-4
# More bytes than any schedule takes.
_NO_LIMIT = 2**60
# Sums of times that differ by less than this count as equal.
_ROUNDING_MS = 1e-9

# The families of columns that begin at each block.
_Families = Sequence[Sequence[Family]]


class _Ahead(NamedTuple):
    """The least time of what may follow before a block, whatever is held: a step function of the
    stock.

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

    def joined(self, others: Sequence[tuple[np.ndarray, np.ndarray]]) -> _Ahead:
        """The least time of this and of others, given by their stocks and times."""
        stock_bytes = np.concatenate([self.stock_bytes, *(stock for stock, _ in others)])
        added_ms = np.concatenate([self.added_ms[:-1], *(times for _, times in others)])
        order = np.lexsort((-stock_bytes, added_ms))
        stock_bytes, added_ms = stock_bytes[order], added_ms[order]
        steps = new_minima(-stock_bytes)
        return _Ahead(stock_bytes[steps], np.append(added_ms[steps], np.inf))


# Nothing needs to follow.
_NOTHING = _Ahead(np.full(1, np.inf), np.array([0.0, np.inf]))


class _Found(NamedTuple):
    """The best schedule of one search.

    Attributes:
        columns: Its columns; None if there is none as fast as wanted.
        added_ms: Its time.
        is_exact: Whether no label was dropped for their number.
    """

    columns: tuple[Column, ...] | None
    added_ms: float
    is_exact: bool


class Schedules:
    """The schedules of one chain."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._base_ms = chain.fastest_ms

    def fastest_within(
        self,
        peak_bytes: int,
        config: SolverConfig,
        *,
        groups: bool = True,
        reused: ReusedBytes = NO_REUSE,
        at_least_s: float = 0.0,
    ) -> Schedule:
        """The fastest schedule whose predicted peak is at most `peak_bytes`.

        Args:
            peak_bytes: Bound on the predicted peak.
            config: The gap that is allowed, and the limit of labels.
            groups: Whether consecutive blocks may be checkpointed together.
            reused: Bytes saved by output-buffer reuse.
            at_least_s: A time that no schedule undercuts, if one is known; only a matter of speed.

        Returns:
            The schedule. Its selection is None with `Status.INFEASIBLE`, or with
            `Status.UNDECIDED` if the limit was reached first.
        """
        began_s = time.perf_counter()
        limit = peak_bytes - self._chain.fixed_bytes
        columns = self._with_groups if groups else self._singles
        search = _Search(columns, limit, config.max_labels, reused)
        best = search.feasible()
        if best.columns is None:
            status = Status.INFEASIBLE if best.is_exact else Status.UNDECIDED
            return Schedule(None, Outcome(status, math.inf, 0.0, time.perf_counter() - began_s))
        # More and more slow beginnings are looked at, until one goes on to a schedule.
        lower_ms = search.least_ms(best.added_ms, 1e3 * at_least_s - self._base_ms)
        # The bound is often exact.
        step_ms, first_step_ms = 0.0, _FIRST_STEP * self._base_ms

        def gap() -> float:
            whole_ms = max(self._base_ms + best.added_ms, 1e-12)
            return max(best.added_ms - lower_ms, 0.0) / whole_ms

        while gap() > config.relative_gap:
            wanted_ms = min(lower_ms + step_ms, best.added_ms)
            found = search.fastest(wanted_ms)
            is_better = found.added_ms < best.added_ms
            best = found if is_better else best
            if found.is_exact:
                lower_ms = min(wanted_ms, best.added_ms)
            elif wanted_ms >= best.added_ms and not is_better:
                break
            if found.is_exact or not is_better:
                step_ms = max(2 * step_ms, first_step_ms)
            if gap() > config.relative_gap and search.sharpen(config):
                lower_ms, step_ms = max(lower_ms, search.least_ms(best.added_ms)), first_step_ms
        status = Status.OPTIMAL if gap() <= config.relative_gap else Status.LIMIT
        outcome = Outcome(status, best.added_ms, gap(), time.perf_counter() - began_s)
        bound_s = 1e-3 * (self._base_ms + lower_ms)
        assert best.columns is not None
        return Schedule(selection_of(best.columns), outcome, bound_s)

    def least_possible_s(
        self, peak_bytes: int, config: SolverConfig, reused: ReusedBytes = NO_REUSE
    ) -> float:
        """A time in seconds that no schedule with a predicted peak of at most `peak_bytes`
        undercuts, from the lower bounds of `fastest_within` alone; infinite if there is none. The
        arguments are the same."""
        limit = peak_bytes - self._chain.fixed_bytes
        search = _Search(self._with_groups, limit, config.max_labels, reused)
        slow = search.feasible()
        if slow.columns is None:
            return math.inf if slow.is_exact else 1e-3 * self._base_ms
        if search.fastest(search.least_ms(slow.added_ms)).columns is None:
            search.sharpen(config)
        return 1e-3 * (self._base_ms + search.least_ms(slow.added_ms))

    def least_peak(self, config: SolverConfig, *, groups: bool = True) -> Schedule:
        """The least predicted peak, to a ten-thousandth; of the schedules with that peak, the
        fastest."""
        began_s = time.perf_counter()
        columns = self._with_groups if groups else self._singles

        def found(limit: float) -> _Found:
            return _Search(columns, limit, config.max_labels, NO_REUSE).feasible()

        lowest = found(_NO_LIMIT)
        low, high, is_exact = -1, self._peak_bytes(lowest), lowest.is_exact
        while high - low > max(1, _PRECISION * high):
            middle = (low + high) // 2
            lower = found(middle)
            is_exact &= lower.is_exact
            low, high = (middle, high) if lower.columns is None else (low, self._peak_bytes(lower))
        schedule = self.fastest_within(high + self._chain.fixed_bytes, config, groups=groups)
        status = schedule.outcome.status if is_exact else Status.LIMIT
        outcome = Outcome(status, high / MIB, 0.0, time.perf_counter() - began_s)
        return Schedule(schedule.selection, outcome)

    def _peak_bytes(self, found: _Found) -> int:
        """The predicted peak, arguments and outputs not counted."""
        assert found.columns is not None, "some schedule has a peak of at most this"
        chain = self._chain
        return predict(chain, selection_of(found.columns)).peak_bytes - chain.fixed_bytes

    @functools.cached_property
    def _singles(self) -> _Columns:
        return _Columns(self._chain, single_columns(self._chain))

    @functools.cached_property
    def _with_groups(self) -> _Columns:
        return _Columns(self._chain, [*single_columns(self._chain), *group_columns(self._chain)])


class _Columns:
    """Columns to choose from.

    Attributes:
        base_ms: The time of the fastest options.
        values: The boundary values of their chain.
        families: The columns as families.
        shortest_first: The families that begin at each block, those of fewest blocks first.
        smallest: Those that fit wherever any do, as if they took no time.
    """

    def __init__(self, chain: Chain, columns: Sequence[Column]) -> None:
        self._chain = chain
        self.base_ms = chain.fastest_ms
        self.values = Values(chain)
        self.families: _Families = families(columns, self.values, len(chain))
        self.shortest_first: _Families = [
            sorted(some, key=lambda family: len(family.blocks)) for some in self.families
        ]
        self.smallest: _Families = [smallest(some) for some in self.families]

    @functools.cached_property
    def relaxation(self) -> Relaxation:
        """The relaxation of the root program over all of them."""
        return Relaxation(self._chain, self.families)


class _Search:
    """The schedules of some columns within a limit."""

    def __init__(
        self, columns: _Columns, limit: float, max_labels: int, reused: ReusedBytes
    ) -> None:
        self._columns = columns
        self._values = columns.values
        self._limit = limit
        self._max_labels = max_labels
        self._reused = reused
        self._charges: Charges | None = None
        self._is_sharp = False
        # For the most time asked for so far.
        self._known_ahead: tuple[float, Sequence[_Ahead]] = (-1.0, ())

    def feasible(self) -> _Found:
        """A schedule of columns of least backward peaks."""
        columns = self._columns.smallest
        found = self._labelled(columns, [_NOTHING] * (len(columns) + 1), math.inf, None)
        if found.columns is None:
            return found
        return found._replace(added_ms=sum(column.added_ms for column in found.columns))

    def fastest(self, wanted_ms: float) -> _Found:
        """The fastest schedule, if it adds at most `wanted_ms`."""
        ahead = self._ahead(wanted_ms)
        return self._labelled(self._columns.families, ahead, wanted_ms, self._charges)

    def sharpen(self, config: SolverConfig) -> bool:
        """Bound schedules by the relaxation as well; whether that is new."""
        if self._is_sharp:
            return False
        self._is_sharp = True
        self._charges = self._columns.relaxation.charges(self._limit, config, self._reused)
        return self._charges is not None

    def least_ms(self, known_ms: float, at_least_ms: float = 0.0) -> float:
        """No schedule adds less time, given the time that one adds, and one that none undercuts."""
        within_ms = max(_FIRST_WIDTH * self._columns.base_ms, _FROM_KNOWN * at_least_ms)
        least_ms = self._least_within(within_ms)
        while math.isinf(least_ms) and within_ms < known_ms:
            within_ms *= _WIDER
            least_ms = self._least_within(within_ms)
        least_ms = min(least_ms, known_ms)
        return least_ms if self._charges is None else max(least_ms, self._charges.least_ms)

    def _least_within(self, within_ms: float) -> float:
        """The least time of what may follow from the start on; infinite if that is more."""
        return float(self._ahead(within_ms)[0].least_ms(np.zeros(1))[0])

    def _ahead(self, within_ms: float) -> Sequence[_Ahead]:
        """What may follow before each block, and after the last, in at most this time."""
        if within_ms > self._known_ahead[0]:
            self._known_ahead = within_ms, self._ahead_within(within_ms)
        return self._known_ahead[1]

    def _ahead_within(self, within_ms: float) -> Sequence[_Ahead]:
        ahead = [_NOTHING]
        # By the number of blocks that follow.
        for some in reversed(self._columns.shortest_first):
            found = _Ahead(np.zeros(0), np.full(1, np.inf))
            new: list[tuple[np.ndarray, np.ndarray]] = []
            count = 0
            # Single blocks come first. Most of the others are no better than what is found by then.
            for family in some:
                stock_bytes, added_ms = self._before(family, ahead[-len(family.blocks)])
                better = (added_ms <= within_ms) & (added_ms < found.least_ms(stock_bytes))
                new.append((stock_bytes[better], added_ms[better]))
                count += int(better.sum())
                if count > len(found.added_ms):
                    found, new, count = found.joined(new), [], 0
            ahead.append(found.joined(new))
        return ahead[::-1]

    def _before(self, family: Family, after: _Ahead) -> tuple[np.ndarray, np.ndarray]:
        """What may follow before a family's columns, if `after` follows after them."""
        met, most_bytes, room_bytes = self._room(family, self._values.none)
        # The least time changes only where a column or what follows no longer fits.
        stock_bytes = np.concatenate(
            (room_bytes - family.backward_bytes, after.stock_bytes - met.stock_bytes)
        )
        stock_bytes = np.minimum(stock_bytes, most_bytes)
        stock_bytes = stock_bytes[stock_bytes >= 0]
        added_ms, _ = family.fastest(room_bytes - stock_bytes)
        added_ms += after.least_ms(stock_bytes + met.stock_bytes)
        fits = np.isfinite(added_ms)
        return stock_bytes[fits], added_ms[fits]

    def _labelled(
        self,
        columns: _Families,
        ahead: Sequence[_Ahead],
        wanted_ms: float,
        charges: Charges | None,
    ) -> _Found:
        """The fastest schedule of some families, if it adds at most `wanted_ms`."""
        count = len(columns)
        waiting: list[list[Labels]] = [[] for _ in range(count + 1)]
        waiting[0].append(start(self._values, 0.0 if charges is None else charges.value_ms))
        labels: list[Labels | None] = []
        is_exact = True
        for block in range(count + 1):
            here = None
            if waiting[block]:
                here = undominated(together(waiting[block]), self._values)
                if len(here) > self._max_labels:
                    is_exact = False
                    hoped_ms = here.added_ms + ahead[block].least_ms(here.stock_bytes)
                    best = np.argsort(hoped_ms, kind="stable")[: self._max_labels]
                    here = here.only(np.sort(best))
            waiting[block] = []
            labels.append(here)
            if here is None or block == count:
                continue
            for position, family in enumerate(columns[block]):
                after = family.blocks.stop
                longer = self._extended(here, block, position, family)
                hoped_ms = longer.added_ms + ahead[after].least_ms(longer.stock_bytes)
                if charges is not None:
                    charged_ms = charges.reduced_ms[block][position][longer.origin[:, 3]]
                    longer = replace(longer, charged_ms=longer.charged_ms + charged_ms)
                    hoped_ms = np.maximum(hoped_ms, longer.charged_ms + charges.ahead_ms[after])
                longer = longer.only(np.flatnonzero(hoped_ms <= wanted_ms + _ROUNDING_MS))
                if len(longer):
                    waiting[after].append(longer)
        last = labels[count]
        if last is None:
            return _Found(None, math.inf, is_exact)
        best = int(np.argmin(last.added_ms))
        return _Found(_columns_of(columns, labels, best), float(last.added_ms[best]), is_exact)

    def _room(self, family: Family, held: Sets) -> tuple[Effects, np.ndarray, np.ndarray]:
        """What a family's columns meet and leave behind for each set of held values; the most that
        the stock may be for the forwards, and for the backwards together with a column's peak."""
        met = family.alone
        if held.any():
            met = self._values.effects(family.columns[0], family.holds, held)
        forward, backward = met.forward_bytes, met.backward_bytes
        if self._reused.forward:
            blocks = slice(family.blocks.start, family.blocks.stop)
            forward = forward - self._reused.forward[blocks]
            backward = backward - self._reused.backward[blocks]
        return met, self._limit - forward.max(axis=1), self._limit - backward.max(axis=1)

    def _extended(self, labels: Labels, block: int, position: int, family: Family) -> Labels:
        """The labels extended by a family's fastest column that fits."""
        met, most_bytes, room_bytes = self._room(family, labels.sets)
        stock_bytes = labels.stock_bytes
        own_ms, column = family.fastest(room_bytes[labels.held] - stock_bytes)
        fits = stock_bytes <= most_bytes[labels.held]
        rows = np.flatnonzero(fits & np.isfinite(own_ms))
        held = labels.held[rows]
        return Labels(
            stock_bytes=stock_bytes[rows] + met.stock_bytes[held],
            added_ms=(labels.added_ms + own_ms)[rows],
            charged_ms=labels.charged_ms[rows],
            held=held,
            sets=met.held,
            origin=np.column_stack(
                (np.full(len(rows), block), rows, np.full(len(rows), position), column[rows])
            ),
        )


def _columns_of(
    columns: _Families, labels: Sequence[Labels | None], row: int
) -> tuple[Column, ...]:
    """The columns by which a label after the last block was reached."""
    found: list[Column] = []
    block = len(columns)
    while block > 0:
        here = labels[block]
        assert here is not None
        block, row, family, column = here.origin[row].tolist()
        found.append(columns[block][family].columns[column])
    return tuple(reversed(found))
