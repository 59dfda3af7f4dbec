"""Flax modules, recognized without importing Flax."""

from __future__ import annotations

import inspect
from typing import Any

from jax_hremat._flax.deferred import is_imported, linen, nnx


def is_nnx_class(value: Any) -> bool:
    """Whether a value is an NNX module class."""
    return is_imported("nnx") and inspect.isclass(value) and issubclass(value, nnx.Module)


def is_linen_instance(value: Any) -> bool:
    """Whether a value is an instance of a linen module class."""
    return is_imported("linen") and isinstance(value, linen.Module)
