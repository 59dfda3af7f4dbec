"""`jax.checkpoint` and `checkpoint_name`, of complex values too.

JAX rounds what a checkpoint keeps to its own precision, and fails on complex values, which have no
such rounding (seen from 0.10.2 to 0.12). So they are kept as two real ones, of as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.ad_checkpoint
import jax.numpy as jnp

from jax_hremat._emit.barrier import KeptApart


class _Parts(NamedTuple):
    real: Any
    imag: Any


def checkpoint(
    fun: Callable[..., Any], *, prevent_cse: bool, names: Iterable[str] = ()
) -> Callable[..., Any]:
    """`jax.checkpoint` of a function of arrays and containers of them, which saves the values of
    these names."""

    def of_parts(*args: Any) -> Any:
        return fun(*jax.tree.map(_whole, args, is_leaf=lambda x: isinstance(x, _Parts)))

    policy = KeptApart(frozenset(names))
    checkpointed = jax.checkpoint(of_parts, policy=policy, prevent_cse=prevent_cse)

    def run(*args: Any) -> Any:
        return checkpointed(*jax.tree.map(_apart, args))

    return run


def checkpoint_name(value: jax.Array, name: str) -> jax.Array:
    """The value under a name that policies know."""
    named = jax.tree.map(lambda x: jax.ad_checkpoint.checkpoint_name(x, name), _apart(value))
    return _whole(named)


def _apart(value: Any) -> Any:
    if not jnp.issubdtype(value.dtype, jnp.complexfloating):
        return value
    return _Parts(jax.lax.real(value), jax.lax.imag(value))


def _whole(value: Any) -> Any:
    return jax.lax.complex(*value) if isinstance(value, _Parts) else value
