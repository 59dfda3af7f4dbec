"""The program of all operations: which to compute again and which values to keep, at every step.

Checkmate (Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization",
MLSys 2020). The schedule is divided into as many stages as there are operations: stage t ends with
the first computation of operation t, and before it may compute any earlier ones again, each once
and in the graph's order (the paper's frontier-advancing stages). Stages may also be said to end
with the first computations of several operations, so that there are fewer of them.

Glossary
  indices
    t           stages, 0 … T − 1
    i, k        operations, 0 … n − 1
    a_t, z_t    first and last operation that stage t computes for the first time; unless stages
                are given, both are t
    q           readers of the value of i, in order; k(i, q) is the q-th
  variables
    R_{t,k}     1 if k is computed in stage t, k ≤ z_t
    S_{t,i}     1 if the value of i is there when stage t begins, i < a_t; S_{T,i} at the end
    H_{t,i,q}   1 if the value of i is held in stage t until its q-th reader or longer, once it is
                there, k(i, q) ≤ z_t
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
- Operations may have a workspace, some may be restricted to run once, and some to be computed only
  in stages that compute another operation too, which makes their values beside its own.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jax_hremat._solve.backend import Outcome, SolverConfig, Status, solve, undecided
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
        part_of: For an operation whose value an earlier one makes beside its own, that one: no
            stage computes the former without the latter.
        ends: The last operation of each stage, in order; every operation if empty.
    """

    reads: Sequence[Sequence[int]]
    time_s: Sequence[float]
    output_bytes: Sequence[int]
    workspace_bytes: Sequence[int]
    results: Collection[int]
    once: Collection[int] = ()
    part_of: Mapping[int, int] = field(default_factory=dict)
    ends: Sequence[int] = ()

    @property
    def stages(self) -> list[range]:
        """What each stage computes for the first time."""
        ends = self.ends or range(len(self.reads))
        starts = (0, *(end + 1 for end in ends))
        return [range(start, end + 1) for start, end in zip(starts, ends, strict=False)]


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
) -> Stages:
    """The stages of least time whose peak is at most the limit.

    Args:
        operations: The graph.
        limit_bytes: Bound on the peak.
        config: The solver's limits.
        relaxed: Whether fractions are allowed, as in a linear program.

    Raises:
        SolverError: The solver failed.
    """
    program = _Program(operations, relaxed)
    return program.solved(program.passes(), program.rows(limit_bytes), config)


def lowest_stages(operations: Operations, config: SolverConfig) -> Stages:
    """The stages of least peak.

    Raises:
        SolverError: The solver failed, or reached the limit of nodes without an answer.
    """
    program = _Program(operations, relaxed=False)
    share = cp.Variable(name="P", nonneg=True)
    answer = program.solved(share, program.rows(share), config)
    if answer.outcome.status is Status.UNDECIDED:
        raise undecided(config)
    outcome = replace(answer.outcome, objective=answer.outcome.objective * program.most_bytes)
    return replace(answer, outcome=outcome, bound=answer.bound * program.most_bytes)


class _Program:
    """Variables and rows over one graph."""

    def __init__(self, operations: Operations, relaxed: bool) -> None:
        self._of = operations
        n = self._n = len(operations.reads)
        self.most_bytes = max(1, sum(operations.output_bytes) + max(operations.workspace_bytes))
        self._stages = operations.stages
        self._readers: list[list[int]] = [[] for _ in range(n)]
        for k, reads in enumerate(operations.reads):
            for i in reads:
                self._readers[i].append(k)
        computed = ((t, k) for t, new in enumerate(self._stages) for k in range(new.stop))
        before = [new.start for new in self._stages] + [n]
        kept = ((t, i) for t, start in enumerate(before) for i in range(start))
        self.computed = Vector.of("R", computed, binary=not relaxed)
        self.kept = Vector.of("S", kept, binary=not relaxed)
        self._r, self._s = self.computed.places, self.kept.places
        held = (
            (t, i, q)
            for t, i in self._r
            for q, k in enumerate(self._readers[i])
            if k < self._stages[t].stop
        )
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
        r, s, of = self._r, self._s, self._of
        # Stage t ends with its operations:  R_{t,k} = 1, k ≥ a_t.  Some run only once:
        # R_{t,k} = 0, k < a_t.  Results are there at the end:  S_{T,i} = 1  (in place of eq. 1e).
        ends = [[(1, "r", (t, k))] for t, k in r if (t, k) not in s]
        ends += [[(1, "s", (len(self._stages), i))] for i in sorted(of.results)]
        never = [[(1, "r", (t, k))] for t, k in r if k in of.once and (t, k) in s]
        # What k reads is there or is computed:  R_{t,k} ≤ R_{t,i} + S_{t,i}  (eq. 1b).
        # What is kept was there or was computed:  S_{t+1,i} ≤ S_{t,i} + R_{t,i}  (eq. 1c).
        after = [((1, "r", (t, k)), t, i) for t, k in r for i in of.reads[k]]
        after += [((1, "s", (t + 1, i)), t, i) for t, i in r]
        rows = [[one, (-1, "r", (t, i)), (-1, "s", (t, i))] for one, t, i in after]
        # A value that is there is not computed:  R_{t,i} + S_{t,i} ≤ 1.
        either = [[(1, "r", (t, i)), (1, "s", (t, i))] for t, i in r if (t, i) in s]
        # A part is computed only with the whole:  R_{t,k} ≤ R_{t,part_of(k)}.
        parts = ((t, k, of.part_of[k]) for t, k in r if k in of.part_of)
        rows += [[(1, "r", (t, k)), (-1, "r", (t, whole))] for t, k, whole in parts]
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
            if (t, i) in self._s:
                readers = (k for k in self._readers[i] if k < self._stages[t].stop)
                used: list[Term] = [(-1, "r", (t, k)) for k in readers]
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
            if k in self._of.once and (t, k) in self._s:
                continue
            row: list[Term] = [(size[k] + workspace[k], "r", (t, k))]
            row += [(size[i], "s", (t, i)) for i in range(k, self._stages[t].start)]
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

    def solved(self, objective: Any, rows: list[Any], config: SolverConfig) -> Stages:
        """Solve, and read R and S off the variables."""
        problem = cp.Problem(cp.Minimize(objective), rows)
        outcome = solve(problem, config)
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
        array = np.zeros((len(self._stages) + 1, self._n))
        for index, place in vector.places.items():
            array[index] = vector.variable.value[place]
        return array


# The solver's tolerance, as a part of the objective.
_TOLERANCE = 1e-6
