"""Arrays of a pytree apart from everything else in it, which is static to a trace."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def split_arrays(tree: Any) -> tuple[Any, Any]:
    """The tree with its arrays only, and the tree with all else; None stands for the others."""
    arrays = jax.tree.map(lambda x: jnp.asarray(x) if _is_array(x) else None, tree)
    static = jax.tree.map(lambda x: None if _is_array(x) else x, tree)
    return arrays, static


def merge_arrays(arrays: Any, static: Any) -> Any:
    """The inverse of `split_arrays`."""
    return jax.tree.map(
        lambda a, s: s if a is None else a, arrays, static, is_leaf=lambda x: x is None
    )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))
