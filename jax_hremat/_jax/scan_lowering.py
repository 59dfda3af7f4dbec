"""What a scan is lowered to: a loop that writes each step's results into arrays made before it."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax._src.lax.control_flow import loops

# The scalar with which JAX fills the arrays that a scan writes into.
EMPTY = "empty2"


def scan_as_loop(eqn: Any) -> Any:
    """The equation of a scan as the closed jaxpr that JAX lowers it to."""
    run = functools.partial(loops._scan_impl, **eqn.params)
    return jax.make_jaxpr(run)(*(v.aval for v in eqn.invars))
