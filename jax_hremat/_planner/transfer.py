"""A plan made for other shapes, another device or another version: compiled and certified anew."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from jax_hremat._cost.kernels import kernel_book
from jax_hremat._emit.step import Step
from jax_hremat._plan.fingerprint import Fingerprint
from jax_hremat._plan.infeasible import InfeasibleBudgetError
from jax_hremat._plan.plan import RematPlan
from jax_hremat._plan.region import Region
from jax_hremat._planner.goals import Terms, certificate_of
from jax_hremat._planner.reports import largest_words
from jax_hremat._shared.errors import CertificationError, StalePlanError
from jax_hremat._shared.units import Budget
from jax_hremat._trace.fingerprint import fingerprint
from jax_hremat._trace.graph import build_graph
from jax_hremat._xla.certify import StepCompiler
from jax_hremat._xla.target import Target


def certified_again(
    step: Step, plan: RematPlan, target: Target, budget: Budget, headroom_bytes: int
) -> RematPlan:
    """The plan's regions in a program with the same operations, with that program's certificate.

    If the compiled step matches the plan to the byte, nothing else is compiled, and only the budget
    of the plan changes. Regions never change values or gradients; memory and time are those of the
    compiled step. Block costs are not known, so the new plan has no reports of single blocks.

    Raises:
        StalePlanError: The program's operations differ from those of the plan's program.
        InfeasibleBudgetError: The compiled peak is above the budget.
        CertificationError: By a fault of XLA, the step may read what it has overwritten, and
            without the regions it does not.
    """
    form = step.with_opened(plan.opened)
    own = fingerprint(form.program, build_graph(form.program))
    _check_same_operations(plan.fingerprint, own)
    compile_form = StepCompiler(form, target, kernels=kernel_book(form, {}))
    root, planned = compile_form.without_overwriting(plan.root)
    if root != plan.root:
        plan = replace(plan, root=root)
    terms = Terms(plan.argnums, plan.has_aux, headroom_bytes)
    budget_bytes = budget.resolve_bytes(plan.baseline_peak_bytes + headroom_bytes)
    fits = planned.memory.peak_bytes + headroom_bytes <= budget_bytes
    if own == plan.fingerprint and fits and not planned.overwrites:
        certificate = certificate_of(planned, target, budget_bytes, terms)
        asked = dict(budget_bytes=budget_bytes, headroom_bytes=headroom_bytes)
        before = replace(plan.certificate, **asked)
        if certificate == before and planned.step_s == plan.estimated_step_s:
            same = certificate == plan.certificate
            if same:
                return plan
            return replace(plan, certificate=certificate, bound_step_s=None, free_schedule=None)
    as_is = step.with_opened(replace(plan.opened, scan_steps=0))
    compile_whole = StepCompiler(as_is, target, kernels=kernel_book(as_is, {}))
    plain = compile_whole(Region(0, as_is.program.num_operations))
    if planned.overwrites_more_than(plain):
        raise CertificationError(
            f"under this plan kernels may read what they have overwritten, by a fault of XLA "
            f"before JAX 0.12: {', '.join(planned.overwrites)}. Its gradients may be wrong: make "
            f"a plan for this program, or use JAX 0.12"
        )
    budget_bytes = budget.resolve_bytes(plain.memory.peak_bytes + headroom_bytes)
    peak_bytes = planned.memory.peak_bytes
    if peak_bytes + headroom_bytes > budget_bytes:
        raise InfeasibleBudgetError(
            min_budget_bytes=peak_bytes + headroom_bytes,
            budget_bytes=budget_bytes,
            bottleneck=f"this plan, at whose peak the largest is {largest_words(planned)}",
            headroom_bytes=headroom_bytes,
            advice="make a plan for these shapes, which may do with less",
        )
    return replace(
        plan,
        fingerprint=own,
        certificate=certificate_of(planned, target, budget_bytes, terms),
        estimated_step_s=planned.step_s,
        baseline_step_s=plain.step_s,
        baseline_peak_bytes=plain.memory.peak_bytes,
        predicted_peak_bytes=peak_bytes,
        predicted_gaps_bytes=0,
        predicted_step_s=planned.step_s,
        bound_step_s=None,
        free_schedule=None,
        blocks=(),
        buffers=planned.buffers,
        moments=(),
        baseline_moments=(),
        unpriced=MappingProxyType(dict(planned.unknown)),
        num_compiles=MappingProxyType({"steps": 2, "blocks": 0}),
        timings_s=MappingProxyType({}),
    )


def _check_same_operations(plans: Fingerprint, own: Fingerprint) -> None:
    """Check that the two programs have the same operations; shapes may differ."""
    if len(plans.operations) != len(own.operations):
        raise StalePlanError(
            f"the plan is for a program of {len(plans.operations)} operations, and this one has "
            f"{len(own.operations)}; only shapes may differ. Make a plan for this program"
        )
    for i, (a, b) in enumerate(zip(plans.operations, own.operations, strict=True)):
        before, now = plans.signatures[a], own.signatures[b]
        if _primitive(before) != _primitive(now):
            raise StalePlanError(
                f"operation {i} of the plan's program is {before}, and here {now}; only shapes may "
                f"differ. Make a plan for this program"
            )


def _primitive(signature: str) -> str:
    return signature.split("[", 1)[0]
