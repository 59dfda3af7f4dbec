"""Which values of one checkpointed stretch of the program to keep: the leaf program.

Glossary
    v, u    values made inside the stretch
    e       operations of the stretch; prod(v) makes v
    s_v     1 if v is kept between forward and backward
    r_e     1 if e runs again in the backward
    b_v     bytes of v; t_e seconds of e

The backward of JAX's `jax.checkpoint(policy=save_only_these_names(S))`: recompute from what is
kept whatever the backward reads (design of Checkmate, MLSys 2020, eqs. 1b-1d, with one
recompute stage).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jax_hremat._plan.region import ValueRef
from jax_hremat._solve.backend import Outcome, SolverConfig, Status, solve
from jax_hremat._solve.modelling import cp
from jax_hremat._trace.graph import Graph


@dataclass(frozen=True, slots=True)
class SavedValues:
    """One answer of the leaf program.

    Attributes:
        values: Value ids kept.
        recomputed: Operations run again.
        kept_bytes: Bytes of the values.
        recompute_s: Seconds of the operations.
        outcome: What the solver proved.
    """

    values: tuple[int, ...]
    recomputed: tuple[int, ...]
    kept_bytes: int
    recompute_s: float
    outcome: Outcome


def materialised_values(
    graph: Graph, start: int, stop: int, config: SolverConfig
) -> frozenset[int]:
    """The values XLA would hold if the stretch were plain: fewest bytes from which everything
    the backward reads follows by operations that fuse."""
    times = [0.0] * len(graph.operations)
    answer = _solve(
        graph,
        start,
        stop,
        times,
        config,
        may_recompute=lambda e: graph.operations[e].fusible,
        bytes_bound=None,
    )
    assert answer is not None, "keeping every value is always feasible"
    return frozenset(answer.values)


def saved_value_sets(
    graph: Graph, start: int, stop: int, times_s: Sequence[float], config: SolverConfig, count: int
) -> tuple[SavedValues, ...]:
    """Pareto sets of values to keep, from all that helps to none, least recompute time first.

    Args:
        graph: The program's graph.
        start: First operation of the stretch.
        stop: One past its last.
        times_s: Seconds of every operation of the program.
        config: The solver's limits.
        count: How many byte bounds to sweep.
    """
    answers: list[SavedValues] = []
    fullest = _solve(
        graph, start, stop, times_s, config, may_recompute=lambda _: True, bytes_bound=float("inf")
    )
    if fullest is None:
        return ()
    for step in range(count):
        bound = fullest.kept_bytes * (count - step) / count
        answer = _solve(
            graph, start, stop, times_s, config, may_recompute=lambda _: True, bytes_bound=bound
        )
        if answer is not None and answer.values not in [a.values for a in answers]:
            answers.append(answer)
    return tuple(answers)


def _solve(
    graph: Graph,
    start: int,
    stop: int,
    times_s: Sequence[float],
    config: SolverConfig,
    *,
    may_recompute: Callable[[int], bool],
    bytes_bound: float | None,
) -> SavedValues | None:
    operations = graph.operations[start:stop]
    made = [v for op in operations for v in op.outputs]
    column = {v: i for i, v in enumerate(made)}
    row = {op.id: i for i, op in enumerate(operations)}
    megabytes = np.array([graph.values[v].size_bytes / 2**20 for v in made])
    milliseconds = np.array([times_s[op.id] * 1e3 for op in operations])

    s = cp.Variable(len(made), boolean=True)
    r = cp.Variable(len(operations), boolean=True)
    constraints = []

    # What the backward reads is kept or made again:  s_v + r_prod(v) ≥ 1.
    # An operation that makes something else for its backward, which has no name:  r_e ≥ 1.
    read = sorted({v for op in operations for v in op.needs if v in column})
    opaque = sorted(op.id for op in operations if op.opaque_bytes)
    if read:
        producers = [row[_producer(graph, v)] for v in read]
        constraints.append(s[[column[v] for v in read]] + r[producers] >= 1)
    if opaque and bytes_bound is not None:
        constraints.append(r[[row[e] for e in opaque]] >= 1)

    # To run e again its inputs must be there:  r_e ≤ s_u + r_prod(u).
    edges = [
        (row[op.id], column[u], row[_producer(graph, u)])
        for op in operations
        for u in op.reads
        if u in column
    ]
    if edges:
        e, u, p = (list(x) for x in zip(*edges, strict=True))
        constraints.append(r[e] <= s[u] + r[p])
    # Where only fusible operations may run again:  r_e ≤ 0 for the others.
    barred = [row[op.id] for op in operations if not may_recompute(op.id)]
    if barred:
        constraints.append(r[barred] <= 0)

    # What is compared with its source is recomputed with it:  s_v ≤ 0.
    copies = [column[v] for v in made if graph.values[v].is_compared_copy]
    if copies and bytes_bound is not None:
        constraints.append(s[copies] <= 0)

    if bytes_bound is None:
        # Σ_v b_v s_v, and among equals the fewest operations.
        objective = megabytes @ s + 1e-6 * cp.sum(r)
    else:
        # Σ_e t_e r_e, and among equals the fewest bytes.
        objective = milliseconds @ r + 1e-6 * (megabytes @ s)
        if np.isfinite(bytes_bound):
            constraints.append(megabytes @ s <= bytes_bound / 2**20)
    outcome = solve(cp.Problem(cp.Minimize(objective), constraints), config)
    if outcome.status is Status.INFEASIBLE:
        return None
    assert s.value is not None and r.value is not None
    kept = tuple(v for v in made if s.value[column[v]] > 0.5)
    again = tuple(op.id for op in operations if r.value[row[op.id]] > 0.5)
    return SavedValues(
        values=kept,
        recomputed=again,
        kept_bytes=sum(graph.values[v].size_bytes for v in kept),
        recompute_s=sum(times_s[e] for e in again),
        outcome=outcome,
    )


def _producer(graph: Graph, value: int) -> int:
    producer = graph.values[value].producer
    assert producer is not None, "only values made inside the stretch have columns"
    return producer


def value_refs(graph: Graph, values: Sequence[int]) -> tuple[ValueRef, ...]:
    """The values as (operation, position) pairs, in program order."""
    refs = []
    for v in values:
        producer = _producer(graph, v)
        refs.append((producer, graph.operations[producer].outputs.index(v)))
    return tuple(sorted(refs))
