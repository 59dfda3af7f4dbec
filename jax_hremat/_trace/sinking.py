"""Operations on an argument alone, moved to where their result is read.

Mixed-precision training casts its parameters to a shorter type, often all of them before the first
layer. In program order each copy then lives from there to the end of its layer's backward, through
all blocks in between, and its gradient waits until the backward arrives at the cast. Arguments are
alive anyway, so such an operation costs nothing where its result is read, and a region that
contains it keeps the argument alone. Compilers call the move code sinking.
"""

from __future__ import annotations

from typing import Any

from jax_hremat._jax.jaxprs import open_jaxpr, variables, with_equations


def with_sunk_operations(closed: Any) -> Any:
    """The jaxpr, with each operation moved to just before the one that reads its results, if it
    reads one argument, or the result of one such operation, and only one other reads it.

    Everything else stays in its order, and nothing is computed twice. What several operations read,
    such as a mask made of the batch that is the same for all layers, is not moved: it would make
    the first of equal layers differ from the others.
    """
    jaxpr = open_jaxpr(closed)
    readers: dict[Any, set[int]] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        for var in variables(eqn.invars):
            readers.setdefault(var, set()).add(index)
    at_hand = {*jaxpr.constvars, *jaxpr.invars}
    returned = set(variables(jaxpr.outvars))
    # The equation before which each one goes.
    before = list(range(len(jaxpr.eqns)))
    for index, eqn in enumerate(jaxpr.eqns):
        given = variables(eqn.invars)
        read_by = set[int]().union(*(readers.get(v, ()) for v in eqn.outvars))
        movable = len(given) == 1 and not eqn.effects and returned.isdisjoint(eqn.outvars)
        if movable and given[0] in at_hand and len(read_by) == 1:
            at_hand.update(eqn.outvars)
            (before[index],) = read_by
    for index in reversed(range(len(before))):
        # A reader that is moved itself takes its operands along.
        before[index] = before[before[index]]
    order = sorted(range(len(before)), key=lambda index: (before[index], index))
    return with_equations(closed, [jaxpr.eqns[index] for index in order])
