"""`jax.checkpoint` and `checkpoint_name` that keep every value as it is.

JAX rounds each value that a checkpoint keeps to the precision of its own dtype
(`lax.reduce_precision`). Complex values have no such rounding, and JAX fails on them (seen from
0.10.2 to 0.12). So a complex value is kept as two real ones, which take the same number of bytes.

The result of the rounding is that of an IEEE format with as many bits. `float8_e4m3fn` and others
have no infinities and reach further, so that of 400 NaN is left; XLA also flushes the subnormal
numbers of `float8_e4m3`. So of a value of 8 bits or less the integer of its bits has the name.

A typed key is named as the integers that it is made of: to JAX's check of reused keys
(`jax_debug_key_reuse`), a name is a use. It also leaves a checkpoint as these: the check fails on
an array of keys of which some were used inside (0.10.2 to 0.11), in `jax.jit` too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.ad_checkpoint
import jax.numpy as jnp

from jax_hremat._emit.barrier import KeptApart
from jax_hremat._jax.keys import data_of, from_data, is_key


class _Parts(NamedTuple):
    real: Any
    imag: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["impl"])
@dataclass(frozen=True, slots=True)
class _KeyData:
    data: Any
    impl: Any


def checkpoint(
    fun: Callable[..., Any], *, prevent_cse: bool, names: Iterable[str] = ()
) -> Callable[..., Any]:
    """`jax.checkpoint` of a function that takes arrays and containers of arrays; the values with
    these names are saved."""

    def of_parts(*args: Any) -> Any:
        given = jax.tree.map(_whole, args, is_leaf=lambda x: isinstance(x, _Parts))
        return jax.tree.map(_without_keys, fun(*given))

    policy = KeptApart(frozenset(names))
    checkpointed = jax.checkpoint(of_parts, policy=policy, prevent_cse=prevent_cse)

    def run(*args: Any) -> Any:
        results = checkpointed(*jax.tree.map(_apart, args))
        return jax.tree.map(_with_keys, results, is_leaf=lambda x: isinstance(x, _KeyData))

    return run


def checkpoint_name(value: jax.Array, name: str) -> jax.Array:
    """The value under a name that policies can refer to."""
    if jnp.issubdtype(value.dtype, jnp.floating) and jnp.finfo(value.dtype).bits <= 8:
        bits = jax.lax.bitcast_convert_type(value, f"uint{jnp.finfo(value.dtype).bits}")
        return _of_bits(jax.ad_checkpoint.checkpoint_name(bits, name), value)
    parts = _apart(data_of(value))
    named = jax.tree.map(lambda x: jax.ad_checkpoint.checkpoint_name(x, name), parts)
    return from_data(_whole(named), like=value)


@jax.custom_jvp
def _of_bits(bits: Any, value: Any) -> Any:
    """The value of these bits; of the value itself only the tangent is read."""
    return jax.lax.bitcast_convert_type(bits, value.dtype)


@functools.partial(_of_bits.defjvp, symbolic_zeros=True)
def _of_bits_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return _of_bits(*primals), tangents[1]


def _apart(value: Any) -> Any:
    if not jnp.issubdtype(value.dtype, jnp.complexfloating):
        return value
    return _Parts(jax.lax.real(value), jax.lax.imag(value))


def _whole(value: Any) -> Any:
    return jax.lax.complex(*value) if isinstance(value, _Parts) else value


def _without_keys(value: Any) -> Any:
    if not is_key(value):
        return value
    return _KeyData(jax.random.key_data(value), jax.random.key_impl(value))


def _with_keys(value: Any) -> Any:
    if not isinstance(value, _KeyData):
        return value
    return jax.random.wrap_key_data(value.data, impl=value.impl)
