"""Flax, imported when it is first used: a function that has nothing of Flax does without."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

from jax_hremat._shared.deferred import Deferred

if TYPE_CHECKING:
    from flax import errors as errors
    from flax import linen as linen
    from flax import nnx as nnx
    from flax.nnx import graphlib as graphlib
else:
    errors = Deferred("flax.errors")
    graphlib = Deferred("flax.nnx.graphlib")
    linen = Deferred("flax.linen")
    nnx = Deferred("flax.nnx")


def is_imported(package: str) -> bool:
    """Whether a package of Flax, such as `"nnx"`, is imported. Until then no value is of it."""
    return f"flax.{package}" in sys.modules


def is_nnx_class(value: Any) -> bool:
    """Whether a value is an NNX module class."""
    return is_imported("nnx") and inspect.isclass(value) and issubclass(value, nnx.Module)


def is_linen_instance(value: Any) -> bool:
    """Whether a value is an instance of a linen module class."""
    return is_imported("linen") and isinstance(value, linen.Module)
