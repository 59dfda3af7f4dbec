"""What several tests plan, what they give it, and what they read of a compiled step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def plain_layers(layer: Callable[[jax.Array, Any], jax.Array]) -> Callable[..., jax.Array]:
    """A loss of layers one after the other, each with its own weights."""

    def loss(weights: list[Any], x: jax.Array) -> jax.Array:
        for w in weights:
            x = layer(x, w)
        return (x * x).mean()

    return loss


def normal(seed: int, *shape: int) -> jax.Array:
    """Normally distributed numbers; to draw them, JAX would compile a program for each shape."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def peak_bytes_of(compiled: Any) -> int:
    """What XLA says of an executable for the CPU. Its own figure of the peak counts constants, and
    leaves temporaries out there."""
    memory = compiled.memory_analysis()
    return memory.peak_memory_in_bytes + memory.temp_size_in_bytes


def jit_peak_bytes(step: Any, *args: Any, **compile_options: Any) -> int:
    """The peak of a user's own jitted step."""
    return peak_bytes_of(step.lower(*args).compile(**compile_options))


def jit_bytes_but_constants(step: Any, *args: Any, **compile_options: Any) -> int:
    """The same, without constants."""
    memory = step.lower(*args).compile(**compile_options).memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
