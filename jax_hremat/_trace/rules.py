"""Custom derivative rules taken apart, so that what their backward reads are ordinary values.

A `jax.custom_vjp` function is one operation, and no name given outside it reaches the residuals of
its forward rule: a checkpointed region that contains a fused attention kernel recomputes it,
whatever the region saves. So where the function is differentiated it becomes

    detached = detach(inputs)              one level of differentiation stops here
    residuals, outputs = forward rule      its own equations, on the detached inputs
    results = attached(outputs, residuals, inputs)

The last line is itself a `custom_vjp`. Where it is differentiated it computes nothing: it returns
`outputs` and pulls cotangents back with the backward rule, from `residuals`. Where it is not
differentiated, it is the function itself on `inputs`, and the forward rule is dead code.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.core import Tracer

from jax_hremat._jax.checkpoints import is_checkpoint, with_barriers
from jax_hremat._jax.custom_rules import (
    DETACH,
    ForwardRule,
    bind_attached,
    detach,
    forward_rule,
    num_closed_over,
    stops_tangents,
)
from jax_hremat._jax.equations import bind_equation, context_of, evaluate_inlined, inlinable_jaxpr
from jax_hremat._jax.jaxprs import Literal, jaxpr_consts, open_jaxpr, read
from jax_hremat._jax.keys import is_inexact
from jax_hremat._jax.refs import without_refs
from jax_hremat._trace.mapped import in_parts, is_whole_map
from jax_hremat._trace.sinking import with_sunk_operations
from jax_hremat._trace.unrolling import unrolled

# Primitives that cotangents do not pass: the derivative of those of steps is zero everywhere.
STOPS = frozenset({"stop_gradient", "sign", "floor", "ceil", "round", DETACH})


def open_program(closed: Any, moving: Iterable[int], scan_steps: int = 0) -> Any:
    """The closed jaxpr retraced with every plain inner `jit` inlined, the rules of `custom_vjp`
    calls that may be differentiated taken apart, short scans unrolled, the mutable arrays it makes
    replaced by values, and operations on arguments alone moved to where they are read
    (`sinking.py`). A `custom_jvp` call whose rule says that no result has a tangent gets its inputs
    detached.

    A `custom_vjp` call stays one operation if
    - nothing it reads depends on a moving input,
    - it closes over a value that does, which JAX refuses to differentiate,
    - its rule computes nothing (as after it was taken apart once),
    - its rule has an effect, which must not happen where nothing is differentiated,
    - its rule closes over a value that was being traced outside the program.

    Args:
        closed: A closed jaxpr.
        moving: Positions of the inputs that may be differentiated.
        scan_steps: Scans of at most this many steps are unrolled.
    """
    consts, avals = jaxpr_consts(closed), closed.in_avals
    positions = set(moving)

    def flat(*inputs: Any) -> list[Any]:
        flags = [i in positions for i in range(len(inputs))]
        return _Evaluation(scan_steps).outputs(closed, consts, inputs, flags)[0]

    return with_sunk_operations(without_refs(jax.make_jaxpr(flat)(*avals)))


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """Evaluates jaxprs, taking their parts apart as `open_program` says.

    Attributes:
        scan_steps: As in `open_program`.
        in_steps: Whether the equations come from a scan that is unrolled: checkpoints written in a
            scan rely on its loop in place of barriers.
    """

    scan_steps: int
    in_steps: bool = False

    def outputs(
        self, closed: Any, consts: Sequence[Any], inputs: Sequence[Any], moving: Sequence[bool]
    ) -> tuple[list[Any], list[bool]]:
        """The outputs, and which of them depend on the moving inputs."""
        jaxpr = open_jaxpr(closed)
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))
        active = {v for v, on in zip(jaxpr.invars, moving, strict=True) if on}
        for eqn in jaxpr.eqns:
            given, flags = read(env, eqn.invars), are_in(active, eqn.invars)
            outputs, made = self._of_equation(eqn, given, flags)
            env.update(zip(eqn.outvars, outputs, strict=True))
            moved = (v for v, on in zip(eqn.outvars, made, strict=True) if on)
            active.update(v for v in moved if is_inexact(v.aval.dtype))
        return read(env, jaxpr.outvars), are_in(active, jaxpr.outvars)

    def _of_equation(
        self, eqn: Any, inputs: Sequence[Any], moving: Sequence[bool]
    ) -> tuple[list[Any], list[bool]]:
        inner = inlinable_jaxpr(eqn)
        if inner is not None:
            with context_of(eqn):
                return self.outputs(inner, jaxpr_consts(inner), inputs, moving)
        if eqn.primitive.name == "scan" and 0 < eqn.params["length"] <= self.scan_steps:
            body = eqn.params["jaxpr"]
            inside = replace(self, in_steps=True)
            step = functools.partial(inside.outputs, body, jaxpr_consts(body))
            return unrolled(eqn, step, inputs, moving)
        if is_whole_map(eqn) and any(moving):

            def body(*values: Any) -> list[Any]:
                closed = eqn.params["jaxpr"]
                return self.outputs(closed, jaxpr_consts(closed), values, moving)[0]

            outputs = in_parts(eqn, body, inputs)
            if outputs is not None:
                return outputs, [True] * len(outputs)
        if self.in_steps and is_checkpoint(eqn):
            eqn = with_barriers(eqn)
        if stops_tangents(eqn, moving):
            outputs = bind_equation(eqn, _detached(eqn, inputs, moving))
            return outputs, [False] * len(outputs)
        rule = _rule(eqn, moving)
        outputs = bind_equation(eqn, inputs) if rule is None else _apart(rule, inputs)
        return outputs, [_goes_on(eqn, moving)] * len(outputs)


def active_variables(jaxpr: Any, moving: Iterable[int]) -> frozenset[Any]:
    """The moving inputs of an open jaxpr and the floating values computed from them."""
    active = {jaxpr.invars[i] for i in moving}
    for eqn in jaxpr.eqns:
        if _goes_on(eqn, are_in(active, eqn.invars)):
            active.update(v for v in eqn.outvars if is_inexact(v.aval.dtype))
    return frozenset(active)


def are_in(variables: Collection[Any], atoms: Iterable[Any]) -> list[bool]:
    """Which atoms are among the variables."""
    return [not isinstance(v, Literal) and v in variables for v in atoms]


def _goes_on(eqn: Any, moving: Sequence[bool]) -> bool:
    return any(moving) and eqn.primitive.name not in STOPS


def _rule(eqn: Any, moving: Sequence[bool]) -> ForwardRule | None:
    if not any(moving) or any(moving[: num_closed_over(eqn)]):
        return None
    rule = forward_rule(eqn, moving)
    if rule is None or rule.jaxpr.effects or not open_jaxpr(rule.jaxpr).eqns:
        return None
    return None if any(isinstance(c, Tracer) for c in rule.consts) else rule


def _apart(rule: ForwardRule, inputs: Sequence[Any]) -> list[Any]:
    # All floating inputs: through one left out, the forward rule would be differentiated.
    floating = [is_inexact(v.aval.dtype) for v in rule.eqn.invars]
    given = _detached(rule.eqn, inputs, floating)
    with context_of(rule.eqn):
        results = evaluate_inlined(rule.jaxpr, rule.consts, given[rule.num_consts :])
    made = iter(results)
    residuals = [next(made) if i is None else inputs[i] for i in rule.sources]
    return bind_attached(rule, inputs, list(made), residuals)


def _detached(eqn: Any, inputs: Sequence[Any], chosen: Sequence[bool]) -> list[Any]:
    """The inputs of an equation, some of them detached."""
    with context_of(eqn):
        detached = iter(detach(*(x for x, on in zip(inputs, chosen, strict=True) if on)))
    return [next(detached) if on else x for x, on in zip(inputs, chosen, strict=True)]
