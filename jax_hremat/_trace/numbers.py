"""Whether a function computes the same of a Python number as of an array.

A plan takes Python numbers as inputs, as `jax.jit` does, but a function may ask for the type of a
number: `if isinstance(rate, float)`. Where the number is not traced, it is then another function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_hremat._jax.describe import describe_params
from jax_hremat._jax.equations import bind_equation
from jax_hremat._jax.jaxprs import Literal, inner_jaxprs, open_jaxpr
from jax_hremat._jax.meshes import varying_axes
from jax_hremat._trace.call import TracedCall, is_number

# Scalars are the same up to this many times the precision of their type: Python computes with more
# digits than JAX.
_ROUNDINGS = 8


def computes_the_same(as_arrays: TracedCall, as_numbers: TracedCall) -> bool:
    """Whether a call that takes numbers as arrays does what it does of the numbers themselves.

    The operations are compared but for those that make scalars of the numbers alone: what is made
    of these has to be the same, up to rounding. Not compared are which operation reads which
    result, and the scalars in the bodies of loops and branches.
    """
    inputs = open_jaxpr(as_arrays.program.jaxpr).invars
    numbers = {
        variable: np.asarray(given.value, variable.aval.dtype)
        for variable, given in zip(inputs, as_arrays.arguments.inputs, strict=False)
        if is_number(given.value)
    }
    ours, theirs = (
        sorted(_operations(call.program.jaxpr, known), key=lambda operation: operation.what)
        for call, known in ((as_arrays, numbers), (as_numbers, {}))
    )
    return len(ours) == len(theirs) and all(map(_are_same, ours, theirs))


class _Operation(NamedTuple):
    """An operation that does more than make scalars.

    Attributes:
        what: Its primitive and parameters, the types of its results, and the operations of its
            bodies in place of the parameters.
        scalars: What it reads, where that is a known scalar or an array of one; None elsewhere.
    """

    what: str
    scalars: Sequence[np.ndarray | None]


def _operations(jaxpr: Any, numbers: Mapping[Any, np.ndarray]) -> Iterator[_Operation]:
    """The operations but for those that make scalars, or arrays of one scalar, of numbers alone."""
    known = dict(numbers)
    for eqn in open_jaxpr(jaxpr).eqns:
        scalars = [_scalar(atom, known) for atom in eqn.invars]
        values = [scalar for scalar in scalars if scalar is not None]
        if not _is_of_scalars(eqn) or len(values) < len(scalars):
            what = _described(eqn)
            # What is an operand of a body may be a literal inside of the other.
            yield _Operation(what, [] if any(inner_jaxprs(eqn)) else scalars)
        elif _changes_the_type(eqn):
            known[eqn.outvars[0]] = values[0]
        else:
            known |= zip(eqn.outvars, _evaluated(eqn, values), strict=True)


def _scalar(atom: Any, known: Mapping[Any, np.ndarray]) -> np.ndarray | None:
    dtype = atom.aval.dtype
    return np.asarray(atom.val, dtype) if isinstance(atom, Literal) else known.get(atom)


def _described(eqn: Any) -> str:
    bodies = [
        sorted(_described(inner) for inner in open_jaxpr(body).eqns if not _is_of_scalars(inner))
        for body in inner_jaxprs(eqn)
    ]
    how = bodies or describe_params(eqn.params)
    return f"{eqn.primitive.name}[{how}]->{[v.aval.str_short() for v in eqn.outvars]}"


def _is_of_scalars(eqn: Any) -> bool:
    """Whether an operation reads scalars alone, makes numbers or flags, and does nothing else."""
    from_scalars = all(atom.aval.ndim == 0 for atom in eqn.invars)
    scalar = all(v.aval.ndim == 0 for v in eqn.outvars)
    return (
        from_scalars
        and (scalar or _changes_the_type(eqn))
        and not eqn.effects
        and not any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in eqn.outvars)
    )


def _changes_the_type(eqn: Any) -> bool:
    """Whether an operation of scalars makes arrays of one, or what varies along other axes of a
    `shard_map`."""
    axes = [varying_axes(v.aval) for v in (*eqn.invars, *eqn.outvars)]
    return eqn.primitive.name == "broadcast_in_dim" or len(set(axes)) > 1


def _evaluated(eqn: Any, scalars: Sequence[Any]) -> list[np.ndarray]:
    with jax.ensure_compile_time_eval():
        inputs = [
            jnp.asarray(scalar, atom.aval.dtype)
            for scalar, atom in zip(scalars, eqn.invars, strict=True)
        ]
        return [np.asarray(result) for result in bind_equation(eqn, inputs)]


def _are_same(one: _Operation, other: _Operation) -> bool:
    return (
        one.what == other.what
        and len(one.scalars) == len(other.scalars)
        and all(map(_are_close, one.scalars, other.scalars))
    )


def _are_close(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return one is other
    if not jnp.issubdtype(one.dtype, jnp.inexact):
        return bool(np.array_equal(one, other))
    precision = _ROUNDINGS * float(jnp.finfo(one.dtype).eps)
    ours, theirs = (np.asarray(x, complex) for x in (one, other))
    return np.allclose(ours, theirs, rtol=precision, atol=0.0, equal_nan=True)
