"""What is known about the kernels of a step before any part of it is compiled."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from jax_hremat._emit.emit import emit_flat
from jax_hremat._emit.step import Step
from jax_hremat._plan.region import Region
from jax_hremat._primitives.kernels import KernelBook, KernelPrice
from jax_hremat._primitives.traced import may_call_kernels, traced_calls
from jax_hremat._trace.trace import abstract


def kernel_book(step: Step, kernel_costs: Mapping[str, KernelPrice]) -> KernelBook:
    """The user's prices, and the kernels of the step traced without rematerialization. Plans run
    the same kernels, only more often.

    Args:
        step: The step.
        kernel_costs: The user's prices, as `PlannerConfig` takes them.
    """
    program = step.program
    if not may_call_kernels(step.traced or program.jaxpr):
        return KernelBook(priced=kernel_costs)
    plain = step.around(emit_flat(program, Region(0, program.num_operations)))
    traced = jax.make_jaxpr(plain)(*map(abstract, step.avals))
    return KernelBook(traced_calls(program.jaxpr, traced), kernel_costs)
