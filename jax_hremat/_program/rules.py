"""Custom derivative rules taken apart, so that what their backward reads are values like others.

A `jax.custom_vjp` function is one operation, and the residuals of its forward rule are out of reach
of any name given outside: a checkpointed region that holds a fused attention kernel runs it
again, whatever it saves. So where it is differentiated it becomes

    detached = detach(inputs)              one level of differentiation does not get past it
    residuals, outputs = forward rule      its own equations, on the detached inputs
    results = attached(outputs, residuals, inputs)

The last is a `custom_vjp` again. Where it is differentiated it computes nothing: it hands `outputs`
on and pulls cotangents back by the backward rule, from `residuals`. Where it is not, it is the
function itself on `inputs`, and the forward rule is dead code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_hremat._shared import compat

# Cotangents do not get past them.
STOPS = frozenset({"stop_gradient", compat.DETACH})


def open_rules(closed: Any, differentiated: Iterable[int]) -> Any:
    """The flat jaxpr with the rules of its differentiated `custom_vjp` calls taken apart.

    A call stays one operation if
    - nothing it reads depends on a differentiated input,
    - it closes over such a value, which JAX refuses to differentiate,
    - its rule has an effect, which must not happen where nothing is differentiated,
    - its rule closes over a value that was being traced outside the program.

    Args:
        closed: The closed jaxpr.
        differentiated: Positions of the inputs that may be differentiated.
    """
    jaxpr = compat.open_jaxpr(closed)
    active = active_variables(jaxpr, differentiated)
    rules = [_rule(eqn, [v in active for v in _variables(eqn.invars)]) for eqn in jaxpr.eqns]
    if not any(rules):
        return closed
    consts = compat.jaxpr_consts(closed)

    def flat(*inputs: Any) -> list[Any]:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))

        def read(atoms: Iterable[Any]) -> list[Any]:
            return [v.val if isinstance(v, compat.Literal) else env[v] for v in atoms]

        for eqn, rule in zip(jaxpr.eqns, rules, strict=True):
            given = read(eqn.invars)
            outputs = compat.bind_equation(eqn, given) if rule is None else _apart(rule, given)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return read(jaxpr.outvars)

    return jax.make_jaxpr(flat)(*(v.aval for v in jaxpr.invars))


def active_variables(jaxpr: Any, differentiated: Iterable[int]) -> frozenset[Any]:
    """The differentiated inputs and the floating values computed from them."""
    active = {jaxpr.invars[i] for i in differentiated}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in STOPS and not active.isdisjoint(_variables(eqn.invars)):
            active.update(v for v in eqn.outvars if _is_inexact(v))
    return frozenset(active)


def _rule(eqn: Any, moving: Sequence[bool]) -> compat.ForwardRule | None:
    rule = compat.forward_rule(eqn, moving) if any(moving) else None
    if rule is None or any(moving[: rule.num_consts]):
        return None
    traced_outside = any(isinstance(c, Tracer) for c in rule.consts)
    return None if rule.jaxpr.effects or traced_outside else rule


def _apart(rule: compat.ForwardRule, inputs: Sequence[Any]) -> list[Any]:
    with compat.context_of(rule.eqn):
        floating = [i for i, on in enumerate(rule.moving) if on]
        given = list(inputs)
        for i, value in zip(floating, compat.detach(*(inputs[i] for i in floating)), strict=True):
            given[i] = value
        made = compat.evaluate_inlined(rule.jaxpr, rule.consts, given[rule.num_consts :])
    results = iter(made)
    residuals = [next(results) if i is None else inputs[i] for i in rule.sources]
    return compat.bind_attached(rule, inputs, list(results), residuals)


def _variables(atoms: Iterable[Any]) -> list[Any]:
    """The atoms, None for a literal."""
    return [None if isinstance(v, compat.Literal) else v for v in atoms]


def _is_inexact(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, np.inexact)
