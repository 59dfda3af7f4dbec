"""Plans certified before, kept beside what was compiled: none is made twice, and none is worse
than one that was made for less."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax_hremat._emit.step import Step
from jax_hremat._partition.blocks import partition_graph
from jax_hremat._plan.plan import FORMAT_VERSION, RematPlan
from jax_hremat._planner.context import PlannerConfig
from jax_hremat._planner.goals import Terms
from jax_hremat._shared.units import Budget, Slowdown
from jax_hremat._trace.fingerprint import fingerprint
from jax_hremat._trace.graph import build_graph
from jax_hremat._xla.cache import CompileCache, key_of
from jax_hremat._xla.compile import compiler_versions
from jax_hremat._xla.target import Target

_ADDRESS = re.compile(r"0x[0-9a-f]+")
# The newest are kept.
_MAX_PLANS = 64


@dataclass(frozen=True, slots=True)
class PlanCache:
    """What is kept of one step on one target.

    Two processes that add a plan at once may keep only one of them; nothing else is lost.

    Attributes:
        cache: Where.
        key: Of the step, the target, all versions and what else a plan records.
        effort: How hard the planner tries, and where it cuts the program.
    """

    cache: CompileCache
    key: str
    effort: str

    @staticmethod
    def of(
        step: Step, target: Target, terms: Terms, config: PlannerConfig, cache: CompileCache
    ) -> PlanCache:
        """Those of a step."""
        graph = build_graph(step.program)
        # A partitioner is any function, so it is known by what it does.
        starts = [block.start for block in partition_graph(graph, config.partitioner).blocks]
        search = replace(config.search, max_workers=1)  # How many decides how soon, and no more.
        effort = repr((search, config.solver, config.max_rounds, config.cost, starts))
        scopes = ",".join(op.scope for op in graph.operations)
        around = _ADDRESS.sub("", str(step.traced))
        described = (step.avals, step.donated, target, target.config_text, terms)
        built_by = (compiler_versions(), os.environ.get("XLA_FLAGS", ""))
        digest = fingerprint(step.program, graph).digest
        parts = (f"plans {FORMAT_VERSION}", digest, scopes, around, repr(described), repr(built_by))
        return PlanCache(cache, key_of(parts), effort)

    def asked(self, goal: Budget | Slowdown) -> str:
        """What a plan is asked for, as one text: the goal and the effort."""
        return f"{goal!r} {self.effort}"

    def read(self) -> dict[str, RematPlan]:
        """By what was asked, oldest first."""
        return self.cache.read(self.key, _decode) or {}

    def write(self, plans: Mapping[str, RematPlan]) -> None:
        """Keep the newest."""
        newest = list(plans.items())[-_MAX_PLANS:]
        self.cache.write(self.key, {asked: plan.to_json() for asked, plan in newest})


def best_of(plan: RematPlan, known: Iterable[RematPlan], goal: Budget | Slowdown) -> RematPlan:
    """The plan, or one known before that meets the goal and is better."""
    if isinstance(goal, Slowdown):
        longest_s = goal.ratio * plan.baseline_step_s
        meeting = [p for p in (plan, *known) if p.estimated_step_s <= longest_s]
        best = min(meeting, key=lambda p: p.certificate.peak_bytes, default=plan)
        return _for_budget(best, best.certificate.peak_bytes + best.certificate.headroom_bytes)
    budget_bytes = plan.certificate.budget_bytes
    fitting = [p for p in (_for_budget(p, budget_bytes) for p in known) if p.certificate.holds]
    return min((plan, *fitting), key=lambda p: p.estimated_step_s)


def _for_budget(plan: RematPlan, budget_bytes: int) -> RematPlan:
    certificate = replace(plan.certificate, budget_bytes=budget_bytes)
    return replace(plan, certificate=certificate)


def _decode(value: Any) -> dict[str, RematPlan]:
    return {str(asked): RematPlan.from_json(text) for asked, text in dict(value).items()}
