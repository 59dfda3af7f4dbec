"""One option for every block, and which blocks are wrapped together: the root program.

Glossary
    k, j        blocks in program order; o an option of a block
    g = (a, b)  a candidate group: blocks a … b wrapped together in one `jax.checkpoint`
    v           a value that crosses a boundary; p(v) the block that makes it
    x_{k,o}     1 if block k runs in option o
    y_g         1 if group g is wrapped
    q_{k,o}     x_{k,o} · [k is in a wrapped group]; top_{k,o} = x_{k,o} − q_{k,o}
    h_{v,k}     1 if v is held, from its forward, for the backward of some block ≤ k
    i_{v,k}     1 if v is held, from its group's recompute, for the backward of a block ≤ k
    P           peak bytes, arguments and outputs left out
    T_{k,o}     seconds; F_k seconds of one more forward; K_{k,o} bytes kept
    B_{k,o}, A_{k,o}  peak of the backward and of the forward
    W_k         pending cotangents at the backward of block k

The peak rows are Checkmate's memory accounting (MLSys 2020, eq. 3) for the schedules a nest of
checkpoints can express: one row for each block's forward and backward (rotor's persistent
schedules, Beaumont et al. 2020, with skip values).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cvxpy as cp
import numpy as np
import scipy.sparse as sp

from jax_hremat._chain import Chain, Selection
from jax_hremat._solve.backend import Outcome, SolverConfig, Status, solve

_MIB = 2.0**20
_MAX_GROUP = 8


@dataclass(frozen=True, slots=True)
class Schedule:
    """An answer of the root program.

    Attributes:
        selection: The options and groups chosen; None if the budget is infeasible.
        outcome: What the solver proved.
    """

    selection: Selection | None
    outcome: Outcome


def fastest_within(
    chain: Chain, peak_bytes: int, config: SolverConfig, *, groups: bool = True
) -> Schedule:
    """Least step time whose predicted peak is at most `peak_bytes`.

    Args:
        chain: Blocks and their options.
        peak_bytes: Bound on the predicted peak.
        config: The solver's limits.
        groups: Whether consecutive blocks may be wrapped together.
    """
    program = _Program(chain, groups)
    limit = (peak_bytes - chain.fixed_bytes) / _MIB
    # Σ_k Σ_o T_{k,o} x_{k,o} + Σ_k F_k [k in a group], constant left out.
    problem = cp.Problem(
        cp.Minimize(program.added_ms), [*program.constraints, program.peak_mib <= limit]
    )
    outcome = solve(problem, config, absolute_gap=config.relative_gap * program.base_ms)
    return Schedule(program.selection() if _solved(outcome) else None, outcome)


def least_peak(chain: Chain, config: SolverConfig, *, groups: bool = True) -> Schedule:
    """Least predicted peak, whatever the time (of equal peaks, nearly the fastest)."""
    program = _Program(chain, groups)
    tie_break = 1e-3 * program.added_ms / max(program.base_ms, 1e-9)
    problem = cp.Problem(cp.Minimize(program.peak_mib + tie_break), program.constraints)
    outcome = solve(problem, config)
    return Schedule(program.selection() if _solved(outcome) else None, outcome)


def _solved(outcome: Outcome) -> bool:
    return outcome.status is not Status.INFEASIBLE


class _Program:
    """Variables and constraints over one chain."""

    def __init__(self, chain: Chain, groups: bool) -> None:
        self._chain = chain
        self._pairs = [(k, o) for k, opts in enumerate(chain.options) for o in range(len(opts))]
        self._groups = _candidate_groups(chain) if groups else []
        costs = [chain.options[k][o].cost for k, o in self._pairs]
        fastest = [min(o.cost.time_s for o in opts) for opts in chain.options]
        slack_ms = np.array(
            [(c.time_s - fastest[k]) * 1e3 for (k, _), c in zip(self._pairs, costs, strict=True)]
        )
        self._kept = np.array([c.kept_bytes / _MIB for c in costs])
        self._forward = np.array([c.forward_peak_bytes / _MIB for c in costs])
        self._backward = np.array([c.backward_peak_bytes / _MIB for c in costs])
        self.base_ms = sum(fastest) * 1e3

        self.x = cp.Variable(len(self._pairs), boolean=True, name="x")
        self.y = cp.Variable(len(self._groups), boolean=True, name="y") if self._groups else None
        self.q = cp.Variable(len(self._pairs), nonneg=True, name="q") if self._groups else None
        self.peak_mib = cp.Variable(name="P", nonneg=True)

        self._of_block = _incidence([k for k, _ in self._pairs], len(chain))
        self._cover = _cover(self._groups, len(chain))
        self.constraints: list[cp.Constraint] = []
        self._choose()
        self._hold()
        self._forward_peaks()
        self._backward_peaks()
        self.added_ms = slack_ms @ self.x
        if self.y is not None:
            recompute_ms = np.array(chain.recompute_s) * 1e3
            self.added_ms += (recompute_ms @ self._cover) @ self.y

    @property
    def _top(self) -> cp.Expression:
        return self.x if self.q is None else self.x - self.q

    def _choose(self) -> None:
        # One option for each block:  Σ_o x_{k,o} = 1.
        self.constraints.append(self._of_block @ self.x == 1)
        if self.y is None or self.q is None:
            return
        # A block is in at most one group:  in_k = Σ_{g ∋ k} y_g ≤ 1.
        inside = self._cover @ self.y
        self.constraints.append(inside <= 1)
        # q_{k,o} = x_{k,o} · in_k:  q ≤ x,  Σ_o q_{k,o} = in_k.
        self.constraints += [self.q <= self.x, self._of_block @ self.q == inside]

    def _hold(self) -> None:
        """h and i: one column for each (v, k) with k from p(v) to the last block that may need
        v; later blocks see the last column."""
        chain = self._chain
        self._columns: list[dict[int, int]] = []
        count = 0
        for crossing in chain.crossings:
            blocks = range(crossing.producer, crossing.readers[-1] + 1)
            self._columns.append({k: count + n for n, k in enumerate(blocks)})
            count += len(blocks)
        self.h = cp.Variable(max(count, 1), nonneg=True, name="h")
        self.i = cp.Variable(max(count, 1), nonneg=True, name="i") if self._groups else None
        position = {pair: n for n, pair in enumerate(self._pairs)}
        later, earlier, rows, taken, columns = [], [], [], [], []
        grouped: list[tuple[int, int]] = []
        for crossing, column in zip(chain.crossings, self._columns, strict=True):
            for k, c in column.items():
                if k - 1 in column:
                    later.append(c)
                    earlier.append(column[k - 1])
                needing = [position[p] for p in crossing.needed if p[0] == k]
                if needing:
                    rows += [len(columns)] * len(needing)
                    taken += needing
                    columns.append(c)
            for g, (a, b) in enumerate(self._groups):
                if crossing.producer < a and any(a <= r <= b for r in crossing.readers):
                    grouped.append((column[min(a, crossing.readers[-1])], g))
        holders = [(self.h, self._top)] + ([(self.i, self.q)] if self.i is not None else [])
        for hold, used in holders:
            # What is held for a block is held for every later one:  h_{v,k} ≥ h_{v,k−1}.
            if later:
                self.constraints.append(hold[later] >= hold[earlier])
            # An option whose backward reads v holds it:  h_{v,k} ≥ Σ_{o needs v} top_{k,o}.
            if columns:
                pick = sp.csr_matrix(
                    (np.ones(len(rows)), (rows, taken)), shape=(len(columns), len(self._pairs))
                )
                self.constraints.append(hold[columns] >= pick @ used)
        # A wrapped group holds what its recompute reads from outside:  h_{v,a} ≥ y_g.
        if grouped and self.y is not None:
            where, which = (list(z) for z in zip(*grouped, strict=True))
            self.constraints.append(self.h[where] >= self.y[which])

    def _held(self, k: int, first_producer: int, last_producer: int) -> sp.csr_matrix:
        """Row vector over columns: bytes of each value made in the given blocks, as block k
        sees it."""
        row = np.zeros(self.h.size)
        for crossing, column in zip(self._chain.crossings, self._columns, strict=True):
            if first_producer <= crossing.producer <= last_producer:
                row[column[min(k, crossing.readers[-1])]] += crossing.size_bytes / _MIB
        return row

    def _forward_peaks(self) -> None:
        # At the forward of block k, everything earlier blocks keep, every value still to be
        # read or held, and the block's own peak:
        #   Σ_{j<k} K_j·top_j + Σ_{v: p(v)<k} b_v (1 if v is read from k on, else h_v)
        #     + A_k·x_k ≤ P.
        chain, rows, held, fixed = self._chain, [], [], []
        for k in range(len(chain)):
            row = np.zeros(self.h.size)
            known = 0.0
            for crossing, column in zip(chain.crossings, self._columns, strict=True):
                if crossing.producer >= k:
                    continue
                if crossing.readers[-1] >= k:
                    known += crossing.size_bytes / _MIB
                else:
                    row[column[crossing.readers[-1]]] += crossing.size_bytes / _MIB
            rows.append(k)
            held.append(row)
            fixed.append(known)
        self._peak_rows(rows, np.array(held), np.array(fixed), self._forward)

    def _backward_peaks(self) -> None:
        # At the backward of block k, seen from outside any group:
        #   Σ_{j<k} K_j·top_j + Σ_{v: p(v)≤k} b_v h_{v,k} + W_k + B_k·x_k ≤ P.
        chain = self._chain
        blocks = list(range(len(chain)))
        held = np.array([self._held(k, 0, k) for k in blocks])
        pending = np.array([chain.pending_cotangent_bytes(k) / _MIB for k in blocks])
        outside = self._peak_rows(blocks, held, pending, self._backward)
        if self.y is None or self.q is None or self.i is None:
            return
        # Inside a group that begins at a < k, what its recompute has kept so far comes on top:
        #   … + Σ_{a≤j<k} K_j·q_j + Σ_{v: a≤p(v)≤k} b_v i_{v,k} ≤ P + M (1 − Σ_{g=(a,b≥k)} y_g).
        # Without the group the left side exceeds P by no more than M, the sum of the terms.
        for a, k in sorted({(a, k) for a, b in self._groups for k in range(a + 1, b + 1)}):
            inner_kept = np.array(
                [c if a <= j < k else 0.0 for (j, _), c in zip(self._pairs, self._kept, strict=True)]
            )
            inner_held = self._held(k, a, k)
            slack = float(inner_held.sum()) + sum(
                max((o.cost.kept_bytes / _MIB for o in chain.options[j]), default=0.0)
                for j in range(a, k)
            )
            here = [g for g, (first, last) in enumerate(self._groups) if first == a and last >= k]
            self.constraints.append(
                outside[k] + inner_kept @ self.q + inner_held @ self.i
                <= self.peak_mib + slack * (1 - cp.sum(self.y[here]))
            )

    def _peak_rows(
        self, blocks: Sequence[int], held: np.ndarray, fixed: np.ndarray, own: np.ndarray
    ) -> cp.Expression:
        before = np.array(
            [
                [c if j < k else 0.0 for (j, _), c in zip(self._pairs, self._kept, strict=True)]
                for k in blocks
            ]
        )
        mine = self._of_block.multiply(own).tocsr()[list(blocks)]
        total = before @ self._top + held @ self.h + fixed + mine @ self.x
        self.constraints.append(total <= self.peak_mib)
        return total

    def selection(self) -> Selection:
        """The options and groups at the solution."""
        best: dict[int, tuple[float, int]] = {}
        for (k, o), value in zip(self._pairs, self.x.value, strict=True):
            if k not in best or value > best[k][0] + 0.5:
                best[k] = (float(value), o)
        groups = ()
        if self.y is not None:
            on = [g for g, value in zip(self._groups, self.y.value, strict=True) if value > 0.5]
            groups = tuple(sorted(on))
        return Selection(tuple(best[k][1] for k in range(len(self._chain))), groups)


def _candidate_groups(chain: Chain) -> list[tuple[int, int]]:
    """Two to `_MAX_GROUP` consecutive blocks, neither end at the loss.

    The last block's backward follows its forward at once, so wrapping it gains nothing.
    """
    last = len(chain) - 1
    return [
        (a, b)
        for a in range(last)
        for b in range(a + 1, min(a + _MAX_GROUP, last))
        if b < last
    ]


def _incidence(blocks: Sequence[int], count: int) -> sp.csr_matrix:
    ones = np.ones(len(blocks))
    return sp.csr_matrix((ones, (list(blocks), range(len(blocks)))), shape=(count, len(blocks)))


def _cover(groups: Sequence[tuple[int, int]], count: int) -> sp.csr_matrix:
    entries = [(k, g) for g, (a, b) in enumerate(groups) for k in range(a, b + 1)]
    rows, columns = zip(*entries, strict=True) if entries else ((), ())
    return sp.csr_matrix((np.ones(len(entries)), (rows, columns)), shape=(count, len(groups)))
