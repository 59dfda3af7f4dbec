"""The bodies of scans and branches of conds, as programs of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from jax_hremat._jax.jaxprs import open_jaxpr, scan_counts
from jax_hremat._jax.keys import is_inexact
from jax_hremat._trace.comparisons import sources_of
from jax_hremat._trace.graph import Graph, build_graph, is_cond, is_loop
from jax_hremat._trace.rules import active_variables, are_in, open_program
from jax_hremat._trace.trace import Program


def scan_body(
    eqn: Any,
    moving: Sequence[bool] = (),
    active: Sequence[bool] = (),
    sources: Sequence[frozenset[int]] = (),
) -> Program:
    """The body of a scan as a flat program of (constants, carry, one step's inputs).

    Args:
        eqn: The scan's equation.
        moving: Which of its inputs may be differentiated, so that rules are opened (`rules.py`);
            none if left out.
        active: Which inputs of the body are differentiated; none if left out.
        sources: What the scan's inputs are made of, as `comparisons.sources_of` tells.
    """
    return _body_program(eqn.params["jaxpr"], after_any_step(eqn, moving), active, sources)


def branch_bodies(
    eqn: Any,
    moving: Sequence[bool] = (),
    active: Sequence[bool] = (),
    sources: Sequence[frozenset[int]] = (),
) -> list[Program]:
    """The branches of a cond as flat programs of its operands.

    Args:
        eqn: The cond's equation.
        moving: Which of its inputs, the index first, may be differentiated, so that rules are
            opened (`rules.py`); none if left out.
        active: Which operands are differentiated; none if left out.
        sources: What the cond's inputs are made of, as `comparisons.sources_of` tells.
    """
    return [
        _body_program(branch, moving[1:], active, sources[1:]) for branch in eqn.params["branches"]
    ]


def after_any_step(eqn: Any, moving: Sequence[bool]) -> list[bool]:
    """Which inputs of a scan's body depend on the inputs of the scan that are `moving`: a carried
    value does if it does so after any step."""
    num_consts, num_carry = scan_counts(eqn)
    body = open_jaxpr(eqn.params["jaxpr"])
    flags = [*moving, *[False] * (len(body.invars) - len(moving))]
    carried = slice(num_consts, num_consts + num_carry)
    while True:
        active = active_variables(body, [i for i, on in enumerate(flags) if on])
        after = are_in(active, body.outvars[:num_carry])
        grown = [a or b for a, b in zip(flags[carried], after, strict=True)]
        if grown == flags[carried]:
            return flags
        flags[carried] = grown


def _body_program(
    closed: Any,
    moving: Sequence[bool],
    active: Sequence[bool],
    sources: Sequence[frozenset[int]],
) -> Program:
    avals = closed.in_avals
    moves = tuple(i for i, on in enumerate(moving) if on)
    jaxpr = open_program(closed, moves)
    flags = [*active, *[False] * (len(avals) - len(active))]
    return Program(
        jaxpr=jaxpr,
        input_names=tuple(f"in[{i}]" for i in range(len(avals))),
        differentiated=tuple(
            i
            for i, (on, a) in enumerate(zip(flags, avals, strict=True))
            if on and is_inexact(a.dtype)
        ),
        moving=moves,
        is_loss=False,
        sources=tuple(sources),
    )


@dataclass(frozen=True, slots=True)
class Body:
    """One step of a differentiated scan, or one branch of a differentiated cond.

    Attributes:
        graph: Its operations and values.
        kept: The same graph, each value with the bytes that one run keeps of it: JAX keeps a single
            copy of a value that is the same in every step of a scan, so such a value counts with
            its size divided by the number of steps.
        inner: The scans and conds inside it, by operation.
    """

    graph: Graph
    kept: Graph
    inner: Mapping[int, Scan | Cond]

    @property
    def effectful(self) -> bool:
        """Whether it has an effect, so that it must run exactly once."""
        return any(op.effectful for op in self.graph.operations)


@dataclass(frozen=True, slots=True)
class Scan:
    """A scan that has a backward.

    Attributes:
        body: One step.
        trips: Number of steps.
    """

    body: Body
    trips: int


@dataclass(frozen=True, slots=True)
class Cond:
    """A cond that has a backward.

    Attributes:
        branches: The branches, in the order of the cond's index.
    """

    branches: tuple[Body, ...]


def bodies_of(program: Program, graph: Graph) -> dict[int, Scan | Cond]:
    """The scans and conds of a program that have a backward, by operation."""
    with program.context.entered():
        return _bodies_of(program, graph)


def _bodies_of(program: Program, graph: Graph) -> dict[int, Scan | Cond]:
    jaxpr = open_jaxpr(program.jaxpr)
    variables = active_variables(jaxpr, program.moving)
    found: dict[int, Scan | Cond] = {}
    for op in graph.operations:
        if not is_loop(op) and not is_cond(op):
            continue
        eqn = jaxpr.eqns[op.id]
        active = [v is not None and graph.values[v].active for v in op.inputs]
        moving = are_in(variables, eqn.invars)
        sources = sources_of(jaxpr, eqn, program.sources)
        if is_loop(op):
            found[op.id] = Scan(_scan_body(eqn, moving, active, sources), eqn.params["length"])
        else:
            # The first input is the index.
            branches = branch_bodies(eqn, moving, active[1:], sources)
            found[op.id] = Cond(tuple(map(_body, branches)))
    return found


def _body(program: Program) -> Body:
    graph = build_graph(program)
    return Body(graph, graph, bodies_of(program, graph))


def _scan_body(
    eqn: Any,
    moving: Sequence[bool],
    active: Sequence[bool],
    sources: Sequence[frozenset[int]],
) -> Body:
    """The body of a scan. A carried value is active if it is active at the start or after any
    step."""
    num_consts, num_carry = scan_counts(eqn)
    flags = list(active)
    while True:
        program = scan_body(eqn, moving, flags, sources)
        graph = build_graph(program)
        after = [v is not None and graph.values[v].active for v in graph.outputs[:num_carry]]
        carried = slice(num_consts, num_consts + num_carry)
        grown = [a or b for a, b in zip(flags[carried], after, strict=True)]
        if grown == flags[carried]:
            kept = _kept_each_step(graph, num_consts, eqn.params["length"])
            return Body(graph, kept, bodies_of(program, graph))
        flags[carried] = grown


def _kept_each_step(graph: Graph, num_consts: int, trips: int) -> Graph:
    changing = set(graph.arguments[num_consts:])
    for op in graph.operations:
        if op.effectful or changing.intersection(op.inputs):
            changing.update(op.outputs)
    values = [
        v if v.id in changing else replace(v, size_bytes=ceil(v.size_bytes / trips))
        for v in graph.values
    ]
    return replace(graph, values=tuple(values))
