"""The `jax.checkpoint`s in a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jax_hremat._jax.jaxprs import Literal, all_equations, is_jaxpr, open_jaxpr


def remat3_enabled() -> bool:
    """Whether the experimental `jax_remat3` is on, under which nested regions differ in meaning."""
    return bool(getattr(jax.config, "jax_remat3", False))


def is_checkpoint(eqn: Any) -> bool:
    """Whether the equation is a `jax.checkpoint` that is not part of a derivative already."""
    return eqn.primitive.name in ("remat2", "checkpoint") and not eqn.params["differentiated"]


def with_barriers(eqn: Any) -> Any:
    """The equation of a `jax.checkpoint`, with `prevent_cse` on: without a loop around it, nothing
    else keeps the compiler from merging the recompute with the first run."""
    return eqn.replace(params={**eqn.params, "prevent_cse": True})


def policy_name(policy: Any) -> str:
    """The name of a checkpoint's policy: that of the function, or of JAX's own class."""
    return getattr(policy, "__name__", type(policy).__name__)


def without_checkpoints(jaxpr: Any) -> Any:
    """The jaxpr with every `jax.checkpoint` replaced by its body, in bodies of loops too.

    Custom rules are left unchanged: it is not their primal function that is differentiated.
    """
    inner = open_jaxpr(jaxpr)
    eqns: list[Any] = []
    outvars = _spliced(inner, {}, None, eqns)
    opened = inner.replace(eqns=eqns, outvars=outvars)
    return opened if inner is jaxpr else jaxpr.replace(jaxpr=opened)


def _spliced(jaxpr: Any, env: dict[Any, Any], scope: Any, eqns: list[Any]) -> list[Any]:
    """Append a jaxpr's equations, its variables renamed by `env`, and return its results.

    `scope` is the scope of the checkpoint that the equations come from, whose variables get fresh
    copies so that none is bound twice; None for equations of the jaxpr itself.
    """

    def renamed(atoms: Sequence[Any]) -> list[Any]:
        return [v if isinstance(v, Literal) else env.get(v, v) for v in atoms]

    for eqn in jaxpr.eqns:
        if is_checkpoint(eqn) and not _reads_refs(eqn.params["jaxpr"]):
            body = open_jaxpr(eqn.params["jaxpr"])
            of_body = dict(zip(body.invars, renamed(eqn.invars), strict=True))
            own_scope = eqn.source_info.name_stack
            inside = own_scope if scope is None else scope + own_scope
            env.update(zip(eqn.outvars, _spliced(body, of_body, inside, eqns), strict=True))
            continue
        eqn = eqn.replace(invars=renamed(eqn.invars))
        if eqn.primitive.name not in _CUSTOM_RULES:
            eqn = eqn.replace(params={k: _opened_param(v) for k, v in eqn.params.items()})
        if scope is not None:
            fresh = [type(v)(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, fresh, strict=True))
            name_stack = scope + eqn.source_info.name_stack
            source_info = eqn.source_info.replace(name_stack=name_stack)
            eqn = eqn.replace(outvars=fresh, source_info=source_info)
        eqns.append(eqn)
    return renamed(jaxpr.outvars)


_CUSTOM_RULES = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})


def _opened_param(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_opened_param, value))
    if not is_jaxpr(value) or not any(map(is_checkpoint, all_equations(value))):
        return value
    return without_checkpoints(value)


def _reads_refs(jaxpr: Any) -> bool:
    """Whether effects refer to inputs of the jaxpr by position, which splicing changes, or the
    jaxpr has constants."""
    effects = open_jaxpr(jaxpr).effects
    return any(hasattr(e, "input_index") for e in effects) or bool(open_jaxpr(jaxpr).constvars)


def lowers_to_barrier(eqn: Any) -> bool:
    """Whether lowering puts an optimization barrier over the equation's inputs."""
    if eqn.primitive.name in ("optimization_barrier", "hremat_barrier"):
        return True
    prevent_cse = eqn.params.get("prevent_cse", False)
    some = any(prevent_cse) if isinstance(prevent_cse, tuple) else bool(prevent_cse)
    return some and bool(eqn.params.get("differentiated", False))
