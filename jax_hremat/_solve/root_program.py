"""The root program: one option for every block, and which blocks are checkpointed together.

A schedule partitions the chain into columns. A column is a block in one of its options, or a group
of blocks, one option each, checkpointed together in one `jax.checkpoint` (`_solve/groups.py`).

Glossary
  indices
    k           blocks in program order
    p           columns; p ∋ k if column p contains block k; p holds v as of k if it holds v, from
                the forward on, for the backward of block k
    v           boundary values: made in one block, read in later ones
  variables
    x_p         1 if column p is in the schedule
    h_{v,k}     1 if v is held, from its forward, for the backward of some block ≤ k
    s_k         bytes kept before block k for later backwards: by the columns before block k, and
                by held values that are last read before block k
    P           peak bytes, arguments and outputs not counted
    u           bytes by which the relaxation exceeds the limit, at a price
  data
    T_p, K_p    ms that p adds; bytes that p keeps (a group: constants, and values of its blocks)
    A_{p,k}     peak of the forward of block k in p, plus what p keeps of the blocks before k
    B_p         peak of the backward of p, including the cotangents pending there
    b_v         bytes of v
    F_k, G_k    bytes that output-buffer reuse saves in the forward and in the backward of block k

The peak rows are Checkmate's memory accounting (MLSys 2020, eq. 3), restricted to the schedules
that nested checkpoints can express: one row for each block's forward and one for its backward
(rotor's persistent schedules, Beaumont et al. 2020, with skip values). There are too many groups
to list, so the duals of the relaxation price them (column generation, Gilmore and Gomory 1961).
Only the groups that a schedule better than the best known one may contain enter the integer
program.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_hremat._solve.backend import Outcome, SolverConfig, Status, solve
from jax_hremat._solve.chain import Chain, Selection
from jax_hremat._solve.column import MIB, Column, Prices
from jax_hremat._solve.groups import Groups, single_columns
from jax_hremat._solve.modelling import cp, sp
from jax_hremat._solve.output_reuse import NO_REUSE, Result, ReusedBytes, ReusedParts
from jax_hremat._solve.prediction import predict
from jax_hremat._solve.reuse_rows import Reuse, reuse_rows

# The most groups that enter the relaxation in one round of pricing, and the most rounds.
_MAX_PRICED = 200
_MAX_ROUNDS = 60
# A reduced cost between minus this many ms and zero counts as zero.
ZERO_MS = 1e-7


@dataclass(frozen=True, slots=True)
class Schedule:
    """An answer of the root program.

    Attributes:
        selection: The options and groups chosen; None if the budget is infeasible or the solver
            reached its limit first.
        outcome: What the solver proved. The objective is in ms over the fastest options
            (`fastest_within`), or in MiB without arguments and outputs (`least_peak`); the gap
            is relative to the whole time, or to that peak.
        bound_s: No schedule of these options and groups within the peak takes less predicted time
            (`fastest_within`).
    """

    selection: Selection | None
    outcome: Outcome
    bound_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The columns of the best schedule found (None if there is none), its objective, and a proven
    lower bound."""

    columns: tuple[Column, ...] | None
    objective: float
    lower: float
    solve_s: float

    @property
    def undecided(self) -> bool:
        """Whether the solver found neither a schedule nor a proof that there is none."""
        return self.columns is None and self.lower < math.inf

    def improved(self, other: Answer) -> Answer:
        """The better of the two answers."""
        best = other if other.objective < self.objective else self
        return replace(best, solve_s=self.solve_s + other.solve_s)

    def bounded(self, lower: float) -> Answer:
        """The same answer with a lower bound that holds for all schedules."""
        return replace(self, lower=min(lower, self.objective))


class RootProgram:
    """Variables and rows over one chain."""

    def __init__(self, chain: Chain, config: SolverConfig, reused: ReusedBytes = NO_REUSE) -> None:
        self.chain = chain
        nothing = (0,) * len(chain)
        self._reused_forward_mib = np.array(reused.forward or nothing) / MIB
        self._reused_backward_mib = np.array(reused.backward or nothing) / MIB
        self.most_reused_bytes = max((0, *reused.forward, *reused.backward))
        self.singles = single_columns(chain)
        self.base_ms = 1e3 * sum(min(o.cost.time_s for o in opts) for opts in chain.options)
        self.gap_ms = config.relative_gap * self.base_ms
        slowest = [max(o.cost.time_s for o in opts) for opts in chain.options]
        # No schedule adds more than this.
        self.most_ms = 1e3 * (sum(slowest) + sum(chain.recompute_s)) - self.base_ms
        self._config = config
        # Positions in h: for each value, the blocks from its producer to its last reader.
        keys = [
            (v, k)
            for v, c in enumerate(chain.boundary_values)
            for k in range(c.producer, c.readers[-1] + 1)
        ]
        self._held = {key: column for column, key in enumerate(keys)}
        self._known_mib, self._held_there, self._held_on = self._value_rows()

    @functools.cached_property
    def groups(self) -> Groups:
        """The groups of the chain, listed where a program with groups is solved."""
        return Groups(self.chain)

    def peak_bytes(self, columns: Sequence[Column]) -> int:
        """The predicted peak, arguments and outputs not counted."""
        return predict(self.chain, selection_of(columns)).peak_bytes - self.chain.fixed_bytes

    def schedule(self, answer: Answer, offset: float = 0.0) -> Schedule:
        """The answer as a schedule, its gap relative to the sum of objective and offset."""
        if answer.columns is None:
            status = Status.UNDECIDED if answer.undecided else Status.INFEASIBLE
            return Schedule(None, Outcome(status, math.inf, 0.0, answer.solve_s))
        whole = max(answer.objective + offset, 1e-12)
        gap = max(answer.objective - answer.lower, 0.0) / whole
        proven = gap <= self._config.relative_gap + 1e-6
        status = Status.OPTIMAL if proven else Status.LIMIT
        outcome = Outcome(status, answer.objective, gap, answer.solve_s)
        return Schedule(selection_of(answer.columns), outcome)

    def fastest(
        self,
        columns: Sequence[Column],
        limit_bytes: int,
        below_ms: float = math.inf,
        *,
        gap_ms: float | None = None,
        reuse: tuple[Sequence[Result], ReusedParts] | None = None,
    ) -> Answer:
        """The schedule of least added time within the peak limit, if that time is at most
        `below_ms`; parts of what the rows for some results allow are reused."""
        x, h = self._variables(columns, boolean=True)
        # Objective:  min Σ_p T_p x_p.
        added = np.array([p.added_ms for p in columns]) @ x
        rows = None
        if reuse is not None:
            results, parts = reuse
            allowed = reuse_rows(self.chain, results, columns, x, tuple(self._held), h)
            rows = allowed.scaled(parts.forward, parts.backward)
        constraints, _ = self._constraints(columns, x, h, limit_bytes / MIB, rows)
        if math.isfinite(below_ms):
            constraints.append(added <= below_ms)
        gap_ms = self.gap_ms if gap_ms is None else gap_ms
        return self._answer(added, constraints, columns, x, gap_ms)

    def lowest(self, columns: Sequence[Column], limit_bytes: float) -> Answer:
        """The schedule of least peak P, if that is at most the limit."""
        x, h = self._variables(columns, boolean=True)
        peak = cp.Variable(name="P", nonneg=True)
        constraints, _ = self._constraints(columns, x, h, peak)
        if math.isfinite(limit_bytes):
            constraints.append(peak <= limit_bytes / MIB)
        return self._answer(peak, constraints, columns, x, 0.0)

    def price(self, limit_bytes: int) -> tuple[float, Prices, list[Column]] | None:
        """A lower bound on the time added by any schedule, what the rows charge a column, and the
        columns of the relaxation; None if the solver did not solve the relaxation.

        The relaxation may exceed the limit at a price, so it has a solution and duals for every
        limit.
        """
        columns = list(self.singles)
        known = set(columns)
        penalty = 1e3 * self.most_ms / (limit_bytes / MIB)
        most = max(len(self.chain) // 2, 1)
        # A schedule has at most `most` groups, and each lowers the relaxation's value by at most
        # the most negative reduced cost. So columns of reduced costs above −`fine`, which would
        # change the bound by at most 0.3 of the gap, are not added.
        fine = max(0.3 * self.gap_ms / most, ZERO_MS)
        coarse = self.most_ms
        most_bytes = limit_bytes + self.most_reused_bytes

        def unknown(some: Sequence[Column], prices: Prices) -> list[tuple[float, Column]]:
            return [(prices.reduced_ms(p), p) for p in some if p not in known]

        rounds = 0
        while True:
            rounds += 1
            relaxed = self._relaxed(columns, limit_bytes / MIB, penalty)
            if relaxed is None:
                return None
            value, prices = relaxed
            # The groups that the chain lists are all priced at once. Of the other groups those of
            # the most negative reduced cost are quick to find; the rest are looked for once there
            # are no more. The last round considers all groups, for the bound.
            listed = self.groups.listed_columns(most_bytes, prices, -fine)
            found = unknown(listed, prices) if rounds < _MAX_ROUNDS else []
            while not found:
                worth_ms = -coarse if coarse > fine else -ZERO_MS
                every = self.groups.columns(most_bytes, prices=prices, worth_ms=worth_ms)
                found = unknown(every, prices)
                if coarse <= fine:
                    break
                if not found:
                    coarse = max(fine, coarse / 4)
            found.sort(key=lambda f: (f[0], f[1].first, f[1].last, f[1].options))
            wanted = [p for reduced_ms, p in found[:_MAX_PRICED] if reduced_ms <= -fine]
            if not wanted or rounds == _MAX_ROUNDS:
                least_ms = found[0][0] if found else 0.0
                return value + (least_ms - ZERO_MS) * most, prices, columns
            columns += wanted
            known.update(wanted)

    def _relaxed(
        self, columns: Sequence[Column], limit_mib: float, penalty: float
    ) -> tuple[float, Prices] | None:
        x, h = self._variables(columns, boolean=False)
        excess = cp.Variable(nonneg=True, name="u")
        constraints, rows = self._constraints(columns, x, h, limit_mib + excess)
        # Objective:  min Σ_p T_p x_p + c u, where c is the price of a MiB above the limit.
        added = np.array([p.added_ms for p in columns]) @ x
        problem = cp.Problem(cp.Minimize(added + penalty * excess), constraints)
        outcome = solve(problem, self._config, may_be_undecided=True)
        if outcome.status is not Status.OPTIMAL:
            return None
        cover, hold, forward, backward = (
            np.atleast_1d(np.asarray(r.dual_value, float)) for r in rows
        )
        prices = Prices(
            cover=tuple(cover.tolist()),
            forward=tuple(np.maximum(forward, 0).tolist()),
            backward=tuple(np.maximum(backward, 0).tolist()),
            hold={key: max(float(hold[c]), 0.0) for key, c in self._held.items()},
        )
        return outcome.objective, prices

    def _variables(
        self, columns: Sequence[Column], *, boolean: bool
    ) -> tuple[cp.Variable, cp.Variable]:
        x = cp.Variable(len(columns), name="x", boolean=boolean, nonneg=not boolean)
        return x, cp.Variable(max(len(self._held), 1), nonneg=True, name="h")

    def _constraints(
        self,
        columns: Sequence[Column],
        x: cp.Variable,
        h: cp.Variable,
        peak: cp.Expression | float,
        reuse: Reuse | None = None,
    ) -> tuple[list[cp.Constraint], tuple[cp.Constraint, ...]]:
        """All rows, and the four families whose duals price columns: cover, hold, forward,
        backward."""
        n = len(self.chain)
        covered, held, kept, forward, backward = (_Entries() for _ in range(5))
        for i, p in enumerate(columns):
            for k, own in zip(range(p.first, p.last + 1), p.forward_bytes, strict=True):
                covered.add(k, i, 1.0)
                forward.add(k, i, own / MIB)
                backward.add(k, i, p.backward_bytes / MIB)
            for key in p.holds:
                held.add(self._held[key], i, 1.0)
            if p.last + 1 < n:
                kept.add(p.last + 1, i, p.kept_bytes / MIB)
        width = len(columns)
        s = cp.Variable(n, name="s")
        saved: tuple[Any, Any] = (self._reused_forward_mib, self._reused_backward_mib)
        if reuse is not None:
            saved = (saved[0] + reuse.forward, saved[1] + reuse.backward)
        # cvxpy's operators are typed as booleans, so `Any`.
        rows: tuple[Any, ...] = (
            # cover: each block is in exactly one column,  Σ_{p ∋ k} x_p = 1.
            covered.matrix(n, width) @ x == 1,
            # hold: v is held as of block k if a chosen column holds it as of k,
            #   h_{v,k} ≥ Σ_{p holds v as of k} x_p.
            h >= held.matrix(h.size, width) @ x,
            # forward: what is kept before block k, the forward's own peak, and the values made
            # before k and still to be read fit within the peak,
            #   s_k + Σ_{p ∋ k} A_{p,k} x_p + Σ_{v made before k, read from k on} b_v ≤ P + F_k.
            s + forward.matrix(n, width) @ x + self._known_mib <= peak + saved[0],
            # backward: likewise for the backward of the column that contains block k,
            #   s_k + Σ_{p ∋ k} B_p x_p + Σ_{v made up to k, read from k on} b_v h_{v,k} ≤ P + G_k.
            s + backward.matrix(n, width) @ x + self._held_there @ h <= peak + saved[1],
        )
        constraints: list[cp.Constraint] = [*rows, *(() if reuse is None else reuse.rows)]
        # stock: s_k adds up what the columns before block k keep, and the held values whose last
        # reader is before k,
        #   s_0 = 0,  s_k = s_{k−1} + Σ_{p ends at k−1} K_p x_p + Σ_{v last read in k−1} b_v h_v.
        before = sp.eye_array(n, format="csr") - sp.eye_array(n, k=-1, format="csr")
        stock: Any = before @ s == kept.matrix(n, width) @ x + self._held_on @ h
        constraints.append(stock)
        # monotone: held for some block ≤ k − 1 implies held for some block ≤ k,
        #   h_{v,k} ≥ h_{v,k−1}.
        steps = [
            (c, self._held[v, k - 1])
            for (v, k), c in self._held.items()
            if (v, k - 1) in self._held
        ]
        if steps:
            later, earlier = (list(c) for c in zip(*steps, strict=True))
            constraints.append(h[later] >= h[earlier])
        return constraints, rows

    def _value_rows(self) -> tuple[np.ndarray, sp.csr_matrix, sp.csr_matrix]:
        """Coefficients of boundary values in the rows of each block k, in MiB: of the values that
        wait in the forward row (a constant), of h in the backward row, and of h in the stock row
        (the held values whose last reader is block k − 1)."""
        n = len(self.chain)
        known, there, on = np.zeros(n), _Entries(), _Entries()
        for v, c in enumerate(self.chain.boundary_values):
            last, size_mib = c.readers[-1], c.size_bytes / MIB
            known[c.producer + 1 : last + 1] += size_mib
            for k in range(c.producer, last + 1):
                there.add(k, self._held[v, k], size_mib)
            if last + 1 < n:
                on.add(last + 1, self._held[v, last], size_mib)
        width = max(len(self._held), 1)
        return known, there.matrix(n, width), on.matrix(n, width)

    def _answer(
        self,
        objective: cp.Expression,
        constraints: list[cp.Constraint],
        columns: Sequence[Column],
        x: cp.Variable,
        gap: float,
    ) -> Answer:
        problem = cp.Problem(cp.Minimize(objective), constraints)
        outcome = solve(problem, self._config, absolute_gap=gap, may_be_undecided=True)
        if outcome.status is Status.INFEASIBLE:
            return Answer(None, math.inf, math.inf, outcome.solve_s)
        if outcome.status is Status.UNDECIDED:
            return Answer(None, math.inf, 0.0, outcome.solve_s)
        assert x.value is not None
        chosen = tuple(p for p, on in zip(columns, x.value, strict=True) if on > 0.5)
        lower = outcome.objective - outcome.gap * abs(outcome.objective)
        return Answer(chosen, outcome.objective, lower, outcome.solve_s)


class _Entries:
    """Entries of a sparse matrix, collected one by one."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []

    def add(self, row: int, column: int, value: float) -> None:
        self._rows.append(row)
        self._columns.append(column)
        self._values.append(value)

    def matrix(self, height: int, width: int) -> sp.csr_matrix:
        where = (self._rows, self._columns)
        return sp.csr_matrix((self._values, where), shape=(height, width))


def selection_of(columns: Sequence[Column]) -> Selection:
    ordered = sorted(columns, key=lambda p: p.first)
    return Selection(
        options=tuple(o for p in ordered for o in p.options),
        groups=tuple(
            group for p in ordered if p.last > p.first for group in ((p.first, p.last), *p.inner)
        ),
        keeps=tuple(keep for p in ordered for keep in p.keeps),
    )
