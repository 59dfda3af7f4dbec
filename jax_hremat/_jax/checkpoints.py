"""The `jax.checkpoint`s in a program."""

from __future__ import annotations

from typing import Any

import jax

from jax_hremat._jax.jaxprs import all_equations, is_jaxpr, open_jaxpr
from jax_hremat._jax.splicing import spliced


def remat3_enabled() -> bool:
    """Whether the experimental `jax_remat3` is on, under which nested regions differ in meaning."""
    return bool(getattr(jax.config, "jax_remat3", False))


def is_checkpoint(eqn: Any) -> bool:
    """Whether the equation is a `jax.checkpoint` that is not part of a derivative already."""
    return eqn.primitive.name == "remat2" and not eqn.params["differentiated"]


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
    opened = spliced(inner, _checkpoint_body, _with_opened_params)
    return opened if inner is jaxpr else jaxpr.replace(jaxpr=opened)


def _checkpoint_body(eqn: Any) -> Any | None:
    if not is_checkpoint(eqn) or _reads_refs(eqn.params["jaxpr"]):
        return None
    return eqn.params["jaxpr"]


def _with_opened_params(eqn: Any) -> Any:
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        return eqn
    return eqn.replace(params={k: _opened_param(v) for k, v in eqn.params.items()})


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
