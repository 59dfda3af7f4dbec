"""Typed PRNG keys, and the integers that they are made of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def is_key(value: Any) -> bool:
    """Whether an array, or the type of one, is an array of typed PRNG keys."""
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def is_inexact(dtype: Any) -> bool:
    """Whether values of this dtype have a gradient (PRNG keys, integers and bools have none)."""
    return jnp.issubdtype(dtype, jnp.inexact)


def data_of(value: Any) -> Any:
    """The integers that typed keys are made of; any other array as it is."""
    return jax.random.key_data(value) if is_key(value) else value


def from_data(data: Any, *, like: Any) -> Any:
    """The opposite of `data_of`: an array of the type of `like`."""
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like)) if is_key(like) else data
