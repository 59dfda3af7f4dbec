"""Equations as JAX lowers them, with the arrays that they write into as values of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax._src.lax import windowed_reductions
from jax._src.lax.control_flow import loops

# The primitive that makes the scalar with which JAX fills the arrays that a scan writes into.
EMPTY = "empty2"


def lowered_body(eqn: Any, *, on_cpu: bool) -> Any | None:
    """The closed jaxpr that an equation is lowered to: a scan's loop over arrays that its steps
    write into; and a max-pool's gradient as a scatter into a scalar's copies, but for the CPU,
    where it is another algorithm. None for other equations."""
    impl: Callable[..., Any]
    if eqn.primitive.name == "scan":
        impl = loops._scan_impl
    elif eqn.primitive.name == "select_and_scatter_add" and not on_cpu:
        scattered = windowed_reductions._select_and_scatter_add_impl
        impl = functools.partial(scattered, expand_padding=False)
    else:
        return None
    run = functools.partial(impl, **eqn.params)
    # A step of the loop is a call, which the check of reused keys takes for a use of its inputs.
    with jax.debug_key_reuse(False):
        return jax.make_jaxpr(run)(*(v.aval for v in eqn.invars))
