"""Checks made where a plan is applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax_hremat._jax.lowered_for import lowered_for
from jax_hremat._plan.plan import RematPlan


def warned_of(plan: RematPlan) -> Callable[[Any], Any]:
    """An identity function that warns when it is lowered for another platform than the plan's."""
    platform, target = plan.certificate.platform, plan.certificate.target
    if platform is None:
        return lambda value: value
    return lambda value: lowered_for(value, platform, target)
