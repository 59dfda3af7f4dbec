"""The search for one budget: solve, compile the whole step, compare its peak, and solve again."""

from __future__ import annotations

from jax_hremat._planner.aims import SLACK, Aims
from jax_hremat._planner.barriers import (
    NEGLIGIBLE,
    OPTIONAL_BARRIERS,
    Pair,
    may_do_without,
    nearest_pair,
    needed_barriers,
)
from jax_hremat._planner.candidate import Candidate
from jax_hremat._planner.candidates import NO_SOLVE, Candidates
from jax_hremat._planner.chains import StandardPlan
from jax_hremat._planner.peak_bound import PeakBound
from jax_hremat._solve.backend import SolverConfig, undecided
from jax_hremat._solve.chain import Chain
from jax_hremat._solve.prediction import Prediction
from jax_hremat._solve.regions import Barriers

# As long as none of its plans fits, a search has at most this many times as many rounds.
_PATIENCE = 2
# A plan misses widely if what is used at its compiled peak exceeds the limit by more than this part
# of the limit.
_WIDE_MISS = 0.1
# Also compile a standard plan if its optimistic peak is at most this many times the limit, beyond
# the bytes that no plan changes, …
_TOLERANCE = 1.25
# … or this many times the worst overestimate of standard plans like it, if that is less.
_TOLERANCE_SEEN = 1.05
# If a plan already fits, a standard plan is compiled only if its predicted time is below this many
# times that of the best plan.
_TIME_TOLERANCE = 1.005
# A lower least peak is lower by at least this part.
_LOWER = 0.01
# Part of the solver's nodes for each search for a lower least peak; there may be many searches.
_FLOOR_NODES = 0.3
# The same for each prediction without a plan.
_GUESS_NODES = 0.125


class BudgetSearch:
    """The rounds of solving and compiling for one budget."""

    def __init__(
        self, candidates: Candidates, limit: int, solver: SolverConfig | None = None
    ) -> None:
        self._candidates = candidates
        self._limit = limit
        self._solver = solver or candidates.context.config.solver
        self._max_rounds = candidates.context.config.max_rounds
        self._aims = Aims(candidates, limit, self._solver)
        self._untried = OPTIONAL_BARRIERS
        self._fits = self._missed = False

    def fastest(self) -> Candidate | None:
        """The fastest plan found that fits.

        Raises:
            SolverError: The solver reached its limit with neither a plan nor a proof that there is
                none.
        """
        best = self.search()
        if best is None and self._aims.is_undecided:
            raise undecided(self._solver)
        return best

    @property
    def free_schedule(self) -> None:
        """All schedules here are nests."""
        return None

    @property
    def bound_step_s(self) -> float | None:
        """No selection of the options is predicted to make a faster step within the limit; None if
        that was not asked, or if none is predicted to fit.

        The limit on the predicted peak is corrected by the error seen in a plan of about the same
        peak; a plan whose own error is larger may fit and be faster.
        """
        return self._aims.bound_step_s

    def predicted(self, peak_bytes: int) -> Prediction | None:
        """The fastest selection found within a predicted peak, as predicted, with a part of the
        solver's nodes; None if there is none."""
        chain = self._candidates.chains.full
        quick = self._solver.part(_GUESS_NODES)
        selection = self._candidates.solve(chain, peak_bytes, quick).selection
        return None if selection is None else self._candidates.context.predict(chain, selection)

    def search(self) -> Candidate | None:
        """Try the solver's plans and the standard plans; return the fastest plan that fits."""
        self._solve_rounds(self._candidates.chains.full)
        if self._missed and not self._fits:
            self._solve_rounds(self._candidates.chains.simple)
        best = self._best()
        if best is not None:
            self._without_some_barriers(best)
        self._try_standard()
        if self._best() is None:
            # Predictions are worst near the least peak, so the plan of least peak may still fit.
            self._candidates.compile_lowest()
        return self._best()

    def _best(self) -> Candidate | None:
        return self._candidates.fastest_within(self._limit)

    def _solve_rounds(self, chain: Chain) -> None:
        """Solve, compile, compare, and solve again within a predicted peak that is corrected by the
        prediction errors seen."""
        bound = self._first_bound()
        groups, wide_misses = True, 0
        is_bold = is_used_up = False
        self._fits |= self._uses_up(self._best())
        for number in range(_PATIENCE * (self._max_rounds + 1)):
            if number > self._max_rounds and self._fits:
                break
            aim = None if is_used_up else self._aims.next(chain, bound, groups=groups)
            if aim is None or (aim.expected_bytes > self._limit and self._best() is not None):
                # A single one that is expected to miss: predictions are not always right.
                aim = aim or self._aims.uncorrected(chain)
                if is_bold or aim is None or not self._aims.is_worth_a_risk(aim):
                    break
                is_bold = True
            outcome = aim.schedule.outcome
            candidate = self._candidates.add(chain, aim.selection, outcome, aim.barriers)
            candidate = self._with_more_barriers(candidate)
            candidate = self._with_fewer_barriers(candidate)
            predicted_bytes = aim.promise.peak_bytes
            # What is expected to be left by a plan that exceeds that peak as much as this one does.
            spare_bytes = self._limit - predicted_bytes - candidate.excess_bytes
            if candidate.peak_bytes > self._limit:
                self._missed = True
                if self._misses_widely(candidate) and candidate.selection.groups:
                    # The compiler delayed part of a backward, which only these groups allow: try
                    # other groups of nearly the same predicted peak first, then no groups.
                    groups, wide_misses = wide_misses == 0, wide_misses + 1
                    spare_bytes = 0
                bound.missed(predicted_bytes, spare_bytes, any_fits=self._fits)
            else:
                is_bold, is_used_up = False, self._uses_up(candidate)
                bound.fitted(predicted_bytes, spare_bytes)

    def _first_bound(self) -> PeakBound:
        """The bound of the first plan. Plans of about the same peak have about the same prediction
        error, which is corrected at once. A plan that leaves a little unused is as good, and one
        that takes a little more than predicted then still fits."""
        candidates = self._candidates
        like = (self._best() or candidates.least).selection
        barriers = needed_barriers(candidates.compiled, like, self._limit, candidates.price_s)
        excess_bytes = candidates.corrections.excess_near(self._limit, like, barriers)
        first_bytes = int((1 - SLACK) * self._limit) - excess_bytes
        return PeakBound(self._limit, first_bytes)

    def _uses_up(self, fitting: Candidate | None) -> bool:
        """Whether there is a plan that fits and leaves hardly any of the limit unused."""
        return fitting is not None and self._limit - fitting.peak_bytes <= SLACK * self._limit

    def _try_standard(self) -> None:
        """Compile the standard plans that may fit and be faster, without barriers, as a user would
        write them, those of the lowest predicted peak first."""
        faster = filter(self._may_be_faster, self._candidates.chains.standard)
        for plan in sorted(faster, key=lambda plan: plan.prediction.peak_bytes):
            if self._may_be_faster(plan) and self._may_fit_by_hand(plan):
                candidate = self._candidates.add(
                    plan.chain, plan.selection, NO_SOLVE, Barriers.NONE
                )
                if self._misses_widely(candidate) and plan.prediction.peak_bytes <= self._limit:
                    self._with_barriers(candidate, Barriers.USUAL)

    def _may_be_faster(self, plan: StandardPlan) -> bool:
        best, planned_s = self._best(), self._candidates.whole_step_s(plan.time_s)
        return best is None or planned_s < _TIME_TOLERANCE * best.step_s

    def _may_fit_by_hand(self, plan: StandardPlan) -> bool:
        corrections = self._candidates.corrections
        tolerance, seen = _TOLERANCE, corrections.worst_overestimate(plan.selection)
        if seen is not None:
            tolerance = min(tolerance, _TOLERANCE_SEEN * seen)
        fixed_bytes = corrections.fixed_bytes
        optimistic_bytes = corrections.optimistic_peak_bytes(plan.prediction) - fixed_bytes
        return optimistic_bytes <= tolerance * (self._limit - fixed_bytes)

    def _with_more_barriers(self, candidate: Candidate) -> Candidate:
        """The same plan with more barriers, as long as they may lower its peak: the usual ones, if
        no plan like it shows yet what they do, where it exceeds the prediction, and any where it
        misses and exceeds what is expected without delays. If some are not worth their time, no
        other plan of this search is tried with them."""
        price_s = self._candidates.price_s
        for some in self._untried:
            if some in candidate.barriers:
                continue
            misses = candidate.peak_bytes > self._limit
            may_help = misses and self._is_delayed(candidate)
            if some in Barriers.USUAL and self._nearest_pair(candidate, some) is None:
                may_help |= candidate.is_delayed(candidate.prediction.peak_bytes)
            if not may_help:
                continue
            behind = self._with_barriers(candidate, candidate.barriers | some)
            self._fits |= behind.peak_bytes <= self._limit
            if Pair(behind, candidate).are_worth_it(behind.prediction.peak_bytes, price_s):
                candidate = behind
            elif behind.root != candidate.root:
                self._untried = tuple(other for other in self._untried if other != some)
        return candidate

    def _is_delayed(self, candidate: Candidate) -> bool:
        expected_bytes = self._candidates.corrections.but_for(candidate).undelayed_bytes(
            candidate.selection, candidate.prediction, candidate.barriers
        )
        return candidate.is_delayed(min(expected_bytes, self._limit))

    def _with_fewer_barriers(self, candidate: Candidate) -> Candidate:
        """The same plan without those of its barriers that are not worth the time they take, if it
        fits. Only barriers are left out of which no plan like it shows yet what they do, and only
        while the step is longer than predicted."""
        price_s = self._candidates.price_s
        if candidate.peak_bytes > self._limit:
            return candidate
        self._fits = True
        for some in reversed(OPTIONAL_BARRIERS):
            if some not in candidate.barriers or not self._is_longer_than_predicted(candidate):
                continue
            if self._nearest_pair(candidate, some) is None:
                fewer = self._with_barriers(candidate, candidate.barriers & ~some)
                pair, peak_bytes = Pair(candidate, fewer), candidate.prediction.peak_bytes
                if fewer.root != candidate.root and pair.may_be_left_out(peak_bytes, price_s):
                    candidate = fewer
        return candidate

    def _without_some_barriers(self, candidate: Candidate) -> None:
        """Compile a plan whose step is longer than predicted without its barriers, as far as it is
        expected to fit."""
        for some in reversed(OPTIONAL_BARRIERS):
            if some not in candidate.barriers or not self._is_longer_than_predicted(candidate):
                continue
            without_bytes = self._candidates.corrections.peak_without_bytes(
                some, candidate.selection, candidate.prediction, candidate.barriers
            )
            pair = self._nearest_pair(candidate, some)
            if may_do_without(pair, without_bytes, self._limit):
                fewer = self._with_barriers(candidate, candidate.barriers & ~some)
                candidate = fewer if fewer.peak_bytes <= self._limit else candidate

    def _is_longer_than_predicted(self, candidate: Candidate) -> bool:
        predicted_s = self._candidates.step_s(candidate.prediction)
        return candidate.step_s > (1 + NEGLIGIBLE) * predicted_s

    def _nearest_pair(self, candidate: Candidate, some: Barriers) -> Pair | None:
        """The plan like this one, nearest to the limit, compiled with and without some barriers."""
        return nearest_pair(self._candidates.compiled, candidate.selection, self._limit, some)

    def _with_barriers(self, candidate: Candidate, barriers: Barriers) -> Candidate:
        """The same plan with other barriers."""
        return self._candidates.add(
            candidate.chain, candidate.selection, candidate.outcome, barriers
        )

    def _misses_widely(self, candidate: Candidate) -> bool:
        return candidate.used_bytes > (1 + _WIDE_MISS) * self._limit

    def floor(self) -> Candidate:
        """The plan of least peak, found by a search of its own.

        The search ends when no plan is found a hundredth below the least peak so far, or after
        `floor_rounds` rounds. Plans compiled earlier for a budget are not used. So every
        refusal of a program names the same smallest budget, and planning for it finds a plan.
        """
        alone = self._candidates.anew()
        alone.compile_lowest()
        quick = self._solver.part(_FLOOR_NODES)
        for _ in range(alone.context.config.floor_rounds):
            limit = int((1 - _LOWER) * alone.least.peak_bytes)
            if BudgetSearch(alone, limit, quick).search() is None:
                break
        self._candidates.learn(alone)
        return alone.least
