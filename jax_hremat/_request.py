"""What is asked of a plan, read and checked, and the plan for it."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from jax_hremat._bench import PlannerConfig, prepare
from jax_hremat._plan import RematPlan
from jax_hremat._planner import plan_within
from jax_hremat._search import Progress
from jax_hremat._target import Target, get_target
from jax_hremat._trace import Program
from jax_hremat._units import Budget, parse_budget

_logger = logging.getLogger("jax_hremat")


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The options of `plan_remat` and `hremat` that do not depend on the function."""

    budget: Budget
    target: Target
    headroom_bytes: int
    config: PlannerConfig
    progress: Progress

    @staticmethod
    def make(
        budget: int | float | str,
        target: str | os.PathLike[str] | Target | None,
        headroom_bytes: int,
        config: PlannerConfig | None,
        progress: Progress | None,
    ) -> PlanRequest:
        """Read the options as the user writes them; the budget's and the target's errors."""
        return PlanRequest(
            budget=parse_budget(budget),
            target=get_target(target),
            headroom_bytes=headroom_bytes,
            config=config or PlannerConfig(),
            progress=progress or _log_progress,
        )

    def plan(
        self,
        program: Program,
        trace_s: float,
        argnums: tuple[int, ...] = (),
        has_aux: bool = False,
    ) -> RematPlan:
        """Plan a traced program."""
        bench = prepare(program, self.target, self.config, trace_s, self.progress)
        return plan_within(
            bench,
            self.budget,
            headroom_bytes=self.headroom_bytes,
            argnums=argnums,
            has_aux=has_aux,
            progress=self.progress,
        )


def _log_progress(stage: str, done: int, total: int) -> None:
    _logger.info("%s: %d of %d", stage, done, total)
