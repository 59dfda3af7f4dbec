"""`Program`, `RematPlan` -> the function with the plan in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jax_hremat._plans.plan import RematPlan
from jax_hremat._program.emit import emit
from jax_hremat._program.lowered_for import lowered_for
from jax_hremat._program.trace import Program


def emit_plan(program: Program, plan: RematPlan) -> Callable[..., Any]:
    """`emit` of the plan's regions; warns when it is lowered for another platform than the plan's.

    Unchecked: that the plan is for the program.
    """
    emitted = emit(program, plan.root)
    platform, target = plan.certificate.platform, plan.certificate.target
    if platform is None:
        return emitted
    # One that gradients are taken of: the others may be dead code where only those are used.
    watched = program.differentiated[0]

    def applied(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        leaves[watched] = lowered_for(leaves[watched], platform, target)
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return emitted(*args, **kwargs)

    return applied
