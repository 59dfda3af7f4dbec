"""Scans: their bodies as programs, and one scan as nested, checkpointed scans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_hremat._program.graph import Graph, build_graph, is_loop
from jax_hremat._program.trace import Program, inline, is_inexact
from jax_hremat._shared import compat


def scan_body(eqn: Any, active: Sequence[bool] = ()) -> Program:
    """The body of a scan as a flat program of (constants, carry, one step's inputs).

    Args:
        eqn: The scan's equation.
        active: Which inputs of the body are differentiated; none if left out.
    """
    jaxpr = inline(eqn.params["jaxpr"])
    avals = [v.aval for v in compat.open_jaxpr(jaxpr).invars]
    num_outputs = len(compat.open_jaxpr(jaxpr).outvars)
    flags = [*active, *[False] * (len(avals) - len(active))]
    return Program(
        jaxpr=jaxpr,
        in_tree=jax.tree.structure((tuple(avals), {})),
        out_tree=jax.tree.structure([0] * num_outputs),
        input_names=tuple(f"in[{i}]" for i in range(len(avals))),
        differentiated=tuple(
            i
            for i, (on, a) in enumerate(zip(flags, avals, strict=True))
            if on and is_inexact(a.dtype)
        ),
        is_loss=False,
        has_aux=False,
    )


@dataclass(frozen=True, slots=True)
class LoopBody:
    """The body of a differentiated scan.

    Attributes:
        graph: Its operations and values.
        trips: Steps of the scan.
        inner: The bodies of the scans inside, by operation.
    """

    graph: Graph
    trips: int
    inner: Mapping[int, LoopBody]


def loop_bodies(program: Program, graph: Graph) -> dict[int, LoopBody]:
    """The bodies of the scans of a program that have a backward, by operation."""
    eqns = compat.open_jaxpr(program.jaxpr).eqns
    bodies = {}
    for op in graph.operations:
        if is_loop(op):
            active = [v is not None and graph.values[v].active for v in op.inputs]
            bodies[op.id] = _loop_body(eqns[op.id], active)
    return bodies


def _loop_body(eqn: Any, active: Sequence[bool]) -> LoopBody:
    """The body with the activity of its carry: a carried value is active if it is so at the
    start or after any step."""
    num_consts, num_carry = compat.scan_counts(eqn)
    flags = list(active)
    while True:
        program = scan_body(eqn, flags)
        graph = build_graph(program)
        after = [v is not None and graph.values[v].active for v in graph.outputs[:num_carry]]
        carried = slice(num_consts, num_consts + num_carry)
        grown = [a or b for a, b in zip(flags[carried], after, strict=True)]
        if grown == flags[carried]:
            return LoopBody(graph, eqn.params["length"], loop_bodies(program, graph))
        flags[carried] = grown


def run_scan(
    eqn: Any,
    body: Callable[..., Sequence[Any]],
    segments: Sequence[int],
    inputs: Sequence[Any],
    *,
    prevent_cse: bool,
) -> list[Any]:
    """The scan with another body that computes the same, its steps in segments.

    Args:
        eqn: The scan's equation.
        body: Its flat body.
        segments: As `Loop.segments`. Steps left over when a length does not divide the one
            before it are one segment more, at the scan's end.
        inputs: The equation's inputs.
        prevent_cse: Whether common subexpressions must be kept apart outside of loops, where
            the leftover steps stand. Inside a loop nothing of the forward is in reach.
    """
    num_consts, num_carry = compat.scan_counts(eqn)
    consts, carry = list(inputs[:num_consts]), list(inputs[num_consts : num_consts + num_carry])
    xs = list(inputs[num_consts + num_carry :])
    reverse, unroll = eqn.params["reverse"], eqn.params["unroll"]

    def one_scan(
        consts: list[Any], carry: list[Any], xs: list[Any], length: int
    ) -> tuple[list[Any], list[Any]]:
        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            outputs = body(*consts, *carry, *x)
            return list(outputs[:num_carry]), list(outputs[num_carry:])

        carry, ys = jax.lax.scan(
            step, carry, xs, length=length, reverse=reverse, unroll=min(unroll, max(length, 1))
        )
        return carry, ys

    def in_segments(
        consts: list[Any],
        carry: list[Any],
        xs: list[Any],
        length: int,
        segments: Sequence[int],
        prevent_cse: bool,
    ) -> tuple[list[Any], list[Any]]:
        if not segments or segments[0] >= length:
            return one_scan(consts, carry, xs, length)
        size = segments[0]
        count, rest = divmod(length, size)

        def segment(length: int, prevent_cse: bool) -> Callable[..., Any]:
            def run(consts: list[Any], carry: list[Any], xs: list[Any]) -> Any:
                return in_segments(consts, carry, xs, length, segments[1:], False)

            return jax.checkpoint(run, prevent_cse=prevent_cse)

        def leftover(carry: list[Any]) -> tuple[list[Any], list[Any]]:
            tail = [x[count * size :] for x in xs]
            return segment(rest, prevent_cse)(consts, carry, tail)

        late: list[Any] = []
        if rest and reverse:
            carry, late = leftover(carry)
        whole = [x[: count * size].reshape(count, size, *x.shape[1:]) for x in xs]
        inner = segment(size, False)
        carry, ys = jax.lax.scan(
            lambda carry, x: inner(consts, carry, x), carry, whole, length=count, reverse=reverse
        )
        ys = [y.reshape(count * size, *y.shape[2:]) for y in ys]
        if rest and not reverse:
            carry, late = leftover(carry)
        if rest:
            ys = [jnp.concatenate(pair) for pair in zip(ys, late, strict=True)]
        return carry, ys

    with compat.context_of(eqn):
        carry, ys = in_segments(
            consts, carry, xs, eqn.params["length"], tuple(segments), prevent_cse
        )
    return [*carry, *ys]
