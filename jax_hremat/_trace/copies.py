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

from jax_hremat._jax.custom_rules import DETACH
from jax_hremat._jax.jaxprs import Literal, inner_jaxprs, open_jaxpr
from jax_hremat._trace.trace import is_inexact

_COMPARISONS = frozenset("eq ne lt le gt ge eq_to lt_to le_to".split())
# What returns elements of its inputs, in another place or sign or type.
_COPIES = frozenset(
    """all_gather all_to_all approx_top_k broadcast_in_dim clamp concatenate convert_element_type
    copy copy_p cummax cummin dynamic_slice dynamic_update_slice expand_dims gather max min name
    neg optimization_barrier pad pmax pmin ppermute reduce_max reduce_min reshape rev select_n slice
    sort split squeeze stop_gradient top_k transpose
    """.split()
) | {DETACH}


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
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _COPIES:
            read = frozenset().union(*map(sources_of, eqn.invars))
            sources |= {v: read | {v} for v in eqn.outvars if is_inexact(v.aval.dtype)}
        elif name in _COMPARISONS:
            one, other = map(sources_of, eqn.invars)
            if one & other:
                found |= one ^ other
        for body in map(open_jaxpr, inner_jaxprs(eqn)):
            # A body's inputs are the last of its equation's; the index of a branch comes first.
            pairs = zip(reversed(body.invars), reversed(eqn.invars), strict=False)
            found |= _found(body, {v: sources_of(outer) | {v} for v, outer in pairs})
    return frozenset(found)


def compares_results(jaxpr: Any, results: Set[Any]) -> bool:
    """Whether the derivative of an operation, an open jaxpr, compares some of its results with
    values that depend on its inputs in another way."""
    of_result, of_input = set(results), set(jaxpr.invars) - set(results)
    for eqn in jaxpr.eqns:
        operands = {v for v in eqn.invars if not isinstance(v, Literal)}
        reads_result, reads_input = operands & of_result, operands & of_input
        if reads_result and reads_input and eqn.primitive.name in _COMPARISONS:
            return True
        made = set(eqn.outvars) - results
        of_result |= made if reads_result else set()
        of_input |= made if reads_input else set()
    return False
