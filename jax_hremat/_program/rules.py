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

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_hremat._shared import compat

# Cotangents do not get past them.
STOPS = frozenset({"stop_gradient", compat.DETACH})


def open_program(closed: Any, moving: Iterable[int]) -> Any:
    """The closed jaxpr traced again with every plain inner `jit` opened, the rules of the
    `custom_vjp` calls in it that may be differentiated taken apart, and the mutable arrays that it
    makes as values.

    A call stays one operation if
    - nothing it reads depends on a moving input,
    - it closes over such a value, which JAX refuses to differentiate,
    - its rule computes nothing (one that was taken apart before does not),
    - its rule has an effect, which must not happen where nothing is differentiated,
    - its rule closes over a value that was being traced outside the program.

    Args:
        closed: A closed jaxpr.
        moving: Positions of the inputs that may be differentiated.
    """
    consts, avals = compat.jaxpr_consts(closed), closed.in_avals
    positions = set(moving)

    def flat(*inputs: Any) -> list[Any]:
        flags = [i in positions for i in range(len(inputs))]
        return _evaluate(closed, consts, inputs, flags)[0]

    return compat.without_refs(jax.make_jaxpr(flat)(*avals))


def _evaluate(
    closed: Any, consts: Sequence[Any], inputs: Sequence[Any], moving: Sequence[bool]
) -> tuple[list[Any], list[bool]]:
    """The outputs, and which of them depend on the moving inputs."""
    jaxpr = compat.open_jaxpr(closed)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))
    active = {v for v, on in zip(jaxpr.invars, moving, strict=True) if on}

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [v.val if isinstance(v, compat.Literal) else env[v] for v in atoms]

    for eqn in jaxpr.eqns:
        given, flags = read(eqn.invars), are_in(active, eqn.invars)
        inner = compat.inlinable_jaxpr(eqn)
        if inner is not None:
            with compat.context_of(eqn):
                outputs, made = _evaluate(inner, compat.jaxpr_consts(inner), given, flags)
        else:
            rule = _rule(eqn, flags)
            outputs = compat.bind_equation(eqn, given) if rule is None else _apart(rule, given)
            made = [_goes_on(eqn, flags)] * len(outputs)
        env.update(zip(eqn.outvars, outputs, strict=True))
        active.update(v for v, on in zip(eqn.outvars, made, strict=True) if on and _is_inexact(v))
    return read(jaxpr.outvars), are_in(active, jaxpr.outvars)


def active_variables(jaxpr: Any, moving: Iterable[int]) -> frozenset[Any]:
    """The moving inputs of an open jaxpr and the floating values computed from them."""
    active = {jaxpr.invars[i] for i in moving}
    for eqn in jaxpr.eqns:
        if _goes_on(eqn, are_in(active, eqn.invars)):
            active.update(v for v in eqn.outvars if _is_inexact(v))
    return frozenset(active)


def are_in(variables: Collection[Any], atoms: Iterable[Any]) -> list[bool]:
    """Which atoms are among the variables."""
    return [not isinstance(v, compat.Literal) and v in variables for v in atoms]


def _is_inexact(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, np.inexact)


def _goes_on(eqn: Any, moving: Sequence[bool]) -> bool:
    return any(moving) and eqn.primitive.name not in STOPS


def _rule(eqn: Any, moving: Sequence[bool]) -> compat.ForwardRule | None:
    if not any(moving) or any(moving[: compat.num_closed_over(eqn)]):
        return None
    rule = compat.forward_rule(eqn, moving)
    if rule is None or rule.jaxpr.effects or not compat.open_jaxpr(rule.jaxpr).eqns:
        return None
    return None if any(isinstance(c, Tracer) for c in rule.consts) else rule


def _apart(rule: compat.ForwardRule, inputs: Sequence[Any]) -> list[Any]:
    given = list(inputs)
    floating = [i for i, v in enumerate(rule.eqn.invars) if _is_inexact(v)]
    with compat.context_of(rule.eqn):
        # All of them: with one of them alone the forward rule would be differentiated for others.
        for i, value in zip(floating, compat.detach(*(inputs[i] for i in floating)), strict=True):
            given[i] = value
        results = compat.evaluate_inlined(rule.jaxpr, rule.consts, given[rule.num_consts :])
    made = iter(results)
    residuals = [next(made) if i is None else inputs[i] for i in rule.sources]
    return compat.bind_attached(rule, inputs, list(made), residuals)
