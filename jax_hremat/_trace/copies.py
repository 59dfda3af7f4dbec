"""Values that are compared with what they were copied from, and so may not be kept without it.

max, sort, top_k and others return elements of their input unchanged, and programs and derivative
rules look for them there: `x == max(x)`, `x >= top_k(x, k)[-1]`. A recomputation need not give the
bits of the first run, since XLA fuses it differently. If the maximum were kept under a name and its
input recomputed, the comparison would miss, and the gradient of that element would be lost. So such
a value is recomputed together with its input.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from jax_hremat._jax.jaxprs import Literal, inner_jaxprs, open_jaxpr, variables
from jax_hremat._jax.keys import is_inexact

_COMPARISONS = frozenset("eq ne lt le gt ge eq_to lt_to le_to".split())
# What computes new numbers. Everything else may return elements of its inputs, in another place or
# sign or type: it selects, moves or rounds them, or has a body that may.
_COMPUTES = frozenset(
    """acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cholesky
    conv_general_dilated cos cosh cumlogsumexp cumprod cumsum digamma div dot_general eigh erf
    erf_inv erfc exp exp2 expm1 fft igamma igammac integer_pow lgamma log log1p log2 logistic lu mul
    one_minus_square polygamma pow psum psum_scatter qr ragged_dot_general random_gamma_grad
    reduce_prod reduce_sum reduce_window_sum regularized_incomplete_beta rem rsqrt scatter-add
    scatter-mul scatter-sub sin sinh sqrt square sub svd tan tanh triangular_solve zeta
    """.split()
)


def compared_copies(jaxpr: Any) -> frozenset[Any]:
    """The variables of an open jaxpr that an equation, in it or in the body of a loop or branch,
    compares with a value they are copied from, or with another copy of it."""
    return _found(jaxpr, {})


def _found(jaxpr: Any, sources: dict[Any, frozenset[Any]]) -> frozenset[Any]:
    """Likewise, where it is known what some of the variables are copies of."""

    def sources_of(atom: Any) -> frozenset[Any]:
        if isinstance(atom, Literal) or not is_inexact(atom.aval.dtype):
            return frozenset()
        return sources.get(atom, frozenset((atom,)))

    found: set[Any] = set()
    padded: set[Any] = set()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "pad":
            padded.update(eqn.outvars)
        if name in _COMPARISONS:
            one, other = map(sources_of, eqn.invars)
            if one & other:
                found |= one ^ other
        elif name not in _COMPUTES or _joins(eqn, padded):
            read = frozenset().union(*map(sources_of, eqn.invars))
            sources |= {v: read | {v} for v in eqn.outvars if is_inexact(v.aval.dtype)}
        for body in map(open_jaxpr, inner_jaxprs(eqn)):
            # A body's inputs are the last of its equation's; the index of a branch comes first.
            pairs = zip(reversed(body.invars), reversed(eqn.invars), strict=False)
            found |= _found(body, {v: sources_of(outer) | {v} for v, outer in pairs})
    return frozenset(found)


def _joins(eqn: Any, padded: Set[Any]) -> bool:
    """Whether an equation adds what was padded with zeros, by which `jax.lax.associative_scan`
    puts elements between others."""
    return eqn.primitive.name == "add" and all(
        not isinstance(v, Literal) and v in padded for v in eqn.invars
    )


def compares_results(jaxpr: Any, results: Set[Any]) -> bool:
    """Whether the derivative of an operation, an open jaxpr, compares some of its results with
    values that depend on its inputs in another way."""
    of_result, of_input = set(results), set(jaxpr.invars) - set(results)
    for eqn in jaxpr.eqns:
        operands = set(variables(eqn.invars))
        reads_result, reads_input = operands & of_result, operands & of_input
        if reads_result and reads_input and eqn.primitive.name in _COMPARISONS:
            return True
        made = set(eqn.outvars) - results
        of_result |= made if reads_result else set()
        of_input |= made if reads_input else set()
    return False
