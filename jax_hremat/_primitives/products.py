"""Matrix products and convolutions: equations -> work."""

from __future__ import annotations

import math
from typing import Any

from jax_hremat._primitives.kernels import array_of, widest
from jax_hremat._primitives.work import Work, one_product


def dot_general(eqn: Any) -> Work:
    (contract, _), _ = eqn.params["dimension_numbers"]
    lhs = eqn.invars[0].aval.shape
    out = math.prod(eqn.outvars[0].aval.shape)
    return one_product(_factors(eqn), 2.0 * out * math.prod(lhs[d] for d in contract))


def ragged_dot(eqn: Any) -> Work:
    """XLA multiplies every row by the matrices of all groups, and masks."""
    (contract, _), _ = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    lhs, groups = eqn.invars[0].aval.shape, eqn.invars[2].aval.shape[-1]
    out = eqn.outvars[0].aval.shape
    ragged = eqn.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    # If the contraction is ragged, the groups are already a dimension of the result.
    repeats = 1 if set(ragged) <= set(contract) else groups
    flops = 2.0 * repeats * math.prod(out) * math.prod(lhs[d] for d in contract)
    return one_product(_factors(eqn), flops)


def convolution(eqn: Any) -> Work:
    kernel = eqn.invars[1].aval.shape
    out_features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    products = math.prod(kernel) / max(out_features, 1)
    holes = math.prod(eqn.params["lhs_dilation"])
    flops = 2.0 * math.prod(eqn.outvars[0].aval.shape) * products / holes
    return one_product(_factors(eqn), flops, convolves=True)


def _factors(eqn: Any) -> str:
    """The type of the operands that decides which unit multiplies them."""
    return widest([array_of(v.aval.dtype, ()) for v in eqn.invars[:2]])
