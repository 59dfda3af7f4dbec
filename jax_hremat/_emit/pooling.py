"""Max-pooling whose gradient is scattered into a separate array of zeros.

The gradient of a max-pool is scattered into zeros of the shape of its operand. Where the operand is
a rectifier's output, XLA merges these zeros with those that the rectifier compares with. Since a
scatter overwrites its operand, XLA then writes out the zeros and a copy of them at the first
rectifier, and keeps both until the gradient of the pool; no `jax.checkpoint` around them helps.
With one more axis, of size one, the pool's zeros are a different array, made where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jax_hremat._jax.equations import bind_equation, context_of

_SCATTERED = frozenset({"reduce_window_max", "reduce_window_min"})
# What one extra axis adds to each parameter of the operation.
_NO_WINDOW = {
    "window_dimensions": 1,
    "window_strides": 1,
    "padding": (0, 0),
    "base_dilation": 1,
    "window_dilation": 1,
}


def bind_apart(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Evaluate one equation; a max-pool is given one extra axis."""
    if eqn.primitive.name not in _SCATTERED:
        return bind_equation(eqn, inputs)
    (operand,) = inputs
    with context_of(eqn):
        operand = jax.lax.expand_dims(operand, (operand.ndim,))
        pooled = eqn.primitive.bind(operand, **_with_one_axis_more(eqn.params))
        return [jax.lax.squeeze(pooled, (pooled.ndim - 1,))]


def _with_one_axis_more(params: Mapping[str, Any]) -> dict[str, Any]:
    assert params.keys() == _NO_WINDOW.keys()
    return {name: (*params[name], more) for name, more in _NO_WINDOW.items()}
