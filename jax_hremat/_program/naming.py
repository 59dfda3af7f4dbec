"""The results of one operation under names that policies know, its derivative's reads included.

The derivative rules of exp, tanh, rsqrt, max, softmax and others read the result itself. A name given
to it afterwards is another value to JAX: what is kept under it spares those who read it later, and
not the operation. So such an operation is emitted with a rule of its own: the operation's, in which
everything that reads the result reads the named one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from jax_hremat._program.checkpoint import checkpoint_name
from jax_hremat._program.trace import is_inexact
from jax_hremat._shared import compat

# An operation, from its inputs to its results.
Evaluate = Callable[[list[Any]], list[Any]]


def reads_its_results(
    evaluate: Evaluate, inputs: Sequence[Any], moving: Sequence[int], positions: Collection[int]
) -> bool:
    """Whether the derivative of an operation reads some of its results.

    Args:
        evaluate: The operation.
        inputs: Their shapes.
        moving: Positions of those that are differentiated.
        positions: Of the results asked about.
    """
    closed = _derivative(evaluate, moving, inputs, [inputs[i] for i in moving])
    jaxpr = compat.open_jaxpr(closed)
    results = {v for i, v in _variables(jaxpr.outvars) if i in positions}
    return any(v in results for eqn in jaxpr.eqns for _, v in _variables(eqn.invars))


def run_named(
    evaluate: Evaluate, inputs: Sequence[Any], num_results: int, names: Mapping[int, str]
) -> list[Any]:
    """The results of a differentiated operation under names, as its derivative reads them too.

    Args:
        evaluate: The operation.
        inputs: Arrays.
        num_results: How many results it has.
        names: Of some of them, by position.
    """

    @jax.custom_jvp
    def operation(*inputs: Any) -> list[Any]:
        return evaluate(list(inputs))

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        moved = [tangents[i] for i in moving]
        closed = _derivative(evaluate, moving, primals, moved)
        jaxpr = compat.open_jaxpr(closed)
        named = {v: names[i] for i, v in _variables(jaxpr.outvars) if i in names}
        known = (*compat.jaxpr_consts(closed), *primals, *moved)
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), known, strict=True))

        def read(atoms: Sequence[Any]) -> list[Any]:
            return [v.val if isinstance(v, compat.Literal) else env[v] for v in atoms]

        for eqn in jaxpr.eqns:
            made = compat.bind_equation(eqn, read(eqn.invars))
            for v, value in zip(eqn.outvars, made, strict=True):
                env[v] = checkpoint_name(value, named[v]) if v in named else value
        results = read(jaxpr.outvars)
        outputs, pushed = results[:num_results], iter(results[num_results:])
        return outputs, [
            next(pushed) if is_inexact(x.dtype) else SymbolicZero(jax.typeof(x).to_tangent_aval())
            for x in outputs
        ]

    operation.defjvp(rule, symbolic_zeros=True)
    return operation(*inputs)


def _derivative(
    evaluate: Evaluate, moving: Sequence[int], inputs: Sequence[Any], tangents: Sequence[Any]
) -> Any:
    """From inputs and tangents to results and the tangents of those that have one, as a jaxpr."""

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
    consts = compat.jaxpr_consts(closed)
    return jax.make_jaxpr(lambda *a: compat.evaluate_inlined(closed, consts, a))(*arrays)


def _variables(atoms: Sequence[Any]) -> list[tuple[int, Any]]:
    return [(i, v) for i, v in enumerate(atoms) if not isinstance(v, compat.Literal)]
