"""Computes a traced call under a region tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jax_hremat._emit.emit import emit_flat
from jax_hremat._jax.jaxprs import Literal, open_jaxpr
from jax_hremat._plan.region import Region
from jax_hremat._trace.call import TracedCall


def run_call(
    call: TracedCall, root: Region, watch: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Compute a call with the regions of `root`, and apply its changes to the objects among its
    arguments.

    Args:
        call: The call.
        root: Regions over its program's operations.
        watch: An identity function through which one of the differentiated inputs is passed.
    """
    flat = emit_flat(call.program, root)
    values = [*call.arguments.values, *call.closed_over]
    # A differentiated input is watched: where only gradients are used, the others may be dead code.
    watched = call.program.differentiated[0]
    values[watched] = watch(values[watched])
    # A constant result is a literal, of a type that JAX does not mean users to see.
    atoms = open_jaxpr(call.program.jaxpr).outvars
    outputs = [
        jnp.asarray(value) if isinstance(atom, Literal) else value
        for atom, value in zip(atoms, flat(*values), strict=True)
    ]
    return call.results.put_together(call.arguments, outputs)
