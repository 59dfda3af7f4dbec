"""`RematPlan` -> predicted memory over the step, with the plan and without rematerialization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_hremat._plan.plan import RematPlan


@dataclass(frozen=True, slots=True)
class MemoryOverStep:
    """Predicted memory at each moment of a step: the forward of every block, then the backwards in
    reverse order.

    Attributes:
        fixed_bytes: Arguments, results and constants, which no plan changes; part of all totals.
        with_plan_bytes: The total at each of `RematPlan.moments`.
        without_bytes: The total at each of `RematPlan.baseline_moments`.
    """

    fixed_bytes: int
    with_plan_bytes: tuple[int, ...]
    without_bytes: tuple[int, ...]

    @property
    def most_bytes(self) -> int:
        """The largest total of both."""
        return max(*self.with_plan_bytes, *self.without_bytes)

    def shown_bytes(self, budget_bytes: int) -> int:
        """How far up a picture shows the memory: to the budget too, unless that is so far above
        both steps that it would press them flat."""
        most_bytes = self.most_bytes
        return max(most_bytes, budget_bytes) if budget_bytes <= 2 * most_bytes else most_bytes


def memory_over_step(plan: RematPlan) -> MemoryOverStep | None:
    """The predicted memory; None for a plan without predictions (`certify`)."""
    if not plan.moments:
        return None
    live = [m.live_bytes for m in plan.moments]
    fixed_bytes = plan.predicted_peak_bytes - max(live)
    return MemoryOverStep(
        fixed_bytes=fixed_bytes,
        with_plan_bytes=tuple(fixed_bytes + size for size in live),
        without_bytes=tuple(fixed_bytes + m.live_bytes for m in plan.baseline_moments),
    )
