"""The schedules of a chain: the fastest within a peak, and that of the least peak.

The root program (`_solve/root_program.py`) is solved by label setting, exactly
(`_solve/label_search.py`). A search asks for a schedule that takes no more than some time; it is
asked for more and more, from a lower bound on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from jax_hremat._solve.ahead import Room
from jax_hremat._solve.assumed_reuse import NO_PRICES, NO_REUSE, AssumedReuse, Prices
from jax_hremat._solve.backend import Outcome, SolverConfig, Status
from jax_hremat._solve.chain import Chain, Schedule
from jax_hremat._solve.column import MIB
from jax_hremat._solve.exchanges import exchanges
from jax_hremat._solve.groups import group_columns, single_columns
from jax_hremat._solve.label_search import Columns, Found, Search
from jax_hremat._solve.spans import Span, spans

# The first search looks for schedules as fast as the lower bound, the second for those slower by at
# most this part of the step's time, each further one by at most twice as much as the one before.
_FIRST_STEP = 0.001
# A least peak is found to within this part.
_PRECISION = 1e-4
# More bytes than any schedule takes.
_NO_LIMIT = 2**60


class Schedules:
    """The schedules of one chain.

    Attributes:
        chain: The chain.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._base_ms = chain.fastest_ms
        # By whether there are groups.
        self._spans: dict[bool, list[list[Span]]] = {}
        self._unpriced: dict[bool, Columns] = {}
        # The last columns at prices.
        self._priced: tuple[tuple[bool, Prices], Columns] | None = None
        self._least_peaks: dict[tuple[SolverConfig, bool], Schedule] = {}
        self._least_possible_s: dict[tuple[int, SolverConfig, AssumedReuse], float] = {}

    def fastest_within(
        self,
        peak_bytes: int,
        config: SolverConfig,
        *,
        groups: bool = True,
        reused: AssumedReuse = NO_REUSE,
        guess_s: float = 0.0,
    ) -> Schedule:
        """The fastest schedule whose predicted peak is at most `peak_bytes`.

        Args:
            peak_bytes: Bound on the predicted peak.
            config: The gap that is allowed, and the limit of labels.
            groups: Whether consecutive blocks may be checkpointed together.
            reused: What is assumed of output-buffer reuse.
            guess_s: A guess of its time, if there is one; only a matter of speed.

        Returns:
            The schedule. Its selection is None with `Status.INFEASIBLE`, or with
            `Status.UNDECIDED` if the limit was reached first.
        """
        limit = peak_bytes - self.chain.fixed_bytes
        columns = self._columns(groups, reused.prices)
        search = Search(columns, limit, config.max_labels, reused)
        best = search.feasible()
        if best.columns is None:
            status = Status.INFEASIBLE if best.is_exact else Status.UNDECIDED
            outcome = Outcome(status, math.inf, 0.0)
            return Schedule(None, outcome, math.inf if best.is_exact else 1e-3 * self._base_ms)
        # More and more slow beginnings are looked at, until one goes on to a schedule.
        lower_ms = search.least_ms(best.added_ms, 1e3 * guess_s - self._base_ms)
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
        outcome = Outcome(status, best.added_ms, gap())
        bound_s = 1e-3 * (self._base_ms + lower_ms)
        assert best.columns is not None
        return Schedule(best.columns, outcome, bound_s, *columns.counted_bytes(best.columns))

    def least_possible_s(
        self, peak_bytes: int, config: SolverConfig, reused: AssumedReuse
    ) -> float:
        """A time that no schedule within a predicted peak undercuts, by what may follow without
        regard to held values (`_solve/ahead.py`); infinite if none is found.

        It takes a tenth of a second where `fastest_within` may take ten.
        """
        question = peak_bytes, config, reused
        if question not in self._least_possible_s:
            limit = peak_bytes - self.chain.fixed_bytes
            search = Search(self._columns(True, reused.prices), limit, config.max_labels, reused)
            found = search.feasible()
            least_ms = math.inf if found.columns is None else search.least_ms(found.added_ms)
            self._least_possible_s[question] = 1e-3 * (self._base_ms + least_ms)
        return self._least_possible_s[question]

    def exchanges(
        self, schedule: Schedule, peak_bytes: float, *, groups: bool, reused: AssumedReuse
    ) -> Iterator[tuple[float, Schedule]]:
        """The schedules that differ from one by an exchange, with the ms that it saves, the most
        first, as far as they fit within `peak_bytes` for all that is assumed.

        Their outcomes are that of the given schedule, but for the objective.
        """
        assert schedule.columns is not None, "what is exchanged is a column of it"
        columns = self._columns(groups, reused.prices)
        room = Room(columns.values, peak_bytes - self.chain.fixed_bytes, reused)
        for exchange in exchanges(columns.counted(schedule.columns), columns.families, room):
            objective = schedule.outcome.objective - exchange.saved_ms
            yield (
                exchange.saved_ms,
                Schedule(
                    exchange.made_in(schedule.columns),
                    replace(schedule.outcome, objective=objective),
                    schedule.bound_s,
                ),
            )

    def least_peak(self, config: SolverConfig, *, groups: bool = True) -> Schedule:
        """The least peak that the root program counts, to a ten-thousandth; of the schedules with
        that peak, the fastest. A prediction counts more where forwards make buffers of constants
        ahead of time (`Timeline.early_bytes`)."""
        question = config, groups
        if question not in self._least_peaks:
            self._least_peaks[question] = self._least_peak(config, groups=groups)
        return self._least_peaks[question]

    def _least_peak(self, config: SolverConfig, *, groups: bool) -> Schedule:
        columns = self._columns(groups, NO_PRICES)

        def found(limit: float) -> Found:
            return Search(columns, limit, config.max_labels, NO_REUSE).feasible()

        def counted_bytes(found: Found) -> int:
            assert found.columns is not None, "some schedule has a peak of at most this"
            return max(itertools.chain(*columns.counted_bytes(found.columns)))

        lowest = found(_NO_LIMIT)
        low, high, is_exact = -1, counted_bytes(lowest), lowest.is_exact
        while high - low > max(1, _PRECISION * high):
            middle = (low + high) // 2
            lower = found(middle)
            is_exact &= lower.is_exact
            low, high = (middle, high) if lower.columns is None else (low, counted_bytes(lower))
        schedule = self.fastest_within(high + self.chain.fixed_bytes, config, groups=groups)
        status = schedule.outcome.status if is_exact else Status.LIMIT
        outcome = Outcome(status, high / MIB, 0.0)
        return replace(schedule, outcome=outcome)

    def _columns(self, groups: bool, prices: Prices) -> Columns:
        """The columns to choose from, at prices."""
        if prices == NO_PRICES:
            if groups not in self._unpriced:
                self._unpriced[groups] = Columns(self.chain, self._spans_of(groups))
            return self._unpriced[groups]
        if self._priced is None or self._priced[0] != (groups, prices):
            columns = Columns(self.chain, self._spans_of(groups), prices)
            self._priced = (groups, prices), columns
        return self._priced[1]

    def _spans_of(self, groups: bool) -> list[list[Span]]:
        if groups not in self._spans:
            columns = [*single_columns(self.chain), *(group_columns(self.chain) if groups else ())]
            self._spans[groups] = spans(self.chain, columns)
        return self._spans[groups]
