"""Values that are compared with what they were copied from, and so may not be kept without it.

max, sort, top_k and others return elements of their input unchanged, and programs and derivative
rules look for them there: `x == max(x)`, `x >= top_k(x, k)[-1]`, the backward rule of a
`custom_vjp` that kept `x` and its maximum. A recomputation need not give the
bits of the first run, since XLA fuses it differently. If the maximum were kept under a name and its
input recomputed, the comparison would miss, and the gradient of that element would be lost. So such
a value is recomputed together with its input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from itertools import combinations
from typing import Any, TypeAlias

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
    scatter-mul scatter-sub sign sin sinh sqrt square sub svd tan tanh triangular_solve zeta
    """.split()
)


# The positions of two inputs of an operation that its derivative compares, or copies of them.
Pair: TypeAlias = tuple[int, int]
# What variables are copies of, themselves included.
_Sources: TypeAlias = dict[Any, frozenset[Any]]


def compared_copies(jaxpr: Any, by_derivative: Callable[[int], Iterable[Pair]]) -> frozenset[Any]:
    """The variables of an open jaxpr that an equation, in it or in the body of a loop or branch,
    or the derivative of one, compares with a value they are copied from, or with another copy of
    it.

    Args:
        jaxpr: The jaxpr.
        by_derivative: The inputs that the derivative of an equation compares, by its position.
            Asked for those alone that read two values which may be copies of one.
    """
    sources: _Sources = {}
    compared = [*_comparisons(jaxpr, sources)]
    for index, eqn in enumerate(jaxpr.eqns):
        read = [_sources_of(v, sources) for v in eqn.invars]
        if any(one & other and one != other for one, other in combinations(read, 2)):
            compared += [(read[i], read[j]) for i, j in by_derivative(index)]
    return frozenset().union(*(one ^ other for one, other in compared if one & other))


def compared_inputs(jaxpr: Any) -> frozenset[Pair]:
    """The inputs of an open jaxpr that an equation in it, or in a body, compares with each other,
    or copies of them."""
    position = {v: i for i, v in enumerate(jaxpr.invars)}
    return frozenset(
        (position[a], position[b])
        for one, other in _comparisons(jaxpr, {})
        for a in one & position.keys()
        for b in other & position.keys()
        if a is not b
    )


def _comparisons(jaxpr: Any, sources: _Sources) -> Iterator[tuple[frozenset[Any], frozenset[Any]]]:
    """What the operands of each comparison are copies of; what all variables of the jaxpr are
    copies of is added to what is known."""
    padded: set[Any] = set()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "pad":
            padded.update(eqn.outvars)
        read = [_sources_of(v, sources) for v in eqn.invars]
        if name in _COMPARISONS:
            one, other = read
            yield one, other
        elif name not in _COMPUTES or _joins(eqn, padded):
            every = frozenset().union(*read)
            sources |= {v: every | {v} for v in eqn.outvars if is_inexact(v.aval.dtype)}
        for body in map(open_jaxpr, inner_jaxprs(eqn)):
            # A body's inputs are the last of its equation's; the index of a branch comes first.
            pairs = zip(reversed(body.invars), reversed(read), strict=False)
            yield from _comparisons(body, {v: outer | {v} for v, outer in pairs})


def _sources_of(atom: Any, sources: _Sources) -> frozenset[Any]:
    if isinstance(atom, Literal) or not is_inexact(atom.aval.dtype):
        return frozenset()
    return sources.get(atom, frozenset((atom,)))


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
