"""One model, planned and compiled: the rows and facts that the benchmarks' tables are made of."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax_hremat
from benchmarks import zoo
from benchmarks.device import machine
from jax_hremat._calls.planned import Loss
from jax_hremat._emit.step import own_step
from jax_hremat._options.roles import PRESETS
from jax_hremat._plan.plan import RematPlan
from jax_hremat._plan.region import Region
from jax_hremat._planner.candidates import Candidates
from jax_hremat._planner.context import PlanningContext, prepare
from jax_hremat._planner.cost_table import CostTable
from jax_hremat._planner.goals import Terms, plan_for
from jax_hremat._shared.units import Budget
from jax_hremat._solve.regions import Barriers, selection_region
from jax_hremat._trace.trace import Program
from jax_hremat._xla.certify import CompiledStep, compile_step
from jax_hremat._xla.compile import compiler_versions

# What may be done to a problem before it is traced.
Place = Callable[[zoo.Problem], zoo.Problem]


@dataclass(frozen=True)
class Row:
    """One step, compiled.

    Attributes:
        label: What it is.
        peak_bytes: Compiled peak.
        step_s: Roofline estimate.
        budget_bytes: For a plan, its budget.
        predicted_peak_bytes: For a plan, the peak predicted before the step was compiled, with the
            gaps between buffers.
        predicted_step_s: Likewise the time.
        solve_s: For a plan, seconds in the solver.
        certify_s: Seconds compiling whole steps.
        num_steps: Whole steps compiled.
    """

    label: str
    peak_bytes: int
    step_s: float
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_step_s: float | None = None
    solve_s: float | None = None
    certify_s: float | None = None
    num_steps: int | None = None


@dataclass(frozen=True)
class Setting:
    """What is said of every model: what it is, and where and when it was measured."""

    model: str
    description: str
    target: str
    versions: Mapping[str, str]
    machine: str
    date: str


@dataclass(frozen=True)
class Pieces(Setting):
    """And what it was cut into and priced as.

    Attributes:
        timings_s: Seconds up to the costs.
    """

    num_operations: int
    num_blocks: int
    num_kinds: int
    num_block_compiles: int
    timings_s: Mapping[str, float]


@dataclass(frozen=True)
class Facts(Pieces):
    """And how it was prepared; while the costs are found, the no-remat step is compiled."""

    no_remat: Row


def prepared(
    name: str,
    target: jax_hremat.Target,
    size: zoo.Size,
    config: jax_hremat.PlannerConfig | None = None,
    place: Place = lambda problem: problem,
    **overrides: Any,
) -> tuple[PlanningContext, dict[str, Any]]:
    """A model up to the costs, and the fields of its `Facts`.

    Args:
        name: Its name in the zoo.
        target: What it is compiled for.
        size: Its size in the zoo.
        config: How hard the planner tries.
        place: Puts its arguments on a mesh.
        **overrides: Fields of the model's config, as for `zoo.make`.
    """
    problem = place(zoo.make(name, size, **overrides))
    start_s = time.perf_counter()
    program = traced(problem)
    trace_s = time.perf_counter() - start_s
    context = prepare(own_step(program), target, config or jax_hremat.PlannerConfig(), trace_s, say)
    return context, dict(
        **pieces_of(problem, target.name, context.costs, context.timings_s),
        no_remat=Row("no remat", context.baseline.memory.peak_bytes, context.baseline.step_s),
    )


def hand_row(
    name: str,
    size: zoo.Size,
    policy: Any,
    target: jax_hremat.Target,
    place: Place = lambda problem: problem,
    **overrides: Any,
) -> Row:
    """A model with a hand-written policy, compiled."""
    step = compiled(place(zoo.make(name, size, remat=policy, **overrides)), target)
    return Row(policy, step.memory.peak_bytes, step.step_s)


def preset_rows(context: PlanningContext) -> list[Row]:
    """MaxText's presets on every layer or step of a scan, compiled; none where there is no
    attention."""
    under = context.steps_under if context.costs.has_scans else context.layers_under
    rows = []
    for name in (name for name in context.costs.policies if name in PRESETS):
        root = selection_region(context.costs.graph, *under(name), Barriers.NONE)
        step = context.compile_step(root)
        rows.append(Row(name, step.memory.peak_bytes, step.step_s))
    return rows


def candidates_of(context: PlanningContext) -> Candidates:
    """What all budgets of a model share."""
    return Candidates(context, say)


def plan_row(
    candidates: Candidates, label: str, budget_bytes: int, *, has_aux: bool = False
) -> tuple[Row, RematPlan]:
    """A plan for a budget, and its figures; `has_aux` matters where the plan is applied."""
    plan = plan_for(candidates, Budget(bytes=budget_bytes), Terms((0,), has_aux))
    return row_of(label, plan), plan


def row_of(label: str, plan: RematPlan) -> Row:
    """A plan's figures."""
    return Row(
        label=label,
        peak_bytes=plan.certificate.peak_bytes,
        step_s=plan.estimated_step_s,
        budget_bytes=plan.certificate.budget_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes + plan.predicted_gaps_bytes,
        predicted_step_s=plan.predicted_step_s,
        solve_s=plan.timings_s["solve"],
        certify_s=plan.timings_s["certify"],
        num_steps=plan.num_compiles["steps"],
    )


def planner_of(
    problem: zoo.Problem,
    target: str | jax_hremat.Target,
    budget: float | int,
    config: jax_hremat.PlannerConfig,
) -> Callable[..., RematPlan]:
    """`plan_remat` for a model's loss."""
    return jax_hremat.plan_remat(
        problem.loss_fn,
        budget=budget,
        argnums=problem.argnums,
        has_aux=problem.has_aux,
        target=target,
        config=config,
        progress=say,
    )


def traced(problem: zoo.Problem) -> Program:
    """The program of a model's loss."""
    loss = Loss(problem.loss_fn, (problem.argnums,), problem.has_aux)
    return loss.trace(problem.args, {}).program


def compiled(problem: zoo.Problem, target: jax_hremat.Target) -> CompiledStep:
    """A model's step as it is written, traced and compiled."""
    program = traced(problem)
    return compile_step(own_step(program), Region(0, program.num_operations), target)


def say(stage: str, done: int, total: int) -> None:
    """Progress, in a terminal only."""
    if sys.stdout.isatty():
        print(f"\r{stage}: {done} of {total}".ljust(60), end="", flush=True)


def setting_of(problem: zoo.Problem, target_name: str) -> dict[str, Any]:
    """The fields of a `Setting`, here and now."""
    return dict(
        model=problem.name,
        description=problem.description,
        target=target_name,
        versions=compiler_versions(),
        machine=machine(),
        date=time.strftime("%Y-%m-%d"),
    )


def pieces_of(
    problem: zoo.Problem, target_name: str, costs: CostTable, timings_s: Mapping[str, float]
) -> dict[str, Any]:
    """The fields of a `Pieces`."""
    return dict(
        **setting_of(problem, target_name),
        num_operations=len(costs.graph.operations),
        num_blocks=len(costs.partition.blocks),
        num_kinds=len(costs.partition.unique),
        num_block_compiles=costs.num_measured,
        timings_s=timings_s,
    )


def mib(count_bytes: int) -> str:
    """Bytes in MiB, as a cell."""
    return f"{count_bytes / 2**20:.0f}"


def ms(duration_s: float) -> str:
    """Seconds in ms, as a cell."""
    return f"{duration_s * 1e3:.2f}"
