"""Names the results of an operation such that its own derivative reads the named values too.

The derivative rules of exp, tanh, rsqrt, softmax and others read the operation's result. To
JAX, a name given to the result afterwards makes another value: saving that value serves later
readers, but the derivative rule still reads the original, so the operation is recomputed. Such an
operation is therefore emitted with a custom rule: the operation's own derivative, in which
everything that reads the result reads the named value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from jax_hremat._emit.checkpoint import checkpoint_name
from jax_hremat._jax.custom_rules import is_custom_vjp
from jax_hremat._jax.equations import bind_equation, context_of, evaluate_inlined
from jax_hremat._jax.jaxprs import Literal, jaxpr_consts, open_jaxpr, read
from jax_hremat._jax.keys import is_inexact
from jax_hremat._trace.comparisons import compares_results
from jax_hremat._trace.rules import STOPS
from jax_hremat._trace.trace import abstract

# Evaluates an operation: from the inputs that are not literals to the results.
Evaluate = Callable[[Sequence[Any]], list[Any]]


class Reading(Enum):
    """What the derivative of an operation does with its results.

    Attributes:
        NONE: It does not read them.
        VALUE: It reads them.
        COMPARED: It compares them with its inputs (`_trace/comparisons.py`), so they may not be
            kept without those.
    """

    NONE = "none"
    VALUE = "value"
    COMPARED = "compared"


def reading_of_results(eqn: Any, moving: Sequence[bool], positions: Collection[int]) -> Reading:
    """What the derivative of an operation does with some of its results.

    Args:
        eqn: Its equation.
        moving: For each input, whether it is differentiated.
        positions: Positions of the results in question.
    """
    if not any(moving) or eqn.primitive.name in STOPS or is_custom_vjp(eqn):
        return Reading.NONE
    evaluate, variables = _operation(eqn)
    shapes = [abstract(eqn.invars[i].aval) for i in variables]
    chosen = [k for k, i in enumerate(variables) if moving[i]]
    closed = _derivative(evaluate, chosen, shapes, [shapes[k] for k in chosen])
    jaxpr = open_jaxpr(closed)
    results = {v for i, v in _variables(jaxpr.outvars) if i in positions}
    if compares_results(jaxpr, results):
        return Reading.COMPARED
    is_read = any(v in results for e in jaxpr.eqns for _, v in _variables(e.invars))
    return Reading.VALUE if is_read else Reading.NONE


def run_named(eqn: Any, inputs: Sequence[Any], names: Mapping[int, str]) -> list[Any]:
    """The results of a differentiated operation, some of them named; its derivative reads the
    named values.

    Args:
        eqn: Its equation.
        inputs: Its inputs.
        names: The names of some of its results, by position.
    """
    evaluate, variables = _operation(eqn)
    num_results = len(eqn.outvars)

    @jax.custom_jvp
    def operation(*values: Any) -> list[Any]:
        return evaluate(values)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        moved = [tangents[i] for i in moving]
        closed = _derivative(evaluate, moving, primals, moved)
        jaxpr = open_jaxpr(closed)
        named = {v: names[i] for i, v in _variables(jaxpr.outvars) if i in names}
        known = (*jaxpr_consts(closed), *primals, *moved)
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), known, strict=True))
        for inner in jaxpr.eqns:
            made = bind_equation(inner, read(env, inner.invars))
            for v, value in zip(inner.outvars, made, strict=True):
                env[v] = checkpoint_name(value, named[v]) if v in named else value
        results = read(env, jaxpr.outvars)
        outputs, pushed = results[:num_results], iter(results[num_results:])
        return outputs, [
            next(pushed) if is_inexact(x.dtype) else SymbolicZero(jax.typeof(x).to_tangent_aval())
            for x in outputs
        ]

    operation.defjvp(rule, symbolic_zeros=True)
    with context_of(eqn):
        return operation(*(inputs[i] for i in variables))


def _operation(eqn: Any) -> tuple[Evaluate, list[int]]:
    """The operation as a function of the inputs that are not literals, and the positions of
    these inputs."""
    variables = [i for i, _ in _variables(eqn.invars)]

    def evaluate(values: Sequence[Any]) -> list[Any]:
        given = dict(zip(variables, values, strict=True))
        inputs = [given[i] if i in given else v.val for i, v in enumerate(eqn.invars)]
        return bind_equation(eqn, inputs)

    return evaluate, variables


def _derivative(
    evaluate: Evaluate, moving: Sequence[int], inputs: Sequence[Any], tangents: Sequence[Any]
) -> Any:
    """The derivative as a jaxpr, from inputs and tangents to results and their tangents; results
    that are not floating-point or complex have no tangent."""

    def pushed(*arrays: Any) -> list[Any]:
        inputs, tangents = arrays[: -len(moving)], arrays[-len(moving) :]

        def of_moving(*values: Any) -> list[Any]:
            merged = list(inputs)
            for i, value in zip(moving, values, strict=True):
                merged[i] = value
            return evaluate(merged)

        results, changes = jax.jvp(of_moving, [inputs[i] for i in moving], list(tangents))
        pairs = zip(results, changes, strict=True)
        return [*results, *(change for x, change in pairs if is_inexact(x.dtype))]

    arrays = (*inputs, *tangents)
    closed = jax.make_jaxpr(pushed)(*arrays)
    consts = jaxpr_consts(closed)
    return jax.make_jaxpr(lambda *a: evaluate_inlined(closed, consts, a))(*arrays)


def _variables(atoms: Sequence[Any]) -> list[tuple[int, Any]]:
    return [(i, v) for i, v in enumerate(atoms) if not isinstance(v, Literal)]
