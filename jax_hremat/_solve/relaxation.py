"""The linear relaxation of the root program, and what its duals charge every column.

Columns enter by their reduced costs (column generation, Gilmore and Gomory 1961). With the duals of
any of its programs, a schedule of columns p adds at least

    value + Σ_p r_p      r_p = T_p + what the rows charge p

so that the beginning of a schedule adds at least its own sum, the value, and the least sum of
columns that may follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jax_hremat._solve.assumed_reuse import AssumedReuse
from jax_hremat._solve.backend import SolverConfig, Status, solve
from jax_hremat._solve.chain import Chain
from jax_hremat._solve.column import MIB, Column
from jax_hremat._solve.families import Families
from jax_hremat._solve.modelling import cp, sp
from jax_hremat._solve.root_program import RootProgram

# The most columns that enter in one round, and the most rounds.
_MAX_PRICED = 200
_MAX_ROUNDS = 60
# The relaxation may exceed the limit, so that it always has a solution, at this many times the most
# time that any schedule adds for each limit's worth of bytes.
_PENALTY = 1e3
# HiGHS meets the optimality of the relaxation to within less than this part of the step's time.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Charges:
    """What duals say of all schedules within a limit.

    Attributes:
        value_ms: The value of the relaxation.
        reduced_ms: For each block, for the families of the same blocks that begin there, the
            reduced cost of each column.
        ahead_ms: For each block, and after the last, the least sum of reduced costs from there on.
    """

    value_ms: float
    reduced_ms: Sequence[Sequence[np.ndarray]]
    ahead_ms: Sequence[float]

    @property
    def least_ms(self) -> float:
        """No schedule adds less time."""
        return self.value_ms + self.ahead_ms[0]


class Relaxation:
    """The relaxation over all columns of some families."""

    def __init__(self, chain: Chain, families: Sequence[Sequence[Families]]) -> None:
        self._chain = chain
        self._families = families
        slowest = [max(o.cost.time_s for o in opts) for opts in chain.options]
        self._base_ms = chain.fastest_ms
        self._most_ms = 1e3 * (sum(slowest) + sum(chain.recompute_s)) - self._base_ms
        self._entries, self._keys = self._coefficients()

    def charges(
        self, limit_bytes: float, config: SolverConfig, reused: AssumedReuse
    ) -> Charges | None:
        """The charges for a limit, arguments and outputs not counted; None if the solver did not
        solve the relaxation.

        Args:
            limit_bytes: The limit on the peak.
            config: The solver's limits. Columns enter until they could raise the bound by less
                than a third of the gap.
            reused: What is assumed of output-buffer reuse.
        """
        chosen = [
            (families, position)
            for some in self._families
            for families in some
            if len(families.blocks) == 1
            for position in range(len(families.columns))
        ]
        known = {(id(families), position) for families, position in chosen}
        fine_ms = 0.3 * config.relative_gap * self._base_ms
        best: Charges | None = None
        for _ in range(_MAX_ROUNDS):
            columns = [families.column(position) for families, position in chosen]
            found = self._priced(columns, limit_bytes, config, reused)
            if found is None:
                break
            if best is None or found.least_ms > best.least_ms:
                best = found
            if found.ahead_ms[0] >= -fine_ms:
                break
            worth = sorted(
                (float(costs[position]), block, number, position)
                for block, some in enumerate(found.reduced_ms)
                for number, costs in enumerate(some)
                for position in self._families[block][number].least(costs)
                if costs[position] < 0
                and (id(self._families[block][number]), position) not in known
            )
            new = [(self._families[b][number], p) for _, b, number, p in worth[:_MAX_PRICED]]
            if not new:
                break
            chosen += new
            known |= {(id(families), position) for families, position in new}
        return best

    def _priced(
        self,
        columns: Sequence[Column],
        limit_bytes: float,
        config: SolverConfig,
        reused: AssumedReuse,
    ) -> Charges | None:
        """The charges from the relaxation over some columns."""
        limit_mib = limit_bytes / MIB
        program = RootProgram(self._chain, columns, boolean=False)
        excess = cp.Variable(nonneg=True, name="u")
        rows = program.rows(limit_mib + excess, reused)
        # Objective:  min Σ_p T_p x_p + c u, where c is the price of a MiB above the limit.
        price = _PENALTY * self._most_ms / max(limit_mib, 1.0)
        added = np.array([p.added_ms for p in columns]) @ program.x
        problem = cp.Problem(cp.Minimize(added + price * excess), rows.all)
        outcome = solve(problem, config)
        if outcome.status is not Status.OPTIMAL:
            return None
        cover, hold, forward, backward = (
            np.atleast_1d(np.asarray(row.dual_value, float))
            for row in (rows.cover, rows.hold, rows.forward, rows.backward)
        )
        hold, forward, backward = (np.maximum(some, 0.0) for some in (hold, forward, backward))
        held = [hold[program.position[key]] for key in self._keys]
        # What a column keeps is alive in the forward and backward of every later block.
        charged = forward + backward
        later = charged[::-1].cumsum()[::-1] - charged
        constant_ms = self._entries @ np.concatenate((cover, forward, later, held))
        upto = np.concatenate(([0.0], np.cumsum(backward)))
        reduced: list[list[np.ndarray]] = []
        row = 0
        for some in self._families:
            reduced.append([])
            for families in some:
                blocks = families.blocks
                per_mib = upto[blocks.stop] - upto[blocks.start]
                saved_ms = backward[blocks.start : blocks.stop] @ reused.in_backward(blocks) / MIB
                own_ms = families.added_ms + per_mib * families.backward_bytes / MIB - saved_ms
                reduced[-1].append(own_ms + constant_ms[row + families.family])
                row += len(families)
        ahead = [0.0] * (len(self._families) + 1)
        for block in reversed(range(len(self._families))):
            ahead[block] = min(
                float(costs.min()) + ahead[families.blocks.stop]
                for families, costs in zip(self._families[block], reduced[block], strict=True)
            )
        return Charges(outcome.objective - _ROUNDING * self._base_ms, reduced, ahead)

    def _coefficients(self) -> tuple[sp.csr_array, list[tuple[int, int]]]:
        """For each family its coefficients in the families of rows cover, forward, stock and hold,
        but for those of backward peaks; and the pairs of value and block that are held."""
        every = [
            families.column(position)
            for some in self._families
            for families in some
            for position in families.first.tolist()
        ]
        keys = sorted({key for p in every for key in p.holds})
        n = len(self._chain)
        place = {key: 3 * n + i for i, key in enumerate(keys)}
        rows: list[int] = []
        places: list[int] = []
        entries: list[float] = []
        for i, p in enumerate(every):
            blocks = range(p.first, p.last + 1)
            places += [*blocks, *(n + k for k in blocks), 2 * n + p.last]
            entries += [1.0] * len(blocks)
            entries += [own / MIB for own in p.forward_bytes]
            entries.append(p.kept_bytes / MIB)
            places += [place[key] for key in p.holds]
            entries += [1.0] * len(p.holds)
            rows += [i] * (len(entries) - len(rows))
        shape = (len(every), 3 * n + len(keys))
        return sp.csr_array((entries, (rows, places)), shape=shape), keys
