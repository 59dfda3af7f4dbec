"""The forms in which a program is planned: its scans as they are, and short ones written out, cut
into blocks by each partitioner; and which form's plan is the answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jax_hremat._emit.step import Step
from jax_hremat._plan.infeasible import InfeasibleBudgetError
from jax_hremat._plan.plan import RematPlan
from jax_hremat._planner.config import PlannerConfig
from jax_hremat._shared.pareto import pareto_front
from jax_hremat._shared.units import Budget, Slowdown
from jax_hremat._trace.fingerprint import fingerprint
from jax_hremat._trace.graph import build_graph

Answer = RematPlan | InfeasibleBudgetError


@dataclass(frozen=True, slots=True)
class Form:
    """A form in which a program is planned.

    Attributes:
        step: The step around the program, opened so far.
        config: The configuration, with one partitioner.
    """

    step: Step
    config: PlannerConfig


def forms_of(step: Step, config: PlannerConfig) -> list[Form]:
    """The different forms that are planned, first those with the scans as they are, and of these
    first that of the first partitioner."""
    steps = [step.with_opened(openings) for openings in config.forms]
    if len(steps) > 1:
        steps = list({_digest(form): form for form in reversed(steps)}.values())[::-1]
    return [Form(one, alone) for one in steps for alone in config.of_each_partitioner]


def _digest(step: Step) -> str:
    return fingerprint(step.program, build_graph(step.program)).digest


def same_goal(goal: Budget | Slowdown, of_first: Answer) -> Budget | Slowdown:
    """The goal that the first form was planned for, as it applies to the other forms: what is
    relative to "without rematerialization" is relative to the first form."""
    if isinstance(of_first, InfeasibleBudgetError):
        return Budget(bytes=of_first.budget_bytes)
    if isinstance(goal, Slowdown):
        return replace(goal, of_s=of_first.baseline_step_s)
    return Budget(bytes=of_first.certificate.budget_bytes)


def better(first: Answer, other: Answer, goal: Budget | Slowdown) -> Answer:
    """The better of the first form's answer and another's: the faster plan that fits the budget, or
    the smaller that is fast enough; of two refusals, the one that names the smaller budget.

    What a plan states of the step without rematerialization is that of the first form. Neither
    form has a selection that is predicted below the bound of the result.
    """
    if isinstance(other, InfeasibleBudgetError):
        if isinstance(first, RematPlan) or first.min_budget_bytes <= other.min_budget_bytes:
            return first
        plan = None if other.plan is None else _beside(other.plan, first.plan)
        return other.with_plan(plan)
    if isinstance(first, InfeasibleBudgetError):
        return _beside(other, first.plan)
    if isinstance(goal, Slowdown):
        longest_s = goal.resolve_s(first.baseline_step_s)
        is_better = other.estimated_step_s <= longest_s and _size(other) < _size(first)
    else:
        is_better = (other.estimated_step_s, _size(other)) < (first.estimated_step_s, _size(first))
    best = _beside(other, first) if is_better else first
    bounds_s = [p.bound_step_s for p in (first, other) if p.bound_step_s is not None]
    return replace(best, bound_step_s=min(bounds_s, default=None))


def front_of(frontiers: Iterable[Sequence[RematPlan]]) -> tuple[RematPlan, ...]:
    """The Pareto front of the frontiers of all forms, lowest peak first."""
    first, *others = frontiers
    plans = [*first, *(_beside(plan, first[0]) for other in others for plan in other)]
    return tuple(pareto_front(plans, lambda p: (_size(p), p.estimated_step_s)))


def _beside(plan: RematPlan, first: RematPlan | None) -> RematPlan:
    """The plan with the first form's figures without rematerialization, where they are known."""
    if first is None:
        return plan
    return replace(
        plan,
        baseline_step_s=first.baseline_step_s,
        baseline_peak_bytes=first.baseline_peak_bytes,
    )


def _size(plan: RematPlan) -> int:
    return plan.certificate.peak_bytes
