"""Bytes of abstract arrays."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_hremat._jax.keys import is_key


def size_bytes_of(aval: Any) -> int:
    """Bytes of an array; a typed PRNG key counts as the words it holds."""
    if is_key(aval):
        aval = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    dtype = aval.dtype
    bits = jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else dtype.itemsize * 8
    return -(-math.prod(aval.shape) * bits // 8)
