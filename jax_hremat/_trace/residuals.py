"""What the backward of each equation reads, and which values get cotangents.

Each equation is differentiated alone (`jax.vjp`), the last first, with cotangents for those of its
results that get some in the whole program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import jax
import numpy as np

from jax_hremat._jax.custom_rules import CustomVJPException
from jax_hremat._jax.describe import functions_key
from jax_hremat._jax.effects import run_once_equation
from jax_hremat._jax.equations import bind_equation
from jax_hremat._jax.jaxprs import Literal, inputs_read, open_jaxpr, variables
from jax_hremat._jax.scopes import source_line
from jax_hremat._jax.sizes import size_bytes_of
from jax_hremat._primitives.elementwise import FUSIBLE
from jax_hremat._trace.comparisons import Pair, compared_inputs, compares_results
from jax_hremat._trace.mapped import handed_on
from jax_hremat._trace.rules import STOPS, active_variables, are_in
from jax_hremat._trace.trace import Program, abstract


@dataclass(frozen=True, slots=True)
class Residuals:
    """What one equation's linearization keeps, and more that its differentiation shows.

    Attributes:
        differentiable: Whether it has a backward.
        reached: Positions of the inputs that get cotangents.
        inputs: Positions of the inputs it keeps.
        outputs: Positions of the outputs it keeps.
        opaque_bytes: Bytes of all else that it keeps.
        spared: Positions of the inputs that its results do not depend on.
        renames: Whether all its results are inputs themselves.
        once: Which of the operations it runs must run exactly once, as `Operation.once`.
        compares_results: As `Operation.compares_results`.
        compared: The inputs that its derivative compares with each other (`comparisons.py`).
    """

    differentiable: bool
    reached: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    opaque_bytes: int = 0
    spared: tuple[int, ...] = ()
    renames: bool = False
    once: str = ""
    compares_results: bool = False
    compared: frozenset[Pair] = frozenset()


_NO_BACKWARD = Residuals(differentiable=False)


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward of a program.

    Attributes:
        residuals: By equation.
        reached: The variables that get cotangents: floating ones that depend on a differentiated
            input, and on which the loss depends or, where the program is not a loss, any result.
    """

    residuals: tuple[Residuals, ...]
    reached: frozenset[Any]


def backward_of(program: Program, signatures: Sequence[str]) -> Backward:
    """Differentiate the equations of a program.

    Args:
        program: The program.
        signatures: By equation, its primitive, parameters and shapes; with the identity of its
            derivative rules, which nothing else tells apart, the key of what is done once.
    """
    jaxpr = open_jaxpr(program.jaxpr)
    moving = active_variables(jaxpr, program.differentiated)
    results = jaxpr.outvars[:1] if program.is_loss else jaxpr.outvars
    reached = {v for v in results if not isinstance(v, Literal) and v in moving}
    known: dict[Any, Residuals] = {}
    found: list[Residuals] = []
    for eqn, signature in reversed(list(zip(jaxpr.eqns, signatures, strict=True))):
        mask = tuple(are_in(moving, eqn.invars))
        pulled = tuple(i for i, v in enumerate(eqn.outvars) if v in reached)
        residuals = _NO_BACKWARD
        # Where no cotangent comes, rules are not run: JAX would not run them either.
        if any(mask) and pulled and eqn.primitive.name not in STOPS:
            key = (signature, mask, pulled, functions_key(eqn))
            if key not in known:
                known[key] = _residuals_of(eqn, mask, pulled)
            residuals = known[key]
        reached.update(eqn.invars[i] for i in residuals.reached)
        found.append(residuals)
    return Backward(tuple(reversed(found)), frozenset(reached))


def compared_by_derivative(
    eqn: Any, mask: Sequence[bool], pulled: Sequence[int]
) -> frozenset[Pair]:
    """The inputs of an equation that its derivative compares, or what is made of them.

    Args:
        eqn: The equation.
        mask: Which of its inputs are differentiated.
        pulled: Positions of the outputs that get cotangents.
    """
    if not any(mask) or not pulled or eqn.primitive.name in STOPS:
        return frozenset()
    try:
        return _residuals_of(eqn, mask, pulled).compared
    except CustomVJPException:
        # JAX differentiates it where the tangents of what it closes over are zero in the program,
        # but not alone. So its rule may compare any of its inputs.
        return frozenset(combinations(range(len(eqn.invars)), 2))


def run_once(eqn: Any) -> str:
    """The operation, of those the equation runs, that must run exactly once, and its source line;
    empty if there is none."""
    found = run_once_equation(eqn)
    return "" if found is None else f"`{found.primitive.name}` at {source_line(found)}"


def _residuals_of(eqn: Any, mask: Sequence[bool], pulled: Sequence[int]) -> Residuals:
    """Differentiate the equation alone and see which values its pullback holds.

    Args:
        eqn: The equation.
        mask: Which of its inputs move with those that are differentiated.
        pulled: Positions of the outputs that get cotangents. The others get none, as in the whole
            program, where a rule may do without what only they need, or fail if they had some.
    """
    in_avals = [abstract(v.aval) for v in eqn.invars]
    moving = [i for i, m in enumerate(mask) if m]
    order = [*pulled, *(i for i in range(len(eqn.outvars)) if i not in pulled)]
    literals = {i: v.val for i, v in enumerate(eqn.invars) if isinstance(v, Literal)}

    def forward(*inputs: Any) -> Any:
        def active_part(*active: Any) -> Any:
            merged = [literals.get(i, x) for i, x in enumerate(inputs)]
            for position, value in zip(moving, active, strict=True):
                merged[position] = value
            outputs = bind_equation(eqn, merged)
            outputs = [outputs[i] for i in order]
            return outputs[: len(pulled)], outputs[len(pulled) :]

        outputs, pullback, others = jax.vjp(active_part, *(inputs[i] for i in moving), has_aux=True)
        pullbacks.append(jax.tree.structure(pullback))
        return outputs, others, pullback

    pullbacks: list[Any] = []
    jaxpr = open_jaxpr(jax.make_jaxpr(forward)(*in_avals))
    results, residuals = jaxpr.outvars[: len(order)], jaxpr.outvars[len(order) :]
    reached = moving
    compared = compared_inputs(jaxpr)
    by_rule: list[tuple[Any, Any]] = []
    if functions_key(eqn):
        zero, residuals, by_rule = _read_back(pullbacks[0], residuals, results[: len(pulled)])
        reached = [i for i, is_zero in zip(moving, zero, strict=True) if not is_zero]
    in_position = {v: i for i, v in enumerate(jaxpr.invars)}
    for output, source in (pair for e in jaxpr.eqns for pair in handed_on(e)):
        if source in in_position:
            in_position[output] = in_position[source]
    out_position = {
        v: i
        for i, v in reversed(list(zip(order, results, strict=True)))
        if not isinstance(v, Literal) and v not in in_position
    }
    producers = {o: e for e in jaxpr.eqns for o in e.outvars}
    compared |= {
        (in_position[a], in_position[b])
        for a, b in by_rule
        if a in in_position and b in in_position
    }
    results_compared = compares_results(jaxpr, set(out_position))
    reads: set[int] = set()
    makes: set[int] = set()
    opaque_bytes = 0
    for residual in dict.fromkeys(variables(residuals)):
        if residual in in_position:
            reads.add(in_position[residual])
        elif residual in out_position:
            makes.add(out_position[residual])
        else:
            sources = _sources(residual, producers, in_position, out_position)
            if sources is None:
                opaque_bytes += size_bytes_of(residual.aval)
            else:
                reads |= sources[0]
                makes |= sources[1]
    if results_compared and makes:
        # The results are computed from the inputs again, to be compared with them.
        reads.update(in_position.values())
    read = inputs_read(jaxpr, len(results))
    return Residuals(
        differentiable=True,
        reached=tuple(reached),
        inputs=tuple(sorted(i for i in reads if i not in literals)),
        outputs=() if results_compared else tuple(sorted(makes)),
        opaque_bytes=opaque_bytes,
        compares_results=results_compared,
        compared=compared,
        spared=tuple(i for i, is_read in enumerate(read) if not is_read),
        renames=all(not isinstance(v, Literal) and v in in_position for v in results),
        # A custom rule may run other operations than the function it belongs to.
        once=next(filter(None, map(run_once, jaxpr.eqns)), ""),
    )


def _read_back(
    pullback: Any, residuals: Sequence[Any], outputs: Sequence[Any]
) -> tuple[list[bool], list[Any], list[tuple[Any, Any]]]:
    """Which of the cotangents that a pullback gives are zero, the residuals it reads, and which of
    them it compares with each other.

    A rule keeps the same residuals whichever inputs are differentiated, so some may not be read;
    and it may give some inputs no cotangent.
    """

    def pulled(residuals: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        return jax.tree.unflatten(pullback, residuals)(cotangents)

    avals = [[abstract(v.aval) for v in atoms] for atoms in (residuals, outputs)]
    jaxpr = open_jaxpr(jax.make_jaxpr(pulled)(*avals))
    producers = {o: e for e in jaxpr.eqns for o in e.outvars}
    is_read = inputs_read(jaxpr, len(jaxpr.outvars))
    return (
        [_is_zero(v, producers) for v in jaxpr.outvars],
        [v for v, read in zip(residuals, is_read, strict=False) if read],
        # It may also compare the cotangents, which come after the residuals.
        [
            (residuals[a], residuals[b])
            for a, b in sorted(compared_inputs(jaxpr))
            if max(a, b) < len(residuals)
            and not isinstance(residuals[a], Literal)
            and not isinstance(residuals[b], Literal)
        ],
    )


def _is_zero(atom: Any, producers: Mapping[Any, Any]) -> bool:
    if isinstance(atom, Literal):
        return not np.any(atom.val)
    made_by = producers.get(atom)
    if made_by is None or made_by.primitive.name != "broadcast_in_dim":
        return False
    return _is_zero(made_by.invars[0], producers)


def _sources(
    residual: Any,
    producers: dict[Any, Any],
    in_position: dict[Any, int],
    out_position: dict[Any, int],
) -> tuple[set[int], set[int]] | None:
    """The inputs and primal outputs a residual is cheaply computed from, or None.

    A mask or a local derivative is one such: XLA recomputes it inside the backward's kernels.
    """
    ins: set[int] = set()
    outs: set[int] = set()
    stack, seen = [residual], set()
    while stack:
        var = stack.pop()
        if isinstance(var, Literal) or var in seen:
            continue
        seen.add(var)
        if var in in_position:
            ins.add(in_position[var])
        elif var in out_position:
            outs.add(out_position[var])
        elif var in producers:
            name = producers[var].primitive.name
            if name not in FUSIBLE and not name.startswith("reduce_"):
                return None
            stack.extend(producers[var].invars)
    return ins, outs
