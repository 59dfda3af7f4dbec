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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    leaf = _Leaf(graph, start, stop)
    # Objective:  min Σ_v b_v s_v; among equals the fewest operations recomputed.
    problem = cp.Problem(
        cp.Minimize(leaf.megabytes @ leaf.s + 1e-6 * cp.sum(leaf.r)),
        [*leaf.needed(), *leaf.sources(), *leaf.not_fusible()],
    )
    answer = leaf.answer(problem, config)
    return frozenset(leaf.made if answer is None else answer.kept)


def saved_value_sets(
    graph: Graph,
    start: int,
    stop: int,
    times_s: Mapping[int, float],
    config: SolverConfig,
    count: int,
) -> tuple[SavedValues, ...]:
    """Pareto-optimal sets of values to keep, from every useful value downwards; least recompute
    time first. Bounds for which the solver's limit is reached before a solution is found are left
    out.

    Args:
        graph: The program's graph.
        start: First operation of the range.
        stop: One past the last operation.
        times_s: Seconds of each operation of the range.
        config: The solver's limits.
        count: How many byte bounds to sweep.
    """
    leaf = _Leaf(graph, start, stop)
    milliseconds = np.array([times_s[op.id] * 1e3 for op in leaf.operations])
    kept_megabytes = leaf.megabytes @ leaf.s
    bound = cp.Parameter(nonneg=True)
    # Objective:  min Σ_e t_e r_e  subject to  Σ_v b_v s_v ≤ B; among equals the fewest bytes.
    problem = cp.Problem(
        cp.Minimize(milliseconds @ leaf.r + 1e-6 * kept_megabytes),
        [
            *leaf.needed(),
            *leaf.unnamed(),
            *leaf.sources(),
            *leaf.never_kept(),
            kept_megabytes <= bound,
        ],
    )

    def within(bound_bytes: float) -> SavedValues | None:
        bound.value = bound_bytes / 2**20
        answer = leaf.answer(problem, config)
        if answer is None:
            return None
        return SavedValues(
            values=answer.kept,
            recomputed=answer.recomputed,
            kept_bytes=sum(graph.values[v].size_bytes for v in answer.kept),
            recompute_s=sum(times_s[e] for e in answer.recomputed),
            outcome=answer.outcome,
        )

    fullest = within(sum(graph.values[v].size_bytes for v in leaf.made))
    if fullest is None:
        return ()
    answers: list[SavedValues] = []
    for step in range(count):
        bound_bytes = fullest.kept_bytes * (count - step) / count
        if answers and answers[-1].kept_bytes <= bound_bytes:
            # The best within more bytes is the best within fewer as well.
            continue
        answer = within(bound_bytes)
        if answer is not None and answer.values not in [a.values for a in answers]:
            answers.append(answer)
    return tuple(answers)


class _Answer(NamedTuple):
    """Ids of the values kept and of the operations recomputed, and what the solver proved."""

    kept: tuple[int, ...]
    recomputed: tuple[int, ...]
    outcome: Outcome


class _Leaf:
    """The variables of the leaf program of one range, and its families of constraints.

    Attributes:
        operations: The operations of the range.
        made: The values made inside it.
        megabytes: b_v of each of them.
        s: s_v for each of them.
        r: r_e for each operation.
    """

    def __init__(self, graph: Graph, start: int, stop: int) -> None:
        self.operations = graph.operations[start:stop]
        self.made = [v for op in self.operations for v in op.outputs]
        self.megabytes = np.array([graph.values[v].size_bytes / 2**20 for v in self.made])
        self.s = cp.Variable(len(self.made), boolean=True)
        self.r = cp.Variable(len(self.operations), boolean=True)
        self._graph = graph
        self._column = {v: i for i, v in enumerate(self.made)}
        self._row = {op.id: i for i, op in enumerate(self.operations)}

    def needed(self) -> list[cp.Constraint]:
        """A value that the backward reads is kept or recomputed:  s_v + r_prod(v) ≥ 1."""
        read = sorted({v for op in self.operations for v in op.needs if v in self._column})
        if not read:
            return []
        producers = [self._producer_row(v) for v in read]
        return [self.s[[self._column[v] for v in read]] + self.r[producers] >= 1]

    def unnamed(self) -> list[cp.Constraint]:
        """An operation is recomputed if its backward reads residuals that have no name, or compares
        its results with its inputs:  r_e ≥ 1."""
        opaque = [
            row for row, op in enumerate(self.operations) if op.opaque_bytes or op.compares_results
        ]
        return [self.r[opaque] >= 1] if opaque else []

    def sources(self) -> list[cp.Constraint]:
        """If e is recomputed, each value u it reads is kept or recomputed:
        r_e ≤ s_u + r_prod(u)."""
        edges = [
            (row, self._column[u], self._producer_row(u))
            for row, op in enumerate(self.operations)
            for u in op.reads
            if u in self._column
        ]
        if not edges:
            return []
        e, u, p = (list(x) for x in zip(*edges, strict=True))
        return [self.r[e] <= self.s[u] + self.r[p]]

    def not_fusible(self) -> list[cp.Constraint]:
        """An operation that is not fusible is not recomputed:  r_e = 0."""
        barred = [row for row, op in enumerate(self.operations) if not op.fusible]
        return [self.r[barred] <= 0] if barred else []

    def never_kept(self) -> list[cp.Constraint]:
        """A value that is compared with its source is recomputed together with it, not kept; one
        that is made of constants alone is made again:  s_v = 0."""
        values = self._graph.values
        never = [column for v, column in self._column.items() if _is_never_kept(values[v])]
        return [self.s[never] <= 0] if never else []

    def answer(self, problem: cp.Problem, config: SolverConfig) -> _Answer | None:
        """Solve a program of these variables; None if no solution is found."""
        outcome = solve(problem, config)
        if outcome.status in (Status.INFEASIBLE, Status.UNDECIDED):
            return None
        assert self.s.value is not None and self.r.value is not None
        return _Answer(
            kept=tuple(v for v, s in zip(self.made, self.s.value, strict=True) if s > 0.5),
            recomputed=tuple(
                op.id for op, r in zip(self.operations, self.r.value, strict=True) if r > 0.5
            ),
            outcome=outcome,
        )

    def _producer_row(self, value: int) -> int:
        return self._row[_producer(self._graph, value)]


def _is_never_kept(value: Value) -> bool:
    return value.is_compared or value.of_constants


def _producer(graph: Graph, value: int) -> int:
    producer = graph.values[value].producer
    assert producer is not None, "only values made inside the range have columns"
    return producer


def value_refs(graph: Graph, values: Sequence[int]) -> tuple[ValueRef, ...]:
    """The values that may be kept, as (operation, position) pairs, in program order."""
    refs = []
    for v in values:
        if _is_never_kept(graph.values[v]):
            continue
        producer = _producer(graph, v)
        refs.append((producer, graph.operations[producer].outputs.index(v)))
    return tuple(sorted(refs))
