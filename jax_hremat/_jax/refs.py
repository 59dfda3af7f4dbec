"""Mutable arrays (`jax.new_ref`)."""

from __future__ import annotations

from typing import Any

from jax._src import core
from jax._src.state import discharge
from jax._src.state.types import AbstractRef

from jax_hremat._jax.jaxprs import inner_equations, open_jaxpr, with_equations
from jax_hremat._jax.scopes import source_line
from jax_hremat._shared.errors import UnsupportedProgramError


def is_ref(aval: Any) -> bool:
    """Whether it is the aval of a mutable array (`jax.new_ref`)."""
    return isinstance(aval, AbstractRef)


def without_refs(jaxpr: Any) -> Any:
    """The flat closed jaxpr with the mutable arrays it makes replaced by values.

    Arrays that are mutable only inside one equation stay mutable.

    Raises:
        UnsupportedProgramError: A mutable array is passed to an equation that JAX cannot rewrite,
            or cannot rewrite without losing a derivative rule.
    """
    inner = open_jaxpr(jaxpr)
    on_refs = [any(is_ref(v.aval) for v in (*eqn.invars, *eqn.outvars)) for eqn in inner.eqns]
    if not any(on_refs):
        return jaxpr
    eqns = []
    for eqn, on_ref in zip(inner.eqns, on_refs, strict=True):
        if on_ref and _has_derivative_rule(eqn):
            raise _lasting_ref(f"`{eqn.primitive.name}` at {source_line(eqn)}")
        inside = {e for e in eqn.effects if not isinstance(e, core.InternalMutableArrayEffect)}
        eqns.append(eqn if on_ref else eqn.replace(effects=inside))
    try:
        # With `lower=True`, all custom derivative rules would be lost.
        return discharge.discharge_state(with_equations(jaxpr, eqns), lower=False)
    except NotImplementedError as error:
        raise _lasting_ref(str(error)) from error


def _has_derivative_rule(eqn: Any) -> bool:
    """Whether an equation, or one inside it, has a custom derivative rule."""
    is_rule = eqn.primitive.name.startswith(("custom_jvp", "custom_vjp"))
    return is_rule or any(map(_has_derivative_rule, inner_equations(eqn)))


def _lasting_ref(what: str) -> UnsupportedProgramError:
    return UnsupportedProgramError(
        f"the function makes a mutable array (`jax.new_ref`) and hands it to an operation that is "
        f"or holds a function with a derivative rule of its own, or that JAX cannot rewrite to "
        f"work on values: {what}. Carry the array's value through it instead"
    )
