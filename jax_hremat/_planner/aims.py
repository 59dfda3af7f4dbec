"""The schedule that a search for a budget compiles next."""

from __future__ import annotations

from dataclasses import dataclass

from jax_hremat._planner.barriers import (
    OPTIONAL_BARRIERS,
    may_do_without,
    nearest_pair,
    needed_barriers,
)
from jax_hremat._planner.candidates import Candidates
from jax_hremat._planner.peak_bound import PeakBound
from jax_hremat._solve.backend import SolverConfig, Status
from jax_hremat._solve.chain import Chain, Schedule, Selection
from jax_hremat._solve.prediction import Prediction
from jax_hremat._solve.regions import Barriers

# Compile another plan only if its predicted step is shorter by this part.
_WORTH = 0.002
# Compile one that is expected to miss, as most of them will, only if it is shorter by this part.
_WORTH_A_RISK = 0.01
# A plan that leaves at most this part of the limit unused is not improved.
SLACK = 0.0025
# Solve at most this often for a schedule that is expected to fit, and to leave no more unused.
_MAX_TRIES = 6
# A schedule whose peak is lower by a part of the limit may take more time by this many times that
# part.
_WORTH_A_MARGIN = 4.0
# Solve at most this often to find out how far down that holds.
_MAX_LOWERED = 3


@dataclass(frozen=True, slots=True)
class Aim:
    """A schedule that may be compiled next.

    Attributes:
        schedule: What the solver found.
        selection: The selection in it.
        promise: Its predicted cost.
        barriers: The barriers to compile it with.
        expected_bytes: The compiled peak to expect, or the one that it was compiled to.
    """

    schedule: Schedule
    selection: Selection
    promise: Prediction
    barriers: Barriers
    expected_bytes: int

    def rank(self, limit: int, *, bold: bool) -> tuple[int, float]:
        """Those that are expected to fit come first, by time; if bold, then those that would fit
        without gaps, by time too; then the others, by peak."""
        if self.expected_bytes <= limit:
            return 0, self.promise.time_s
        if bold and self.expected_bytes - self.promise.gaps_bytes <= limit:
            return 1, self.promise.time_s
        return 2, self.expected_bytes


class Aims:
    """The schedules of one search for a budget.

    Attributes:
        bound_step_s: No selection of all options is predicted to make a faster step within the
            first target; None as long as there was none.
        is_undecided: Whether the solver reached its limit with neither a schedule nor a proof that
            there is none.
    """

    def __init__(self, candidates: Candidates, limit: int, solver: SolverConfig) -> None:
        self._candidates = candidates
        self._limit = limit
        self._solver = solver
        self.bound_step_s: float | None = None
        self.is_undecided = False
        # No schedule within the limit is faster, as those found within it or within more show.
        self._shown_least_s = 0.0

    def next(self, chain: Chain, bound: PeakBound, *, groups: bool) -> Aim | None:
        """The fastest schedule with a predicted peak within a bound, or within its highest if there
        is none; if that is expected to miss the limit, one of a lower peak. None if there is none,
        or none that is faster than the best plan.

        Args:
            chain: Blocks and their options.
            bound: The bound on the predicted peak.
            groups: Whether consecutive blocks may be checkpointed together.
        """
        aims: list[Aim] = []
        fits = misses = None
        nothing_within = num_missed = 0
        target = bound.bytes
        for _ in range(_MAX_TRIES):
            aim = self._solved(chain, target, groups=groups)
            if aim is None:
                nothing_within = target
                if misses is not None:
                    target = self._between(fits, misses, nothing_within, num_missed)
                elif target < self._limit:
                    # The correction of the bound may be that of an unlike plan.
                    target = self._limit
                else:
                    break
                continue
            if self.bound_step_s is None and chain is self._candidates.chains.full:
                self.bound_step_s = self._candidates.whole_step_s(aim.schedule.bound_s)
            if not aims and not self._is_worth_it(aim):
                return None
            if any(aim.selection == other.selection for other in aims):
                break
            aims.append(aim)
            if self._over(aim) > 0:
                misses, num_missed = aim, num_missed + 1
            else:
                fits = aim
            if misses is None or (fits and not self._may_be_between(fits, misses)):
                break
            target = self._between(fits, misses, nothing_within, num_missed)
        aims = [*filter(self._is_worth_it, aims)]
        if not aims:
            return None
        bold = self._candidates.fastest_within(self._limit) is not None
        best = min(aims, key=lambda aim: aim.rank(self._limit, bold=bold))
        best = self._lowered(chain, best, bound.margin_bytes, groups=groups)
        return best if self._is_worth_it(best) else None

    def uncorrected(self, chain: Chain) -> Aim | None:
        """The fastest schedule whose predicted peak is within the limit, whatever the errors of
        other predictions; None if there is none, or if a bound, or the fastest schedule found
        within a higher peak, tells that none is worth a risk."""
        best = self._candidates.fastest_within(self._limit)
        if best is not None:
            worth_s = (1 - _WORTH_A_RISK) * best.step_s
            if self._shown_least_s > worth_s or (
                self._candidates.bound_step_s(self._limit) > worth_s
            ):
                return None
        return self._solved(chain, self._limit, groups=True)

    def is_worth_a_risk(self, aim: Aim) -> bool:
        """Whether a schedule that is expected to miss is predicted to be so much faster than the
        best plan that it may be compiled all the same."""
        return self._is_worth_it(aim, _WORTH_A_RISK)

    def _is_worth_it(self, aim: Aim, part: float = _WORTH) -> bool:
        """Whether a schedule is predicted to be faster than the best plan is, by a part. It may be
        as much slower than predicted as the best plan is with the same barriers."""
        candidates, best = self._candidates, self._candidates.fastest_within(self._limit)
        if best is None:
            return True
        like = candidates.known(best.chain, best.selection, aim.barriers)
        longer_s = 0.0
        if like is not None:
            longer_s = max(like.step_s - candidates.step_s(like.prediction), 0.0)
        return candidates.step_s(aim.promise) + longer_s <= (1 - part) * best.step_s

    def _over(self, aim: Aim) -> int:
        """Bytes by which a schedule is expected to exceed the limit; negative if it fits."""
        return aim.expected_bytes - self._limit

    def _may_be_between(self, fits: Aim, misses: Aim) -> bool:
        """Whether a schedule between two may be expected to fit and be faster than the first."""
        is_faster = misses.promise.time_s < (1 - _WORTH) * fits.promise.time_s
        return is_faster and self._over(fits) < -SLACK * self._limit

    def _between(self, fits: Aim | None, misses: Aim, nothing_within: int, num_missed: int) -> int:
        """The predicted peak of a schedule that is expected to reach the limit: on the straight
        line between one that fits and the only one that misses it, or halfway if others missed; or
        as much lower as the latter misses, or halfway to where there is nothing, whichever is
        higher.

        With each schedule that misses after the first, twice as much lower as before: often many
        have the same gaps, less of which is used the lower the predicted peak.
        """
        high = misses.promise.peak_bytes
        if fits is None:
            lower_bytes = self._over(misses) * 2 ** (num_missed - 1)
            return max(high - lower_bytes, (nothing_within + high) // 2)
        low = fits.promise.peak_bytes
        over_fits, over_misses = self._over(fits), self._over(misses)
        part = 0.5 if num_missed > 1 else -over_fits / (over_misses - over_fits)
        return low + int(part * (high - low))

    def _lowered(self, chain: Chain, aim: Aim, margin_bytes: int, *, groups: bool) -> Aim:
        """The same, or a schedule that is predicted lower, by up to the margin, and takes hardly
        longer for that."""
        longer = _WORTH_A_MARGIN * margin_bytes / self._limit
        longest_s = (1 + longer) * self._candidates.step_s(aim.promise)
        high = aim.promise.peak_bytes
        low = target = high - margin_bytes
        for _ in range(_MAX_LOWERED if margin_bytes else 0):
            lower = self._solved(chain, target, groups=groups)
            if lower is None or self._candidates.step_s(lower.promise) > longest_s:
                low = target
            else:
                aim, high = lower, min(target, lower.promise.peak_bytes)
                if high <= low:
                    break
            target = (low + high) // 2
        return aim

    def _solved(self, chain: Chain, peak_bytes: int, *, groups: bool) -> Aim | None:
        """The fastest schedule within a predicted peak, and what to expect of it; None if there is
        none."""
        candidates = self._candidates
        schedule = candidates.solve(chain, peak_bytes, self._solver, groups=groups)
        self.is_undecided |= schedule.outcome.status is Status.UNDECIDED
        if schedule.selection is None:
            return None
        selection = schedule.selection
        promise = candidates.context.predict(chain, selection)
        if groups and chain is candidates.chains.full and peak_bytes >= self._limit:
            self._shown_least_s = max(self._shown_least_s, candidates.step_s(promise))
        barriers = self._barriers(selection, promise)
        known = candidates.known(chain, selection, barriers)
        if known is None:
            expected_bytes = candidates.corrections.expected_bytes(selection, promise, barriers)
        else:
            expected_bytes = known.peak_bytes
        return Aim(schedule, selection, promise, barriers, expected_bytes)

    def _barriers(self, selection: Selection, promise: Prediction) -> Barriers:
        """The barriers to compile a selection with: those that are needed, but for those known to
        take time without which it is expected to fit."""
        candidates = self._candidates
        compiled, limit = candidates.compiled, self._limit
        barriers = needed_barriers(compiled, selection, limit, candidates.price_s)
        for some in reversed(OPTIONAL_BARRIERS):
            if some not in barriers:
                continue
            pair = nearest_pair(compiled, selection, limit, some)
            if pair is None:
                continue
            without_bytes = candidates.corrections.peak_without_bytes(
                some, selection, promise, barriers
            )
            if may_do_without(pair, without_bytes, limit):
                barriers &= ~some
        return barriers
