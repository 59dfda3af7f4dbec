"""Values that are compared with what they were made of, and so may not be kept without it.

Programs and derivative rules look for the elements that an operation picked: `x == max(x)`,
`x >= top_k(x, k)[-1]`, `x - max(x) == 0`, the backward rule of a `custom_vjp` that kept `x` and its
maximum. Both sides are equal by construction, to the bit. A recomputation need not give the bits of
the first run, since XLA fuses it differently. If the maximum were kept under a name and its input
recomputed, the comparison would miss, and the gradient of that element would be lost. So such a
value is recomputed together with its input.

A mask is kept as little, if it guards the arguments of an operation that is infinite at some of
them: in `where(x > 0, sqrt(where(x > 0, x, 1)), 0)`, a kept mask and a recomputed `x` need not
agree, and the derivative of the square root of zero is infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from itertools import combinations
from typing import Any, TypeAlias

from jax_hremat._jax.jaxprs import inner_equations, inner_jaxprs, open_jaxpr, variables
from jax_hremat._jax.keys import is_inexact
from jax_hremat._primitives.elementwise import ELEMENT_FLOPS, MOVES

_COMPARISONS = frozenset("eq ne lt le gt ge eq_to lt_to le_to".split())
_DIFFERENCES = frozenset(("sub", "div"))
# No program asks where the exponential of a difference is one.
_EXPONENTIALS = frozenset(("exp", "exp2"))
# Where these have a kink or a step, they compare their operand with a number.
_KINKED = _COMPARISONS | frozenset("abs ceil clamp floor max min round sign".split())
# What two results of these, or one of them and an operand, have in common is no reason to expect
# them to be equal. Of anything else it may be: it selects, moves or rounds elements, has a body
# that may, or computes with zeros and ones.
_PRODUCTS = frozenset(
    """cholesky conv_general_dilated dot_general eigh fft lu qr ragged_dot_general svd
    triangular_solve""".split()
)
_SUMS = frozenset(
    """cumlogsumexp cumprod cumsum psum psum_scatter reduce_prod reduce_sum reduce_window_sum
    scatter-add scatter-mul scatter-sub""".split()
)
# Sums, and what may have sums inside.
_SUMMING = _PRODUCTS | _SUMS | {"scan", "while"}
# The derivatives of these compare nothing.
_SMOOTH = _PRODUCTS | _SUMS | MOVES | frozenset(("add", "add_any", "div", "mul", "select_n", "sub"))
_ELEMENTWISE = ELEMENT_FLOPS.keys() | MOVES
# Infinite, or with an infinite derivative, for some finite arguments.
_SINGULAR = frozenset(
    """acos acosh asin atan2 atanh cbrt digamma div erf_inv lgamma log log1p log2 pow rsqrt
    sqrt""".split()
)

# The positions of two inputs of an operation that its derivative compares, or what is made of them.
Pair: TypeAlias = tuple[int, int]
# What each of two compared values is made of, themselves included.
_Compared: TypeAlias = tuple[frozenset[Any], frozenset[Any]]


def compared_values(jaxpr: Any, by_derivative: Callable[[int], Iterable[Pair]]) -> frozenset[Any]:
    """The variables of an open jaxpr that must be recomputed together with what they are made of.

    An equation, in the jaxpr or in the body of a loop or branch, or the derivative of one, compares
    them with a value that is made of the same, without a product of matrices between them; or they
    are masks of guarded arguments.

    Args:
        jaxpr: The jaxpr.
        by_derivative: The inputs that the derivative of an equation compares, by its position.

    Unchecked: differences from a sum of the same or a loop over it, compared with a number
    (`h - (onehot * h).sum() == 0`), exponentials of differences (`exp(h - h.max()) == 1`), and how
    equal values are sorted.
    """
    scope = _Scope(jaxpr, {})
    found: frozenset[Any] = frozenset()
    for one, other in (*scope.comparisons(), *scope.by_derivatives(by_derivative)):
        found |= (one ^ other) & scope.made_from(_inexact(one & other))
    for mask, chosen in scope.guards():
        found |= (mask - _inexact(mask)) & scope.made_from(_inexact(mask & chosen))
    return found


def compared_inputs(jaxpr: Any) -> frozenset[Pair]:
    """The inputs of an open jaxpr that an equation in it, or in a body, compares with each other,
    or what is made of them."""
    position = {v: i for i, v in enumerate(jaxpr.invars)}
    return frozenset(
        (position[a], position[b])
        for one, other in _Scope(jaxpr, {}).comparisons()
        for a in one & position.keys()
        for b in other & position.keys()
        if a is not b
    )


def _inexact(made: frozenset[Any]) -> frozenset[Any]:
    return frozenset(v for v in made if is_inexact(v.aval.dtype))


class _Scope:
    """An open jaxpr, or the body of a loop or branch.

    Args:
        jaxpr: The jaxpr.
        given: What inputs of a body are made of outside.
    """

    def __init__(self, jaxpr: Any, given: Mapping[Any, frozenset[Any]]) -> None:
        self._eqns = jaxpr.eqns
        self._given = given
        self._makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def _made_of(self, atom: Any, but_by: frozenset[str] = _PRODUCTS) -> frozenset[Any]:
        """A variable and those it is made of, as far as without some operations."""
        found: set[Any] = set()
        stack = variables((atom,))
        while stack:
            var = stack.pop()
            found |= self._given.get(var, frozenset()) | {var}
            maker = self._makers.get(var)
            if maker is not None and maker.primitive.name not in but_by:
                stack += [v for v in variables(maker.invars) if v not in found]
        return frozenset(found)

    def made_from(self, sources: Set[Any]) -> frozenset[Any]:
        """What is made from some of the variables without products of matrices, and they."""
        made = set(sources)
        for eqn in self._eqns if sources else ():
            if eqn.primitive.name not in _PRODUCTS and not made.isdisjoint(variables(eqn.invars)):
                made.update(eqn.outvars)
        return frozenset(made)

    def comparisons(self) -> Iterator[_Compared]:
        """What the operands of each comparison are made of, and those of each difference or
        quotient that a number is compared with."""
        differences: dict[Any, frozenset[int]] = {}
        for index, eqn in enumerate(self._eqns):
            name, inputs = eqn.primitive.name, set(variables(eqn.invars))
            if name in _COMPARISONS and len(inputs) == 2:
                one, other = map(self._made_of, eqn.invars)
                yield one, other
            of = frozenset(i for v in inputs for i in differences.get(v, ()))
            if of and _is_kinked(eqn):
                for i in sorted(of):
                    one, other = (self._made_of(v, _SUMMING) for v in self._eqns[i].invars)
                    yield one, other
                of = frozenset()
            if name in _DIFFERENCES and len(inputs) == 2:
                of |= {index}
            if of and name not in _PRODUCTS | _EXPONENTIALS:
                differences |= dict.fromkeys(eqn.outvars, of)
            for body in map(open_jaxpr, inner_jaxprs(eqn)):
                if any(map(_is_kinked, body.eqns)):
                    # A body's inputs are the last of its equation's; the index of a branch comes
                    # first.
                    pairs = zip(reversed(body.invars), reversed(eqn.invars), strict=False)
                    given = {v: self._made_of(outer) for v, outer in pairs}
                    yield from _Scope(body, given).comparisons()

    def by_derivatives(self, compared: Callable[[int], Iterable[Pair]]) -> Iterator[_Compared]:
        """What the inputs that derivatives compare are made of."""
        for index, eqn in enumerate(self._eqns):
            if len(variables(eqn.invars)) < 2 or eqn.primitive.name in _SMOOTH:
                continue
            made_of = [self._made_of(v) for v in eqn.invars]
            if any(one & other and one != other for one, other in combinations(made_of, 2)):
                yield from ((made_of[i], made_of[j]) for i, j in compared(index))

    def guards(self) -> Iterator[tuple[frozenset[Any], frozenset[Any]]]:
        """What each mask that chooses the argument of a singular operation is made of, and what it
        chooses from."""
        singular: set[Any] = set()
        for eqn in reversed(self._eqns):
            name = eqn.primitive.name
            if name in _SINGULAR:
                singular.update(variables(eqn.invars[1:] if name == "div" else eqn.invars))
            elif name == "select_n" and not singular.isdisjoint(eqn.outvars):
                mask, *cases = eqn.invars
                singular.update(variables(cases))
                yield self._made_of(mask), frozenset().union(*map(self._made_of, cases))
            elif name in _ELEMENTWISE and not singular.isdisjoint(eqn.outvars):
                singular.update(variables(eqn.invars))


def _is_kinked(eqn: Any) -> bool:
    """Whether an equation, or one in its bodies, compares something."""
    return eqn.primitive.name in _KINKED or any(map(_is_kinked, inner_equations(eqn)))


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
