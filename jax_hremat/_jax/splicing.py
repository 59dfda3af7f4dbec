"""Equations of a jaxpr replaced by the equations of their bodies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax_hremat._jax.jaxprs import Literal, open_jaxpr


def spliced(
    jaxpr: Any,
    body_of: Callable[[Any], Any | None],
    changed: Callable[[Any], Any] = lambda eqn: eqn,
) -> Any:
    """An open jaxpr, with each equation that has a body replaced by the equations of the body.

    Args:
        jaxpr: The jaxpr.
        body_of: The body of an equation, a jaxpr without constants; None to keep the equation.
        changed: What becomes of an equation that is kept.
    """
    eqns: list[Any] = []

    def splice(jaxpr: Any, env: dict[Any, Any], scope: Any) -> list[Any]:
        """Append a jaxpr's equations, its variables renamed by `env`, and return its results.

        `scope` is the scope of the equation that the body is of, whose variables get fresh copies
        so that none is bound twice; None for the equations of the jaxpr itself.
        """

        def renamed(atoms: Sequence[Any]) -> list[Any]:
            return [v if isinstance(v, Literal) else env.get(v, v) for v in atoms]

        for eqn in jaxpr.eqns:
            body = body_of(eqn)
            if body is not None:
                inner = open_jaxpr(body)
                of_body = dict(zip(inner.invars, renamed(eqn.invars), strict=True))
                own_scope = eqn.source_info.name_stack
                inside = own_scope if scope is None else scope + own_scope
                env.update(zip(eqn.outvars, splice(inner, of_body, inside), strict=True))
                continue
            eqn = changed(eqn.replace(invars=renamed(eqn.invars)))
            if scope is not None:
                fresh = [type(v)(v.aval) for v in eqn.outvars]
                env.update(zip(eqn.outvars, fresh, strict=True))
                name_stack = scope + eqn.source_info.name_stack
                source_info = eqn.source_info.replace(name_stack=name_stack)
                eqn = eqn.replace(outvars=fresh, source_info=source_info)
            eqns.append(eqn)
        return renamed(jaxpr.outvars)

    outvars = splice(jaxpr, {}, None)
    return jaxpr.replace(eqns=eqns, outvars=outvars)
