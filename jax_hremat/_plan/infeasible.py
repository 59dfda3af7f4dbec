"""The error that no plan fits a budget, with the smallest budget that a plan was found for."""

from __future__ import annotations

import functools
from typing import Any

from jax_hremat._plan.plan import RematPlan
from jax_hremat._shared.errors import HRematError
from jax_hremat._shared.format import format_bytes


class InfeasibleBudgetError(HRematError):
    """No plan keeps the step's peak memory at or under the budget.

    No plan that was compiled has a peak within the budget: the arguments, the outputs and the
    largest working set of a single region cannot be recomputed away.

    Failing example, with parameters that alone take 6 GiB::

        jax_hremat.hremat(loss_fn, budget="1GiB")(params, batch)

    Fix: give at least ``error.min_budget_bytes``, or make what ``error.bottleneck`` names smaller
    (a smaller batch, donated arguments, parameters in a narrower dtype)::

        jax_hremat.hremat(loss_fn, budget=error.min_budget_bytes)(params, batch)

    The plan for that budget is made already, and can be used as it is::

        jax_hremat.apply_plan(loss_fn, error.plan)(params, batch)

    Attributes:
        min_budget_bytes: The smallest budget, in bytes, that a plan was found for.
        budget_bytes: The budget that was asked for, in bytes.
        bottleneck: What sets the smallest budget, in words.
        plan: The certified plan for `min_budget_bytes`; None where a given plan was certified
            again, and none was made.
        headroom_bytes: What was subtracted from the budget, and is part of both budgets above.
        more_effort: The next higher effort of planning, which may find a smaller budget; None if
            there is none, or the configuration was not an effort's.
        advice: What else can be done, in words.
    """

    min_budget_bytes: int
    budget_bytes: int
    bottleneck: str
    plan: RematPlan | None
    headroom_bytes: int
    more_effort: str | None
    advice: str

    def __init__(
        self,
        *,
        min_budget_bytes: int,
        budget_bytes: int,
        bottleneck: str,
        plan: RematPlan | None = None,
        headroom_bytes: int = 0,
        more_effort: str | None = None,
        advice: str = "make that part of the step smaller (smaller batch, donated arguments, "
        "narrower dtype)",
    ) -> None:
        self.min_budget_bytes = min_budget_bytes
        self.budget_bytes = budget_bytes
        self.bottleneck = bottleneck
        self.plan = plan
        self.headroom_bytes = headroom_bytes
        self.more_effort = more_effort
        self.advice = advice
        headroom = f", {format_bytes(headroom_bytes)} of it headroom" if headroom_bytes else ""
        effort = f"plan with effort={more_effort!r}, which may find less, " if more_effort else ""
        super().__init__(
            f"no plan fits the budget of {format_bytes(budget_bytes)}{headroom}; the smallest "
            f"budget that a plan was found for is {format_bytes(min_budget_bytes)}, set by "
            f"{bottleneck}. Raise the budget to at least {min_budget_bytes} bytes, {effort}or "
            f"{advice}."
        )

    def with_plan(self, plan: RematPlan | None) -> InfeasibleBudgetError:
        """The same refusal with another plan."""
        return InfeasibleBudgetError(**{**self._arguments, "plan": plan})

    @property
    def _arguments(self) -> dict[str, Any]:
        return dict(
            min_budget_bytes=self.min_budget_bytes,
            budget_bytes=self.budget_bytes,
            bottleneck=self.bottleneck,
            plan=self.plan,
            headroom_bytes=self.headroom_bytes,
            more_effort=self.more_effort,
            advice=self.advice,
        )

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions pickle by positional arguments, and this one takes keywords only.
        return functools.partial(InfeasibleBudgetError, **self._arguments), ()
