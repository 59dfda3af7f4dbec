"""A block alone in the order that XLA gives it within a step.

XLA orders a computation in three ways, by a list scheduler that prefers what frees most memory,
depth first, and in post-order, and takes what then needs the least memory. A step that recomputes
much needs several times as much in the latter two, and is ordered by the first; a block alone
often is not. The least peak of a block alone may therefore be less than what the same
block takes within the step: 1.82 instead of 2.07 GiB in the last level of the U-Net.

So a computation that needs twice as much memory in the latter two orders as in the first one is put
behind the block. It is never run, and costs nothing. Before the block, it would change the order of
the block: what needs no input, such as zeros, would be ready before everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_hremat._emit.barrier import barrier
from jax_hremat._xla.target import Target

# The scope of what is put behind the block.
BEHIND = "hremat_behind"
# How many times the mark is in a row of the arrays, whose number of rows is then less than 2**31.
_ROW = 64
# The smaller one takes this part of the device's memory. Where a step does not fit, XLA recomputes.
_PART = 3


def in_list_order(function: Callable[..., Any], target: Target) -> Callable[..., Any]:
    """The function of a block's step, to be compiled and not run: with a computation behind it with
    which XLA's list scheduler needs the least memory, unless the block itself needs more than two
    thirds of the device's memory in some order.

    On a CPU it is the function as it is: XLA:CPU orders all computations in the same way.
    """
    if target.platform == "cpu":
        return function

    def before_another(*arguments: Any) -> Any:
        outputs, gradients, mark = function(*arguments)
        with jax.named_scope(BEHIND):
            *_, mark = barrier([*gradients, mark])
            mark = _least_in_list_order(mark, target.memory_bytes // _PART)
        return outputs, gradients, mark

    return before_another


def _least_in_list_order(mark: jax.Array, nbytes: int) -> jax.Array:
    """A part of a large array, at a place that is computed of another one, a little smaller.

    The list scheduler computes and frees the smaller one before it computes the larger one. In the
    other orders the larger one waits for the smaller one: it is the first operand, and the one that
    takes most to compute.
    """
    rows = max(8, nbytes // (_ROW * mark.nbytes))
    larger = jnp.broadcast_to(mark, (rows + rows // 8, _ROW, *mark.shape))
    smaller = jnp.broadcast_to(mark, (rows, _ROW, *mark.shape))
    (larger,), (smaller,) = barrier([larger]), barrier([smaller])
    place = jnp.fft.fft(smaller[-1, -1]).real[0].astype(jnp.int32)
    return jax.lax.dynamic_index_in_dim(larger, place, keepdims=False)[0]
