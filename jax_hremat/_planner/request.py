"""A request for a plan: its options, read and checked, and the plan that answers it."""

from __future__ import annotations

import functools
import operator
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import SupportsIndex

from jax_hremat._emit.step import Step
from jax_hremat._plan.certificate import Certificate
from jax_hremat._plan.infeasible import InfeasibleBudgetError
from jax_hremat._plan.plan import RematPlan
from jax_hremat._planner.candidates import Candidates
from jax_hremat._planner.config import Effort, PlannerConfig, config_of
from jax_hremat._planner.context import prepare
from jax_hremat._planner.forms import Form, better, forms_of, front_of, same_goal
from jax_hremat._planner.goals import Terms, certificate_of, frontier_plans, plan_for
from jax_hremat._planner.plan_cache import PlanCache, best_of
from jax_hremat._shared.errors import HRematWarning
from jax_hremat._shared.format import format_bytes
from jax_hremat._shared.progress import Progress, reporting
from jax_hremat._shared.units import Budget, Slowdown, parse_headroom
from jax_hremat._xla.cache import CompileCache
from jax_hremat._xla.certify import compile_step
from jax_hremat._xla.target import Target, get_target


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The planning options that do not depend on the function."""

    target: Target
    headroom_bytes: int
    config: PlannerConfig
    progress: Progress | None

    @staticmethod
    def make(
        target: str | os.PathLike[str] | Target | None,
        headroom_bytes: int | str,
        config: PlannerConfig | None,
        effort: Effort | None,
        progress: Progress | None,
    ) -> PlanRequest:
        """Read the options as the user writes them.

        Raises:
            The errors of `get_target` and of `config_of`.
        """
        return PlanRequest(
            target=get_target(target),
            headroom_bytes=parse_headroom(headroom_bytes),
            config=config_of(config, effort).of_strategy,
            progress=progress,
        )

    def plan(
        self,
        step: Step,
        trace_s: float,
        goal: Budget | Slowdown,
        argnums: tuple[int, ...] = (),
        has_aux: bool = False,
    ) -> RematPlan:
        """Plan the program inside a step, in each form that the configuration asks for.

        With a cache, a request made before is answered at once, and a stored plan that is better
        than the one found replaces it. The cache is not used with `kernel_costs` or a strategy of
        the user's own, which its key cannot contain. A budget larger than the device's memory gets
        an `HRematWarning`.
        """
        terms = Terms(argnums, has_aux, self.headroom_bytes)

        with reporting(self.progress, "planning") as progress:
            forms = [
                functools.partial(self._plan, form, trace_s, terms=terms, progress=progress)
                for form in forms_of(step, self.config)
            ]
            found = _best_answer(forms, goal)
        if isinstance(found, InfeasibleBudgetError):
            raise found
        warn_beyond_device(found.certificate)
        return found

    def plans(
        self,
        step: Step,
        trace_s: float,
        budgets: Sequence[Budget],
        argnums: tuple[int, ...],
        has_aux: bool,
    ) -> list[RematPlan | InfeasibleBudgetError]:
        """A plan or a refusal for each budget. Blocks are priced once for all of them, and plans
        are not looked up in the cache."""
        terms = Terms(argnums, has_aux, self.headroom_bytes)
        with reporting(self.progress, "planning") as progress:
            forms = [
                functools.partial(plan_for, self._candidates(form, trace_s, progress), terms=terms)
                for form in forms_of(step, self.config)
            ]
            return [_best_answer(forms, budget) for budget in budgets]

    def frontier(
        self,
        step: Step,
        trace_s: float,
        num_points: int,
        argnums: tuple[int, ...],
        has_aux: bool,
    ) -> tuple[RematPlan, ...]:
        """Plans for budgets between the least and that of no rematerialization, in each form that
        the configuration asks for."""
        terms = Terms(argnums, has_aux, self.headroom_bytes)
        with reporting(self.progress, "planning") as progress:
            return front_of(
                frontier_plans(self._candidates(form, trace_s, progress), num_points, terms)
                for form in forms_of(step, self.config)
            )

    def _candidates(self, form: Form, trace_s: float, progress: Progress) -> Candidates:
        """The candidates of a form: costs and baseline, which no goal changes."""
        context = prepare(form.step, self.target, form.config, trace_s, progress)
        return Candidates(context, progress)

    def _plan(
        self,
        form: Form,
        trace_s: float,
        goal: Budget | Slowdown,
        terms: Terms,
        progress: Progress,
    ) -> RematPlan:
        step = form.step
        cache = CompileCache.at(self.config.cache_dir)
        own = not isinstance(self.config.strategy, str)
        if cache is None or self.config.kernel_costs or own:
            return plan_for(self._candidates(form, trace_s, progress), goal, terms)
        known = PlanCache.of(step, self.target, terms, form.config, cache)
        asked = known.asked(goal)
        earlier = known.read()
        if asked in earlier:
            answer = best_of(earlier[asked], earlier.values(), goal)
            certified = self._certified(step, answer, terms, cache)
            if certified is not None:
                return certified
        found = plan_for(self._candidates(form, trace_s, progress), goal, terms)
        # Read again: another process may have planned meanwhile.
        earlier = known.read()
        plan = best_of(found, earlier.values(), goal)
        if plan.root != found.root:
            certified = self._certified(step, plan, terms, cache)
            if certified is None:
                certified, earlier = best_of(found, (), goal), {}
            plan = certified
        known.write({**earlier, asked: plan})
        return plan

    def _certified(
        self, step: Step, plan: RematPlan, terms: Terms, cache: CompileCache
    ) -> RematPlan | None:
        """A stored plan if the step compiles to the peak that it states; None if not. The check is
        needed because a fingerprint cannot describe everything an operation does. A step in the
        cache is not compiled again.

        On an attached device, where other kernels may be the fastest this time, the plan gets the
        certificate of this compilation, if that fits the budget.
        """
        compiled = compile_step(step, plan.root, self.target, cache)
        if compiled.memory.peak_bytes == plan.certificate.peak_bytes:
            return plan
        budget_bytes = plan.certificate.budget_bytes
        fits = compiled.memory.peak_bytes + terms.headroom_bytes <= budget_bytes
        if not (compiled.attached and fits):
            return None
        certificate = certificate_of(compiled, self.target, budget_bytes, terms)
        return replace(plan, certificate=certificate)


def _best_answer(
    forms: Sequence[Callable[[Budget | Slowdown], RematPlan]], goal: Budget | Slowdown
) -> RematPlan | InfeasibleBudgetError:
    """The best answer to a goal of the forms in which a program is planned."""

    def answer(
        plan: Callable[[Budget | Slowdown], RematPlan], goal: Budget | Slowdown
    ) -> RematPlan | InfeasibleBudgetError:
        try:
            return plan(goal)
        except InfeasibleBudgetError as refusal:
            return refusal

    as_is, *others = forms
    found = answer(as_is, goal)
    for other in others:
        found = better(found, answer(other, same_goal(goal, found)), goal)
    return found


def warn_beyond_device(certificate: Certificate) -> None:
    """Warn of a budget larger than the device's memory."""
    if certificate.exceeds_device and certificate.device_bytes is not None:
        warnings.warn(
            f"the budget of {format_bytes(certificate.budget_bytes)} is more than the "
            f"{format_bytes(certificate.device_bytes)} of one {certificate.target!r}; the plan "
            f"keeps the budget, with a peak of {format_bytes(certificate.peak_bytes)}, and the "
            f"device may be too small for it",
            HRematWarning,
            stacklevel=2,
        )


def positions_of(argnums: int | Sequence[int]) -> tuple[int, ...]:
    """`argnums` in the form that `jax.grad` accepts, as a tuple."""
    if isinstance(argnums, SupportsIndex):
        return (operator.index(argnums),)
    return tuple(map(operator.index, argnums))
