"""The search for one budget by a published method: the strategy chooses, the whole step is
compiled, and the limit on the predicted peak is corrected by the error seen."""

from __future__ import annotations

from dataclasses import replace

from jax_hremat._plan.free_schedule import FreeSchedule
from jax_hremat._planner.candidate import Candidate
from jax_hremat._planner.candidates import NO_SOLVE, Candidates
from jax_hremat._solve.chain import Chain
from jax_hremat._solve.prediction import Prediction
from jax_hremat._solve.regions import Barriers
from jax_hremat._strategies.strategy import Choices, FreeChoices

# Stop once at most this part of the budget is unused.
_SLACK = 0.01
# After a plan above the limit, lower the target by this part of the limit, then by twice as much.
_MARGIN = 0.0025


class StrategySearch:
    """The rounds of choosing and compiling for one budget."""

    def __init__(self, candidates: Candidates, limit: int, chain: Chain, choices: Choices) -> None:
        self._candidates = candidates
        self._limit = limit
        self._max_rounds = candidates.context.config.max_rounds
        self._chain = chain
        self._choices = choices

    @property
    def bound_step_s(self) -> float | None:
        """No selection of the strategy's options, in groups of the root program, is predicted to
        make a faster step within the limit, corrected as in `BudgetSearch`; None without a plan
        that fits."""
        best = self._candidates.fastest_within(self._limit)
        if best is None:
            return None
        excess_bytes = self._candidates.corrections.excess_near(
            self._limit, best.selection, Barriers.USUAL
        )
        return self._candidates.least_possible_step_s(self._limit - excess_bytes)

    @property
    def free_schedule(self) -> FreeSchedule | None:
        """The strategy's own schedule within the limit, if nested checkpoints cannot express its
        schedules."""
        if not isinstance(self._choices, FreeChoices):
            return None
        free = self._choices.free(self._limit)
        return free and replace(free, step_s=self._candidates.whole_step_s(free.step_s))

    def predicted(self, peak_bytes: int) -> Prediction | None:
        """What the strategy chooses within a predicted peak, as predicted."""
        selection = self._choices.fastest(peak_bytes)
        return (
            None if selection is None else self._candidates.context.predict(self._chain, selection)
        )

    def search(self) -> Candidate | None:
        """The fastest plan found that fits."""
        limit, missed_at = self._limit, None
        margin = _MARGIN * self._limit
        for _ in range(self._max_rounds + 1):
            selection = self._choices.fastest(limit)
            if selection is None:
                break
            promise = self._candidates.context.predict(self._chain, selection)
            candidate = self._candidates.add(self._chain, selection, NO_SOLVE)
            excess = candidate.peak_bytes - self._limit
            if excess > 0:
                missed_at = min(promise.peak_bytes, missed_at or promise.peak_bytes)
                limit = promise.peak_bytes - excess - int(margin)
                margin *= 2
            elif -excess <= _SLACK * self._limit:
                break
            else:
                limit = promise.peak_bytes - excess
                if missed_at is not None:
                    limit = min(limit, missed_at - 1)
        return self._candidates.fastest_within(self._limit)

    def fastest(self) -> Candidate | None:
        """The fastest plan found that fits; the one of least predicted peak is tried last."""
        found = self.search()
        if found is None:
            self._candidates.add(self._chain, self._choices.lowest(), NO_SOLVE)
            found = self._candidates.fastest_within(self._limit)
        return found

    def floor(self) -> Candidate:
        """The plan of least compiled peak that the strategy makes: its selection of least predicted
        peak, then selections for ever smaller budgets while they lower the peak."""
        alone = self._candidates.anew()
        alone.add(self._chain, self._choices.lowest(), NO_SOLVE)
        for _ in range(alone.context.config.floor_rounds):
            limit = int((1 - _SLACK) * alone.least.peak_bytes)
            if StrategySearch(alone, limit, self._chain, self._choices).search() is None:
                break
        self._candidates.learn(alone)
        return alone.least
