"""The search for one budget, by whichever strategy the configuration names."""

from __future__ import annotations

from typing import Protocol

from jax_hremat._plan.free_schedule import FreeSchedule
from jax_hremat._planner.budget_search import BudgetSearch
from jax_hremat._planner.candidate import Candidate
from jax_hremat._planner.candidates import Candidates
from jax_hremat._planner.strategy_search import StrategySearch
from jax_hremat._solve.prediction import Prediction


class Search(Protocol):
    """A search for the plan of one budget, given as the limit of the compiled peak in bytes."""

    @property
    def bound_step_s(self) -> float | None:
        """No selection of the options is predicted to be faster within the limit; None if that is
        not known."""
        ...

    @property
    def free_schedule(self) -> FreeSchedule | None:
        """A schedule within the limit that nested checkpoints cannot express; None if the search
        knows no such schedules, or none that fits."""
        ...

    def predicted(self, peak_bytes: int) -> Prediction | None:
        """The fastest selection within a predicted peak, as predicted; None if there is none."""
        ...

    def search(self) -> Candidate | None:
        """The fastest plan found that fits."""
        ...

    def fastest(self) -> Candidate | None:
        """The same, with more tries where none fits."""
        ...

    def floor(self) -> Candidate:
        """The plan of least compiled peak, found by a search of its own."""
        ...


def search_for(candidates: Candidates, limit: int) -> Search:
    """The search for a compiled peak of at most `limit` bytes."""
    if candidates.chains.of_strategy is None:
        return BudgetSearch(candidates, limit)
    return StrategySearch(candidates, limit, *candidates.chains.of_strategy)
