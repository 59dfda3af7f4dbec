"""Arrays that a rematerialized computation writes into, filled no earlier than it runs.

The gradients of a gather and of a max-pool are scattered into zeros, the gradient of a scatter may
take a scatter of its own, and a scan writes what each step returns into an array that it begins
with. Such a destination is a constant: it reads nothing, so the barrier before a recompute does not
hold it back. XLA merges equal ones, of all layers and of both passes, and since each is
overwritten, it makes all their copies in one kernel at the start of the step, where they stay alive
until their layer's backward.

Here the scalars with which destinations are filled become inputs of a checkpoint's recompute and
backward, so that they pass through the barrier together with what was kept.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_hremat._jax.checkpoints import is_checkpoint
from jax_hremat._jax.jaxprs import Literal, Var, variables
from jax_hremat._jax.lowered_bodies import EMPTY, lowered_body
from jax_hremat._jax.scopes import in_scope
from jax_hremat._jax.splicing import spliced
from jax_hremat._primitives.elementwise import FUSIBLE

# The scope of what fills a destination with such an input. Of a compiled step, nothing else tells
# that a barrier was there: newer XLA leaves no trace of barriers in the optimised text.
HELD_BACK = "hremat_held_back"


def with_filled_destinations(jaxpr: Any, *, on_cpu: bool) -> tuple[Any, list[np.ndarray]]:
    """The open jaxpr of a checkpoint's recompute and backward, with further inputs behind its own:
    the scalars that fill its destinations; and the values of these scalars.

    Scans, gradients of max-pools, and inner checkpoints that are only run forward are replaced by
    what they are lowered to, so that destinations in them are filled likewise.

    Unchecked: destinations inside the bodies of loops and branches, which are filled where they are
    used.
    """

    def body_of(eqn: Any) -> Any | None:
        return eqn.params["jaxpr"] if is_checkpoint(eqn) else lowered_body(eqn, on_cpu=on_cpu)

    jaxpr = spliced(jaxpr, body_of)
    destinations = _destinations(jaxpr.eqns)
    inputs: dict[tuple[Any, bytes], Any] = {}
    values: list[np.ndarray] = []
    filled_with: dict[Any, Any] = {}
    eqns = []

    def scalar(aval: Any, value: Any) -> Any:
        value = np.asarray(value, aval.dtype)
        key = (aval, value.tobytes())
        if key not in inputs:
            inputs[key] = Var(aval)
            values.append(value)
        return inputs[key]

    for eqn in jaxpr.eqns:
        if _is_empty(eqn):
            filled_with[eqn.outvars[0]] = scalar(eqn.outvars[0].aval, 0)
            continue
        given = [v if isinstance(v, Literal) else filled_with.get(v, v) for v in eqn.invars]
        fill = _filling_operand(eqn, destinations)
        if fill is not None and isinstance(given[fill], Literal):
            given[fill] = scalar(given[fill].aval, given[fill].val)
        is_held_back = any(new is not old for new, old in zip(given, eqn.invars, strict=True))
        eqn = eqn.replace(invars=given)
        eqns.append(in_scope(eqn, HELD_BACK) if is_held_back else eqn)
    if not values:
        return jaxpr, []
    invars = [*jaxpr.invars, *inputs.values()]
    debug_info = jaxpr.debug_info.with_unknown_names()
    return jaxpr.replace(eqns=eqns, invars=invars, debug_info=debug_info), values


def _filling_operand(eqn: Any, destinations: Set[Any]) -> int | None:
    """The operand that fills a destination, if there is one."""
    if eqn.primitive.name == "select_and_scatter":
        return 2
    is_destination = eqn.primitive.name == "broadcast_in_dim" and eqn.outvars[0] in destinations
    return 0 if is_destination else None


def _is_empty(eqn: Any) -> bool:
    """Whether the equation makes the scalar that fills what a scan writes into, of a type that has
    constants (PRNG keys have none)."""
    if eqn.primitive.name != EMPTY:
        return False
    return not jnp.issubdtype(eqn.outvars[0].aval.dtype, jax.dtypes.extended)


def _destinations(eqns: Sequence[Any]) -> set[Any]:
    """The variables that are overwritten, and those that XLA fuses into the making of them."""
    found: set[Any] = set()
    for eqn in reversed(eqns):
        name = eqn.primitive.name
        if name.startswith("scatter") or name == "dynamic_update_slice":
            overwritten = eqn.invars[:1]
        elif name == "while":
            num_consts = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
            overwritten = eqn.invars[num_consts:]
        elif name in FUSIBLE and not found.isdisjoint(eqn.outvars):
            overwritten = eqn.invars
        else:
            continue
        found.update(variables(overwritten))
    return found
