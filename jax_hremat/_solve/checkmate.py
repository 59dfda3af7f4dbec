"""The program of all operations: which to compute again and which values to keep, at every step.

Checkmate (Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization",
MLSys 2020). The schedule is divided into as many stages as there are operations: stage t ends with
the first computation of operation t, and before it may compute any earlier ones again, each once
and in the graph's order (the paper's frontier-advancing stages).

Glossary
  indices
    t           stages, 0 … n − 1
    i, k        operations, 0 … n − 1
    q           readers of the value of i, in order; k(i, q) is the q-th
  variables
    R_{t,k}     1 if k is computed in stage t, k ≤ t
    S_{t,i}     1 if the value of i is there when stage t begins, i < t; S_{n,i} at the end
    H_{t,i,q}   1 if the value of i is held in stage t until its q-th reader or longer, once it is
                there, k(i, q) ≤ t
    P           peak
  data
    c_k         seconds of k
    m_k, w_k    bytes of the value and of the workspace of k
    B           the limit

The paper's numbers of the equations stand at the constraints. Differences from the paper:

- Memory is counted by what is held, where the paper's U adds what is computed and subtracts what
  its FREE says is freed. A value is freed behind reader q − 1 if H_{t,i,q−1} = 1 and H_{t,i,q} = 0.
  Both forms have the same schedules, but FREE is a product of binaries, which the paper linearises,
  and H a maximum of them, which needs no more than its lower bounds. Its relaxation is tighter:
  HiGHS proves an optimum for 24 operations in 1 s that takes 38 s with FREE and U.
- A value that is there is not computed: R + S ≤ 1.
- What would be of no use is ruled out: computing again, or keeping, a value that is neither read in
  the stage nor kept after it.
- Operations may have a workspace, and some may be restricted to run once.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_hremat._solve.backend import Outcome, SolverConfig, Status, solve
from jax_hremat._solve.expressions import Term, Vector, at_most, equal, linear
from jax_hremat._solve.modelling import cp


@dataclass(frozen=True, slots=True)
class Operations:
    """What the program has to know of a graph.

    Attributes:
        reads: For each operation, the earlier ones whose values it reads.
        time_s: Seconds of each operation.
        output_bytes: Size of each operation's value.
        workspace_bytes: Further memory that each operation takes while it runs.
        results: Operations whose values must be there at the end.
        once: Operations that may not be computed again.
    """

    reads: Sequence[Sequence[int]]
    time_s: Sequence[float]
    output_bytes: Sequence[int]
    workspace_bytes: Sequence[int]
    results: Collection[int]
    once: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class Stages:
    """An answer of the program, or of its relaxation.

    Attributes:
        computed: R as an array, one row for each stage; None if there is no answer.
        kept: S as an array, with a further row for the end; None if there is no answer.
        outcome: What the solver proved; the objective is in passes, each of which takes the time of
            all operations once (`fastest_stages`), or in bytes (`lowest_stages`).
        bound: No stages have a lower objective.
    """

    computed: np.ndarray | None
    kept: np.ndarray | None
    outcome: Outcome
    bound: float


def fastest_stages(
    operations: Operations,
    limit_bytes: int,
    config: SolverConfig,
    *,
    relaxed: bool = False,
    may_be_undecided: bool = False,
) -> Stages:
    """The stages of least time whose peak is at most the limit.

    Args:
        operations: The graph.
        limit_bytes: Bound on the peak.
        config: The solver's limits.
        relaxed: Whether fractions are allowed, as in a linear program.
        may_be_undecided: Whether it is no error if the solver reaches the limit of nodes without
            an answer.

    Raises:
        SolverError: The solver failed, or reached the limit of nodes without an answer.
    """
    program = _Program(operations, relaxed)
    return program.solved(program.passes(), program.rows(limit_bytes), config, may_be_undecided)


def lowest_stages(operations: Operations, config: SolverConfig) -> Stages:
    """The stages of least peak.

    Raises:
        SolverError: The solver failed, or reached the limit of nodes without an answer.
    """
    program = _Program(operations, relaxed=False)
    share = cp.Variable(name="P", nonneg=True)
    answer = program.solved(share, program.rows(share), config)
    outcome = replace(answer.outcome, objective=answer.outcome.objective * program.most_bytes)
    return replace(answer, outcome=outcome, bound=answer.bound * program.most_bytes)


class _Program:
    """Variables and rows over one graph."""

    def __init__(self, operations: Operations, relaxed: bool) -> None:
        self._of = operations
        n = self._n = len(operations.reads)
        self.most_bytes = max(1, sum(operations.output_bytes) + max(operations.workspace_bytes))
        self._readers: list[list[int]] = [[] for _ in range(n)]
        for k, reads in enumerate(operations.reads):
            for i in reads:
                self._readers[i].append(k)
        self.computed = Vector.of("R", _pairs(n, diagonal=True), binary=not relaxed)
        self.kept = Vector.of("S", _pairs(n + 1, diagonal=False), binary=not relaxed)
        self._r, self._s = self.computed.places, self.kept.places
        held = ((t, i, q) for t, i in self._r for q, k in enumerate(self._readers[i]) if k <= t)
        self._held = Vector.of("H", held, binary=False)
        self._h = self._held.places
        self._vectors = {"r": self.computed, "s": self.kept, "h": self._held}

    def passes(self) -> Any:
        """Objective:  min Σ_{t,k} c_k R_{t,k}  (eq. 1a), in units of Σ_k c_k."""
        total_s = math.fsum(self._of.time_s) or 1.0
        cost = np.array([self._of.time_s[k] / total_s for _, k in self._r])
        return cost @ self.computed.variable

    def rows(self, limit: int | cp.Variable) -> list[Any]:
        """All constraints. The limit is in bytes, or a variable for the peak as a share of
        `most_bytes`."""
        return [*self._stage_rows(), *self._use_rows(), *self._held_rows(), *self._peak_rows(limit)]

    def _stage_rows(self) -> list[Any]:
        n, r, of = self._n, self._r, self._of
        # Stage t ends with operation t:  R_{t,t} = 1.  Some run only once:  R_{t,k} = 0, k < t.
        # Results are there at the end:  S_{n,i} = 1  (in place of eq. 1e).
        ends = [[(1, "r", (t, t))] for t in range(n)]
        ends += [[(1, "s", (n, i))] for i in sorted(of.results)]
        never = [[(1, "r", (t, k))] for t, k in r if k in of.once and k < t]
        # What k reads is there or is computed:  R_{t,k} ≤ R_{t,i} + S_{t,i}  (eq. 1b).
        # What is kept was there or was computed:  S_{t+1,i} ≤ S_{t,i} + R_{t,i}  (eq. 1c).
        after = [((1, "r", (t, k)), t, i) for t, k in r for i in of.reads[k]]
        after += [((1, "s", (t + 1, i)), t, i) for t, i in r]
        rows = [[one, (-1, "r", (t, i)), (-1, "s", (t, i))] for one, t, i in after]
        # A value that is there is not computed:  R_{t,i} + S_{t,i} ≤ 1.
        either = [[(1, "r", (t, i)), (1, "s", (t, i))] for t, i in r if i < t]
        return [
            *equal(self._vectors, ends, 1),
            *equal(self._vectors, never, 0),
            *at_most(self._vectors, rows, 0),
            *at_most(self._vectors, either, 1),
        ]

    def _use_rows(self) -> list[Any]:
        # What is computed again, or kept, is read in the stage or kept after it:
        #   R_{t,i} ≤ Σ_k R_{t,k} + S_{t+1,i},   S_{t,i} ≤ Σ_k R_{t,k} + S_{t+1,i}.
        rows: list[list[Term]] = []
        for t, i in self._r:
            if i < t:
                used: list[Term] = [(-1, "r", (t, k)) for k in self._readers[i] if k <= t]
                used.append((-1, "s", (t + 1, i)))
                rows += [[(1, name, (t, i)), *used] for name in ("r", "s")]
        return at_most(self._vectors, rows, 0)

    def _held_rows(self) -> list[Any]:
        # The value of i is held until its q-th reader if that one or a later one is computed in the
        # stage, or if it is kept after the stage:
        #   H_{t,i,q} ≥ R_{t,k(i,q)},   H_{t,i,q} ≥ H_{t,i,q+1},   behind the last q:  S_{t+1,i}.
        rows: list[list[Term]] = []
        for t, i, q in self._h:
            held = (-1, "h", (t, i, q))
            rows.append([(1, "r", (t, self._readers[i][q])), held])
            rows.append([self._holds(t, i, q + 1, 1), held])
        return at_most(self._vectors, rows, 0)

    def _holds(self, t: int, i: int, q: int, factor: float) -> Term:
        return (factor, "h", (t, i, q)) if (t, i, q) in self._h else (factor, "s", (t + 1, i))

    def _peak_rows(self, limit: int | cp.Variable) -> list[Any]:
        # When k is due in stage t, there are k itself if it is computed or kept, the earlier values
        # that are held for it or longer, and the later ones that are there from the beginning:
        #   (m_k + w_k) R_{t,k} + m_k S_{t,k} + Σ_{i<k} m_i H_{t,i,q(i,k)} + Σ_{i>k} m_i S_{t,i} ≤ B
        # with the first reader q(i, k) that is not before k. If k is not computed, this is what is
        # there between two computations, which is there in the next one too.
        size, workspace = self._of.output_bytes, self._of.workspace_bytes
        rows = []
        for t, k in self._r:
            row: list[Term] = [(size[k] + workspace[k], "r", (t, k))]
            row += [(size[i], "s", (t, i)) for i in range(k, t)]
            for i in range(k):
                q = bisect_left(self._readers[i], k)
                row.append(self._holds(t, i, q, size[i]))
            rows.append(row)
        peaks = linear(self._vectors, rows)
        if isinstance(limit, int):
            # All peaks are multiples of the greatest common divisor, so half of it more lets no
            # other peak in, and leaves the solver its tolerance.
            unit = max(1, math.gcd(*size, *workspace))
            return [peaks / (unit * (limit // unit + 0.5)) <= 1]
        return [peaks / self.most_bytes <= limit]

    def solved(
        self,
        objective: Any,
        rows: list[Any],
        config: SolverConfig,
        may_be_undecided: bool = False,
    ) -> Stages:
        """Solve, and read R and S off the variables."""
        problem = cp.Problem(cp.Minimize(objective), rows)
        outcome = solve(problem, config, may_be_undecided=may_be_undecided)
        if outcome.status in (Status.INFEASIBLE, Status.UNDECIDED):
            bound = math.inf if outcome.status is Status.INFEASIBLE else 0.0
            return Stages(None, None, outcome, bound)
        bound = outcome.objective * (1 - max(outcome.gap, _TOLERANCE))
        return Stages(
            self._array(self.computed),
            self._array(self.kept),
            outcome,
            bound,
        )

    def _array(self, vector: Vector) -> np.ndarray:
        assert vector.variable.value is not None
        array = np.zeros((self._n + 1, self._n))
        for index, place in vector.places.items():
            array[index] = vector.variable.value[place]
        return array


# The solver's tolerance, as a part of the objective.
_TOLERANCE = 1e-6


def _pairs(n: int, *, diagonal: bool) -> list[tuple[int, int]]:
    """All (t, i) with i ≤ t, or i < t, below n."""
    return [(t, i) for t in range(n) for i in range(t + diagonal)]
