"""Evaluating equations, with the scope, source line and context they were traced in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import source_info_util
from jax._src.lax.control_flow import conditionals

from jax_hremat._jax.jaxprs import Literal, jaxpr_consts, open_jaxpr, read


@contextmanager
def context_of(eqn: Any) -> Iterator[None]:
    """Operations evaluated inside get the equation's scope name, source line and context."""
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with (
        source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack),
        eqn.ctx.manager,
    ):
        yield


def bind_equation(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Evaluate one equation, keeping its scope name, source line and context."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with context_of(eqn):
        outputs = eqn.primitive.bind(*inputs, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def switch(
    eqn: Any, index: Any, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]
) -> Any:
    """`jax.lax.switch` with replacements for the branches of a cond's equation.

    Each branch of a `jax.lax.platform_dependent` stays bound to its platforms; only these lower it.
    """
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return jax.lax.switch(index, branches, *operands)
    return conditionals._switch_internal(index, branches, operands, branches_platforms=platforms)


def chooser_of(eqn: Any) -> Any | None:
    """The variable that chooses the branch of a cond; None for other equations, and where the
    platform or a constant chooses."""
    if eqn.primitive.name != "cond" or eqn.params.get("branches_platforms") is not None:
        return None
    index = eqn.invars[0]
    return None if isinstance(index, Literal) else index


def evaluate_inlined(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr with every plain inner `jit` inlined, so that tracing it gives a flat one.

    An inner `jit` that carries shardings or layouts is kept: inlining it would drop them.
    """
    jaxpr = open_jaxpr(jaxpr)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        inputs = read(env, eqn.invars)
        inner = inlinable_jaxpr(eqn)
        if inner is None:
            outputs = bind_equation(eqn, inputs)
        else:
            with context_of(eqn):
                outputs = evaluate_inlined(inner, jaxpr_consts(inner), inputs)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return read(env, jaxpr.outvars)


def inlinable_jaxpr(eqn: Any) -> Any | None:
    """The body of a plain inner `jit` (or closed call), or None."""
    name = eqn.primitive.name
    if name == "jit":
        unspecified = all(
            type(s).__name__ == "UnspecifiedValue"
            for s in (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
        )
        automatic = all(
            layout is None for layout in (*eqn.params["in_layouts"], *eqn.params["out_layouts"])
        )
        return eqn.params["jaxpr"] if unspecified and automatic else None
    if name in ("closed_call", "eval_jaxpr"):  # The last: JAX 0.12.
        return eqn.params["call_jaxpr"]
    return None
