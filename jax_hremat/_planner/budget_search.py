"""One budget: solve, compile the whole step, compare, and solve again."""

from __future__ import annotations

from jax_hremat._planner.candidates import NO_SOLVE, Candidate, Candidates
from jax_hremat._solve.backend import SolverConfig, Status, undecided
from jax_hremat._solve.coarsening import Space, bottom
from jax_hremat._solve.regions import Barriers

# Stop improving a certified plan when this little of the budget is left unused.
_SLACK = 0.01
# Compile another plan only if it promises a step this much shorter.
_WORTH = 0.002
# After a miss, aim lower by this part of the limit, then by twice as much.
_MARGIN = 0.0025
# A plan misses widely if its peak is above the limit by more than this part of it.
_WIDE_MISS = 0.1
# Compile a standard plan as well if its predicted peak, were it as much too high as the worst one
# seen, is at most this many times the limit.
_TOLERANCE = 1.25
# … or this many times, where nothing else fits …
_LAST_TOLERANCE = 1.5
# … and its predicted time at most this many times the best one's.
_TIME_TOLERANCE = 1.005
# Part of the solver's nodes that a search for a lower floor gets, of which there may be many.
_FLOOR_NODES = 0.3


class BudgetSearch:
    """The rounds of one budget."""

    def __init__(
        self, candidates: Candidates, limit: int, solver: SolverConfig | None = None
    ) -> None:
        self._candidates = candidates
        self._limit = limit
        self._solver = solver or candidates.context.config.solver
        self._max_rounds = candidates.context.config.max_rounds
        self._missed = False
        self._undecided = False

    def fastest(self) -> Candidate | None:
        """The fastest plan found that fits.

        Raises:
            SolverError: The solver's limit was reached with neither a plan nor a proof of none.
        """
        best = self.search()
        if best is None:
            self._try_standard(_LAST_TOLERANCE)
            best = self._best()
        if best is None and self._undecided:
            raise undecided(self._solver)
        return best

    def search(self) -> Candidate | None:
        """Try the solver's plans and the standard ones; the fastest one known that fits."""
        self._solve_rounds(self._candidates.chain)
        if self._missed:
            self._solve_rounds(self._candidates.simple)
        self._try_standard(_TOLERANCE)
        for nested in self._candidates.nested:
            if self._best() is None:
                self._solve_rounds(nested)
        if self._best() is None:
            # Plans near the least peak are predicted worst; the least itself may still fit.
            _ = self._candidates.lowest
        return self._best()

    def _best(self) -> Candidate | None:
        return next(iter(self._candidates.within(self._limit)), None)

    def _solve_rounds(self, space: Space) -> None:
        """Solve, compile, compare, and solve again at a predicted peak that makes up for what
        was seen."""
        chain = bottom(space)
        # Plans of about the same peak are predicted about as wrong, so that is made up for at once.
        limit = self._limit + self._candidates.excess_near(self._limit)
        missed_at = self._candidates.plain.prediction.peak_bytes + 1
        groups, wide_misses = True, 0
        margin = _MARGIN * self._limit
        for _ in range(self._max_rounds + 1):
            schedule = self._candidates.solve(space, limit, self._solver, groups=groups)
            self._undecided |= schedule.outcome.status is Status.UNDECIDED
            if schedule.selection is None:
                break
            promise = self._candidates.context.predict(chain, schedule.selection)
            best = self._best()
            if best is not None and self._candidates.step_s(promise) > (1 - _WORTH) * best.step_s:
                break
            candidate = self._candidates.add(chain, schedule.selection, schedule.outcome)
            if self._misses_widely(candidate):
                candidate = self._with_barriers(candidate, Barriers.LOSS_TOO)
            excess = candidate.peak_bytes - self._limit
            if excess > 0:
                self._missed = True
                missed_at = min(missed_at, promise.peak_bytes)
                if schedule.outcome.status is Status.NODE_LIMIT:
                    # Lower down it is harder still; fewer options are easier.
                    break
                if self._misses_widely(candidate) and candidate.selection.groups:
                    # The compiler put something off that only these groups let it put off:
                    # other groups of nearly that peak first, then none.
                    groups, wide_misses = wide_misses == 0, wide_misses + 1
                    excess = 0
                # Further down than the miss, or the next plan may miss by a hair.
                limit = promise.peak_bytes - excess - int(margin)
                margin *= 2
            else:
                if -excess <= _SLACK * self._limit:
                    break
                limit = min(promise.peak_bytes - excess, missed_at - 1)

    def _try_standard(self, tolerance: float) -> None:
        """Compile the standard plans that may fit and be faster, as they are written by hand."""
        for chain, selection, prediction in self._candidates.standard:
            best = self._best()
            # Were its peak as much too high as the worst one seen, would it fit?
            tolerated_bytes = tolerance * self._candidates.overestimate * self._limit
            step_s = self._candidates.step_s(prediction)
            if prediction.peak_bytes <= tolerated_bytes and (
                best is None or step_s < _TIME_TOLERANCE * best.step_s
            ):
                candidate = self._candidates.add(chain, selection, NO_SOLVE, Barriers.NONE)
                if self._misses_widely(candidate) and prediction.peak_bytes <= self._limit:
                    self._with_barriers(candidate, Barriers.CHECKPOINTED)

    def _with_barriers(self, candidate: Candidate, barriers: Barriers) -> Candidate:
        """The same plan with less left to the compiler to put off, if that is lower."""
        barrier = self._candidates.add(
            candidate.chain, candidate.selection, candidate.outcome, barriers
        )
        return min(candidate, barrier, key=lambda c: c.peak_bytes)

    def _misses_widely(self, candidate: Candidate) -> bool:
        return candidate.peak_bytes > (1 + _WIDE_MISS) * self._limit

    def floor(self) -> Candidate:
        """The plan of least peak of a search by itself, which ends when none is found a hundredth
        below the least, or its rounds are over.

        What was compiled for a budget before plays no part, so that every refusal of a program
        names the same budget, and a plan is found for that.
        """
        alone = self._candidates.anew()
        _ = alone.lowest
        quick = self._solver.part(_FLOOR_NODES)
        for _ in range(alone.context.config.floor_rounds):
            limit = int((1 - _SLACK) * alone.least.peak_bytes)
            if BudgetSearch(alone, limit, quick).search() is None:
                break
        self._candidates.learn(alone)
        return alone.least
