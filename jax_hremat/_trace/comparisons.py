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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

from jax_hremat._jax.jaxprs import inner_equations, inner_jaxprs, open_jaxpr, variables
from jax_hremat._jax.keys import is_inexact
from jax_hremat._primitives.elementwise import ELEMENT_FLOPS, MOVES

_COMPARISONS = frozenset("eq ne lt le gt ge eq_to lt_to le_to".split())
# Two values may be equal where these of the two are zero or one: `-max(-x)` is a minimum.
_DIFFERENCES = frozenset("add add_any div sub".split())
# No program asks where the exponential of a difference is one.
_EXPONENTIALS = frozenset(("exp", "exp2"))
# Where these have a kink or a step, they compare their operand with a number.
_KINKED = _COMPARISONS | frozenset("abs ceil clamp floor is_finite max min round sign".split())
# Infinite, or with an infinite derivative, for some finite arguments.
_SINGULAR = frozenset(
    """acos acosh asin atan2 atanh cbrt digamma div erf_inv lgamma log log1p log2 pow rsqrt
    sqrt""".split()
)
# These put elements of several values into one.
_JOINS = frozenset("concatenate dynamic_update_slice scatter select_n stack".split())
# These compare the elements of a value with each other.
_ORDERINGS = frozenset(
    """approx_top_k argmax argmin cummax cummin reduce_max reduce_min reduce_window
    reduce_window_max reduce_window_min sort top_k""".split()
)
# What two results of these, or one of them and an operand, have in common is no reason to expect
# them to be equal. Of anything else it may be: it selects, moves or rounds elements, has a body
# that may, or computes with zeros and ones.
_PRODUCTS = frozenset(
    """cholesky conv_general_dilated dot_general eigh fft lu qr ragged_dot_general svd
    triangular_solve""".split()
)
_SUMS = frozenset(
    """cumlogsumexp cumprod cumsum psum psum_invariant reduce_prod reduce_scatter reduce_sum
    reduce_window_sum scatter-add scatter-mul scatter-sub""".split()
)
# Sums, and what may have sums inside.
_SUMMING = _PRODUCTS | _SUMS | {"scan", "while"}
# The derivatives of these compare nothing.
_SMOOTH = _PRODUCTS | _SUMS | MOVES | frozenset(("add", "add_any", "div", "mul", "select_n", "sub"))
_ELEMENTWISE = ELEMENT_FLOPS.keys() | MOVES

# The positions of two inputs of an operation that its derivative compares, or what is made of them.
Pair: TypeAlias = tuple[int, int]
# What each of two compared values is made of, themselves included.
_Compared: TypeAlias = tuple[frozenset[Any], frozenset[Any]]


def compared_values(
    jaxpr: Any,
    by_derivative: Callable[[int], Iterable[Pair]],
    sources: Sequence[frozenset[int]] = (),
) -> frozenset[Any]:
    """The variables of an open jaxpr that must be recomputed together with what they are made of.

    An equation, in the jaxpr or in the body of a loop or branch, or the derivative of one, compares
    them with a value that is made of the same, without a product of matrices between them; or they
    are masks of guarded arguments.

    Args:
        jaxpr: The jaxpr.
        by_derivative: The inputs that the derivative of an equation compares, by its position.
        sources: What its inputs are made of, as `sources_of` tells; empty if they have nothing in
            common.

    Unchecked: differences from a sum of the same or a loop over it, compared with a number
    (`h - (onehot * h).sum() == 0`), exponentials of differences (`exp(h - h.max()) == 1`), how
    equal values are sorted, and what carried values are made of after the first step of a loop.
    """
    scope = _Scope(jaxpr, _given(jaxpr, sources))
    found = scope.compared((*scope.comparisons(), *scope.by_derivatives(by_derivative)))
    for mask, chosen in scope.guards():
        found |= (mask - _inexact(mask)) & scope.made_from(_inexact(mask & chosen))
    return frozenset(v for v in found if not isinstance(v, _Outside))


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


def compares_results(jaxpr: Any, results: Set[Any]) -> bool:
    """Whether the derivative of an operation, an open jaxpr, compares some of its results with
    what they are made of."""
    scope = _Scope(jaxpr, {})
    return not results.isdisjoint(scope.compared(scope.comparisons()))


def sources_of(
    jaxpr: Any, eqn: Any, sources: Sequence[frozenset[int]] = ()
) -> tuple[frozenset[int], ...]:
    """What the inputs of an equation of an open jaxpr are made of, without products of matrices:
    for each of them a set of numbers, which stand for values.

    Args:
        jaxpr: The jaxpr.
        eqn: The equation.
        sources: The same of the jaxpr's inputs.
    """
    scope = _Scope(jaxpr, _given(jaxpr, sources))
    numbers: dict[Any, int] = {}
    return tuple(
        frozenset(numbers.setdefault(v, len(numbers)) for v in _inexact(scope.made_of(atom)))
        for atom in eqn.invars
    )


@dataclass(frozen=True, slots=True)
class _Outside:
    """A value outside of a body that inputs of the body are made of."""

    number: int


def _given(jaxpr: Any, sources: Sequence[frozenset[int]]) -> dict[Any, frozenset[Any]]:
    inputs = zip(jaxpr.invars, sources, strict=False)
    return {v: frozenset(map(_Outside, numbers)) for v, numbers in inputs}


def _inexact(made: frozenset[Any]) -> frozenset[Any]:
    return frozenset(v for v in made if isinstance(v, _Outside) or is_inexact(v.aval.dtype))


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

    def made_of(self, atom: Any, but_by: frozenset[str] = _PRODUCTS) -> frozenset[Any]:
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
        made.update(v for v, outside in self._given.items() if not made.isdisjoint(outside))
        for eqn in self._eqns if sources else ():
            if eqn.primitive.name not in _PRODUCTS and not made.isdisjoint(variables(eqn.invars)):
                made.update(eqn.outvars)
        return frozenset(made)

    def compared(self, pairs: Iterable[_Compared]) -> frozenset[Any]:
        """Of compared values, and what they are made of, what is made from what they share."""
        found: frozenset[Any] = frozenset()
        for one, other in pairs:
            if one != other:
                found |= (one ^ other) & self.made_from(_inexact(one & other))
        return found

    def comparisons(self) -> Iterator[_Compared]:
        """What the operands of each comparison are made of, and those of each difference or
        quotient that a number is compared with, and values whose elements are compared with each
        other after they were joined."""
        for eqn in self._eqns:
            if eqn.primitive.name in _COMPARISONS and len(set(variables(eqn.invars))) == 2:
                one, other = map(self.made_of, eqn.invars)
                yield one, other
            for body in map(open_jaxpr, inner_jaxprs(eqn)):
                if any(_compared_with_a_number(e) or _ordered(e) for e in body.eqns):
                    yield from _Scope(body, self._given_to(body, eqn)).comparisons()
        for eqn in (
            *self._reaching(_DIFFERENCES, _compared_with_a_number),
            *self._reaching(_JOINS, _ordered),
        ):
            yield from combinations([self.made_of(v, _SUMMING) for v in _combined(eqn)], 2)

    def _given_to(self, body: Any, eqn: Any) -> dict[Any, frozenset[Any]]:
        """What the inputs of a body are made of. They are the last of its equation's, behind the
        index of a branch; or the first, if the results are inputs of the body too, as of a
        kernel."""
        pairs = zip(reversed(body.invars), reversed(eqn.invars), strict=False)
        if len(body.invars) > len(eqn.invars):
            pairs = zip(body.invars, eqn.invars, strict=False)
        return {v: self.made_of(outer) for v, outer in pairs}

    def _reaching(
        self, names: frozenset[str], compared: Callable[[Any], Sequence[Any]]
    ) -> list[Any]:
        """The equations of some names, of two values or more, of whose results something is made
        that is compared, without products of matrices.

        Args:
            names: The names of the equations' primitives.
            compared: The inputs of an equation that it compares.
        """
        reached: dict[Any, frozenset[int]] = {}
        found: set[int] = set()
        for index, eqn in enumerate(self._eqns):
            name, inputs = eqn.primitive.name, set(variables(eqn.invars))
            ends = {*compared(eqn)}
            found.update(i for v in ends for i in reached.get(v, ()))
            of = frozenset(i for v in inputs - ends for i in reached.get(v, ()))
            if name in names and len(_combined(eqn)) > 1:
                of |= {index}
            if of and name not in _PRODUCTS | _EXPONENTIALS:
                reached |= dict.fromkeys(eqn.outvars, of)
        return [self._eqns[i] for i in sorted(found)]

    def by_derivatives(self, compared: Callable[[int], Iterable[Pair]]) -> Iterator[_Compared]:
        """What the inputs that derivatives compare are made of."""
        for index, eqn in enumerate(self._eqns):
            if len(variables(eqn.invars)) < 2 or eqn.primitive.name in _SMOOTH:
                continue
            made_of = [self.made_of(v) for v in eqn.invars]
            if any(one & other and one != other for one, other in combinations(made_of, 2)):
                yield from ((made_of[i], made_of[j]) for i, j in compared(index))

    def guards(self) -> Iterator[tuple[frozenset[Any], frozenset[Any]]]:
        """What each mask that chooses the argument of a singular operation is made of, and what it
        chooses from."""
        singular: set[Any] = set()
        for eqn in reversed(self._eqns):
            name = eqn.primitive.name
            singular.update(_singular_in(eqn))
            if name == "select_n" and not singular.isdisjoint(eqn.outvars):
                mask, *cases = eqn.invars
                singular.update(variables(cases))
                yield self.made_of(mask), frozenset().union(*map(self.made_of, cases))
            elif name in _ELEMENTWISE and not singular.isdisjoint(eqn.outvars):
                singular.update(variables(eqn.invars))


def _combined(eqn: Any) -> list[Any]:
    """The variables that an equation combines, each once; that a mask chooses by is none."""
    atoms = eqn.invars[1:] if eqn.primitive.name == "select_n" else eqn.invars
    return list(dict.fromkeys(variables(atoms)))


def _compared_with_a_number(eqn: Any) -> Sequence[Any]:
    """The inputs that an equation, or one in its bodies, compares with a number."""
    inputs = variables(eqn.invars)
    is_kinked = eqn.primitive.name in _KINKED or _makes_integers(eqn)
    if is_kinked or any(map(_compared_with_a_number, inner_equations(eqn))):
        return inputs
    return _singular_in(eqn)


def _singular_in(eqn: Any) -> Sequence[Any]:
    """The inputs for some finite values of which an operation, or its derivative, is infinite."""
    name = eqn.primitive.name
    if name == "div":
        return variables(eqn.invars[1:])
    is_singular = name in _SINGULAR or (name == "integer_pow" and eqn.params["y"] < 0)
    return variables(eqn.invars) if is_singular else ()


def _makes_integers(eqn: Any) -> bool:
    """Whether an equation makes integers or booleans of other numbers."""
    if eqn.primitive.name != "convert_element_type":
        return False
    before, after = (v.aval.dtype for v in (*eqn.invars, *eqn.outvars))
    return is_inexact(before) and not is_inexact(after)


def _ordered(eqn: Any) -> Sequence[Any]:
    """The inputs whose elements an equation compares with each other."""
    return variables(eqn.invars) if eqn.primitive.name in _ORDERINGS else ()
