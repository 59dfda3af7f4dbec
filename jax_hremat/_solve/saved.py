"""The leaf program: which values to keep of one checkpointed range of operations.

Glossary
  indices
    v, u    values made inside the range
    e       operations of the range; prod(v) is the operation that makes v
  variables
    s_v     1 if v is kept between forward and backward
    r_e     1 if e is recomputed in the backward
  data
    b_v     bytes of v
    t_e     seconds of e

It models the backward of `jax.checkpoint(policy=save_only_these_names(S))`: what the backward reads
and S does not contain is recomputed from what is kept (design of Checkmate, MLSys 2020, eqs. 1b-1d,
with one recompute stage).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jax_hremat._plan.region import ValueRef
from jax_hremat._solve.backend import Outcome, SolverConfig, Status, solve
from jax_hremat._solve.modelling import cp
from jax_hremat._trace.graph import Graph, Value


@dataclass(frozen=True, slots=True)
class SavedValues:
    """One answer of the leaf program.

    Attributes:
        values: Ids of the values kept.
        recomputed: Ids of the operations recomputed.
        kept_bytes: Bytes of the values kept.
        recompute_s: Seconds of the operations recomputed.
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
    """The values XLA would keep if the range were plain: the fewest bytes from which fusible
    operations recompute everything that the backward reads; every value, if the solver's limit is
    reached before a solution is found."""
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
    if answer is None:
        return frozenset(v for op in graph.operations[start:stop] for v in op.outputs)
    return frozenset(answer.values)


def saved_value_sets(
    graph: Graph, start: int, stop: int, times_s: Sequence[float], config: SolverConfig, count: int
) -> tuple[SavedValues, ...]:
    """Pareto-optimal sets of values to keep, from every useful value downwards; least recompute
    time first. Bounds for which the solver's limit is reached before a solution is found are left
    out.

    Args:
        graph: The program's graph.
        start: First operation of the range.
        stop: One past the last operation.
        times_s: Seconds of every operation of the program.
        config: The solver's limits.
        count: How many byte bounds to sweep.
    """
    fullest = _solve(
        graph, start, stop, times_s, config, may_recompute=lambda _: True, bytes_bound=float("inf")
    )
    if fullest is None:
        return ()
    answers: list[SavedValues] = []
    for step in range(count):
        bound = fullest.kept_bytes * (count - step) / count
        if answers and answers[-1].kept_bytes <= bound:
            # The best within more bytes is the best within fewer as well.
            continue
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

    # A value that the backward reads is kept or recomputed:  s_v + r_prod(v) ≥ 1.
    # An operation is recomputed if its backward reads residuals that have no name, or compares its
    # results with its inputs:  r_e ≥ 1.
    read = sorted({v for op in operations for v in op.needs if v in column})
    opaque = sorted(op.id for op in operations if op.opaque_bytes or op.compares_results)
    if read:
        producers = [row[_producer(graph, v)] for v in read]
        constraints.append(s[[column[v] for v in read]] + r[producers] >= 1)
    if opaque and bytes_bound is not None:
        constraints.append(r[[row[e] for e in opaque]] >= 1)

    # If e is recomputed, each value u it reads is kept or recomputed:  r_e ≤ s_u + r_prod(u).
    edges = [
        (row[op.id], column[u], row[_producer(graph, u)])
        for op in operations
        for u in op.reads
        if u in column
    ]
    if edges:
        e, u, p = (list(x) for x in zip(*edges, strict=True))
        constraints.append(r[e] <= s[u] + r[p])
    # An operation that may not be recomputed:  r_e = 0.
    barred = [row[op.id] for op in operations if not may_recompute(op.id)]
    if barred:
        constraints.append(r[barred] <= 0)

    # A value that is compared with its source is recomputed together with it, not kept; one that is
    # made of constants alone is made again:  s_v = 0.
    never = [column[v] for v in made if _is_never_kept(graph.values[v])]
    if never and bytes_bound is not None:
        constraints.append(s[never] <= 0)

    if bytes_bound is None:
        # Objective:  min Σ_v b_v s_v; among equals the fewest operations recomputed.
        objective = megabytes @ s + 1e-6 * cp.sum(r)
    else:
        # Objective:  min Σ_e t_e r_e  subject to  Σ_v b_v s_v ≤ B; among equals the fewest bytes.
        objective = milliseconds @ r + 1e-6 * (megabytes @ s)
        if np.isfinite(bytes_bound):
            constraints.append(megabytes @ s <= bytes_bound / 2**20)
    problem = cp.Problem(cp.Minimize(objective), constraints)
    outcome = solve(problem, config, may_be_undecided=True)
    if outcome.status in (Status.INFEASIBLE, Status.UNDECIDED):
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


def _is_never_kept(value: Value) -> bool:
    return value.is_compared_copy or value.of_constants


def _producer(graph: Graph, value: int) -> int:
    producer = graph.values[value].producer
    assert producer is not None, "only values made inside the range have columns"
    return producer


def value_refs(graph: Graph, values: Sequence[int]) -> tuple[ValueRef, ...]:
    """The values as (operation, position) pairs, in program order."""
    refs = []
    for v in values:
        producer = _producer(graph, v)
        refs.append((producer, graph.operations[producer].outputs.index(v)))
    return tuple(sorted(refs))
