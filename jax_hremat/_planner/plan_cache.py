"""Plans certified earlier, stored in the compilation cache: no plan is made twice, and no new
plan is worse than a stored one for a smaller budget."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax_hremat._emit.step import Step
from jax_hremat._partition.blocks import partition_graph
from jax_hremat._plan.plan import FORMAT_VERSION, RematPlan
from jax_hremat._planner.config import PlannerConfig
from jax_hremat._planner.goals import Terms
from jax_hremat._shared.units import Budget, Slowdown
from jax_hremat._trace.fingerprint import fingerprint
from jax_hremat._trace.graph import build_graph
from jax_hremat._xla.cache import CompileCache, key_of
from jax_hremat._xla.compile import compiler_versions
from jax_hremat._xla.target import Target

_ADDRESS = re.compile(r"0x[0-9a-f]+")
# The most plans stored for one step; the newest are kept.
_MAX_PLANS = 64


@dataclass(frozen=True, slots=True)
class PlanCache:
    """The stored plans of one step on one target.

    If two processes add a plan at the same time, only one of the two may be kept; nothing else is
    lost.

    Attributes:
        cache: The cache that stores the plans.
        key: Key of the step, the target, all versions and whatever else a plan records.
        effort: How hard the planner tries, and where it cuts the program into blocks.
    """

    cache: CompileCache
    key: str
    effort: str

    @staticmethod
    def of(
        step: Step, target: Target, terms: Terms, config: PlannerConfig, cache: CompileCache
    ) -> PlanCache:
        """The stored plans of a step."""
        graph = build_graph(step.program)
        # A partitioner may be any function, so the key contains the cuts that it makes.
        starts = [block.start for block in partition_graph(graph, config.partitioners[0]).blocks]
        search = replace(config.search, max_workers=1)  # Their number changes no answer.
        effort = repr((search, config.solver, config.max_rounds, config.cost, starts))
        scopes = ",".join(op.scope for op in graph.operations)
        around = _ADDRESS.sub("", str(step.traced))
        described = (step.avals, step.donated, target, target.config_text, terms)
        built_by = (compiler_versions(), os.environ.get("XLA_FLAGS", ""))
        digest = fingerprint(step.program, graph).digest
        # A plan of another strategy is no answer, even if it is better.
        planned_by = f"plans {FORMAT_VERSION} {config.strategy}"
        parts = (planned_by, digest, scopes, around, repr(described), repr(built_by))
        return PlanCache(cache, key_of(parts), effort)

    def asked(self, goal: Budget | Slowdown) -> str:
        """A request as one text: the goal and the effort."""
        return f"{goal!r} {self.effort}"

    def read(self) -> dict[str, RematPlan]:
        """The stored plans by request, oldest first."""
        return self.cache.read(self.key, _decode) or {}

    def write(self, plans: Mapping[str, RematPlan]) -> None:
        """Store the newest of these plans."""
        newest = list(plans.items())[-_MAX_PLANS:]
        self.cache.write(self.key, {asked: plan.to_json() for asked, plan in newest})


def best_of(plan: RematPlan, known: Iterable[RematPlan], goal: Budget | Slowdown) -> RematPlan:
    """The plan, or a better known plan that meets the goal."""
    if isinstance(goal, Slowdown):
        longest_s = goal.resolve_s(plan.baseline_step_s)
        meeting = [p for p in (plan, *known) if p.estimated_step_s <= longest_s]
        best = min(meeting, key=lambda p: p.certificate.peak_bytes, default=plan)
        best = replace(best, bound_step_s=None, free_schedule=None)
        return _for_budget(best, best.certificate.peak_bytes + best.certificate.headroom_bytes)
    budget_bytes = plan.certificate.budget_bytes
    fitting = [p for p in (_for_budget(p, budget_bytes) for p in known) if p.certificate.holds]
    best = min((plan, *fitting), key=lambda p: p.estimated_step_s)
    return replace(best, bound_step_s=plan.bound_step_s, free_schedule=plan.free_schedule)


def _for_budget(plan: RematPlan, budget_bytes: int) -> RematPlan:
    certificate = replace(plan.certificate, budget_bytes=budget_bytes)
    return replace(plan, certificate=certificate)


def _decode(value: Any) -> dict[str, RematPlan]:
    return {str(asked): RematPlan.from_json(text) for asked, text in dict(value).items()}
