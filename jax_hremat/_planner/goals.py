"""`Candidates` and a goal -> `RematPlan`: the fastest plan that fits, the plan of least peak
that is fast enough, or all plans on the Pareto front of peak and time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from jax_hremat._plan.certificate import Certificate
from jax_hremat._plan.infeasible import InfeasibleBudgetError
from jax_hremat._plan.plan import RematPlan
from jax_hremat._planner.candidate import Candidate
from jax_hremat._planner.candidates import Candidates
from jax_hremat._planner.names import Names
from jax_hremat._planner.reports import (
    Decision,
    block_reports,
    bottleneck_words,
    closed_words,
    once_words,
)
from jax_hremat._planner.search_for import Search, search_for
from jax_hremat._planner.tradeoff import least_peak_within, spread
from jax_hremat._shared.errors import CertificationError
from jax_hremat._shared.format import format_bytes
from jax_hremat._shared.units import Budget, Slowdown
from jax_hremat._verify.replay import replay
from jax_hremat._xla.certify import CompiledStep
from jax_hremat._xla.compile import compiler_versions
from jax_hremat._xla.target import Target


@dataclass(frozen=True, slots=True)
class Terms:
    """What a plan records of its request, apart from the goal.

    Attributes:
        argnums: Positions of the arguments that are differentiated.
        has_aux: Whether the function returns `(loss, aux)`.
        headroom_bytes: Subtracted from each budget.
    """

    argnums: tuple[int, ...] = ()
    has_aux: bool = False
    headroom_bytes: int = 0


def plan_for(candidates: Candidates, goal: Budget | Slowdown, terms: Terms) -> RematPlan:
    """The certified plan for one goal.

    Raises:
        InfeasibleBudgetError: No plan found fits. The error carries the smallest sufficient budget.
    """
    before_s = candidates.timings_s
    if isinstance(goal, Slowdown):
        baseline_s = candidates.context.baseline.step_s
        best = least_peak_within(candidates, max(goal.resolve_s(baseline_s), baseline_s))
        return _plan(candidates, best, best.peak_bytes + terms.headroom_bytes, terms, before_s)
    whole_bytes = candidates.context.baseline.memory.peak_bytes + terms.headroom_bytes
    budget_bytes = goal.resolve_bytes(whole_bytes)
    search = search_for(candidates, budget_bytes - terms.headroom_bytes)
    best = search.fastest() or _of_least_peak(candidates, search, budget_bytes, terms, before_s)
    plan = _plan(candidates, best, budget_bytes, terms, before_s)
    bound_step_s = search.bound_step_s
    if bound_step_s is not None:
        bound_step_s = min(bound_step_s, plan.predicted_step_s)
    return replace(plan, bound_step_s=bound_step_s, free_schedule=search.free_schedule)


def frontier_plans(candidates: Candidates, num_points: int, terms: Terms) -> list[RematPlan]:
    """The Pareto front of the plans found, certified, lowest peak first.

    The budget of each plan is the memory it takes, headroom included.
    """
    before_s = candidates.timings_s
    best = spread(candidates, num_points)
    return [
        _plan(candidates, c, c.peak_bytes + terms.headroom_bytes, terms, before_s) for c in best
    ]


def _of_least_peak(
    candidates: Candidates,
    search: Search,
    budget_bytes: int,
    terms: Terms,
    before_s: Mapping[str, float],
) -> Candidate:
    """The plan that fits after all: the search for the least peak may find one that the search for
    the budget missed.

    Raises:
        InfeasibleBudgetError: It finds none.
    """
    floor = search.floor()
    fitting = candidates.within(budget_bytes - terms.headroom_bytes)
    if fitting:
        return fitting[0]
    context = candidates.context
    min_budget_bytes = floor.peak_bytes + terms.headroom_bytes
    plan = _plan(candidates, floor, min_budget_bytes, terms, before_s)
    raise InfeasibleBudgetError(
        min_budget_bytes=min_budget_bytes,
        budget_bytes=budget_bytes,
        bottleneck=bottleneck_words(
            Names(context.costs.graph, context.program.input_names),
            context.costs.partition,
            floor.prediction.peak.block,
            floor.step,
        )
        + closed_words(context.program)
        + once_words(context.costs.graph),
        plan=replace(plan, free_schedule=search.free_schedule),
        headroom_bytes=terms.headroom_bytes,
        more_effort=context.config.more_effort,
    )


def _plan(
    candidates: Candidates,
    best: Candidate,
    budget_bytes: int,
    terms: Terms,
    before_s: Mapping[str, float],
) -> RematPlan:
    context = candidates.context
    certificate = certificate_of(best.step, context.target, budget_bytes, terms)
    num_layouts = 0 if context.costs.graph.mesh is None else 1
    spent_s = {stage: s - before_s[stage] for stage, s in candidates.timings_s.items()}
    return RematPlan(
        root=best.root,
        fingerprint=candidates.fingerprint,
        argnums=terms.argnums,
        has_aux=terms.has_aux,
        certificate=certificate,
        estimated_step_s=best.step_s,
        baseline_step_s=context.baseline.step_s,
        baseline_peak_bytes=context.baseline.memory.peak_bytes,
        predicted_peak_bytes=best.prediction.peak_bytes,
        predicted_gaps_bytes=best.prediction.gaps_bytes,
        predicted_step_s=candidates.step_s(best.prediction),
        cost_source=context.config.cost,
        solver_status=best.outcome.status.value,
        solver_gap=best.outcome.gap,
        blocks=block_reports(
            Decision(
                graph=context.costs.graph,
                input_names=context.program.input_names,
                partition=context.costs.partition,
                bodies=context.costs.bodies,
                chain=best.chain,
                selection=best.selection,
                plain=[context.costs.options[kind].plain for kind in context.costs.partition.kinds],
                recomputed=replay(context.program, best.root).recomputed,
            )
        ),
        buffers=best.step.buffers,
        moments=best.prediction.moments,
        baseline_moments=candidates.plain.prediction.moments,
        unpriced=MappingProxyType(dict(best.step.unknown)),
        own_checkpoints=context.program.own_checkpoints,
        opened=context.program.opened,
        num_compiles=MappingProxyType(
            {
                "steps": candidates.num_compiled + num_layouts,
                "blocks": 0 if context.config.cost == "analytic" else context.costs.num_measured,
            }
        ),
        timings_s=MappingProxyType({**context.timings_s, **spent_s}),
    )


def certificate_of(
    step: CompiledStep, target: Target, budget_bytes: int, terms: Terms
) -> Certificate:
    """The certificate of a compiled step that fits its budget.

    Raises:
        CertificationError: The step does not fit.
    """
    memory = step.memory
    certificate = Certificate(
        peak_bytes=memory.peak_bytes,
        budget_bytes=budget_bytes,
        headroom_bytes=terms.headroom_bytes,
        argument_bytes=memory.argument_bytes,
        output_bytes=memory.output_bytes,
        temp_bytes=memory.temp_bytes,
        constant_bytes=memory.constant_bytes,
        target=target.name,
        compiler_options=MappingProxyType({k: str(v) for k, v in target.compiler_options.items()}),
        versions=MappingProxyType(compiler_versions()),
        mesh=step.mesh,
        platform=target.platform,
        # The memory of the packaged CPU target is nominal.
        device_bytes=None if target.platform == "cpu" else target.memory_bytes,
        attached=step.attached,
    )
    if not certificate.holds:
        raise CertificationError(
            f"the chosen plan takes {format_bytes(memory.peak_bytes)}, more than the budget of "
            f"{format_bytes(budget_bytes)}; please report this as a bug of jax_hremat"
        )
    return certificate
