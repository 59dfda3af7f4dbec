"""Which measured runs of a block to wrap together: the block's program.

Glossary
    i       a run that was compiled alone: it frees m_i bytes and adds t_i seconds
    z_i     1 if run i is wrapped
    e       an operation of the block

Effects of runs that do not overlap add up (measured: docs/devdocs/costs.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jax_hremat._modes.runs import Run
from jax_hremat._solve.backend import SolverConfig, Status, solve
from jax_hremat._solve.modelling import cp


@dataclass(frozen=True, slots=True)
class Packing:
    """A set of disjoint runs.

    Attributes:
        runs: In program order.
        freed_bytes: Sum over the runs, as measured one by one.
        added_s: Sum over the runs; may be negative.
    """

    runs: tuple[Run, ...]
    freed_bytes: int
    added_s: float


def pareto_packings(runs: Sequence[Run], config: SolverConfig, count: int) -> tuple[Packing, ...]:
    """Least added time for a sweep of bytes to free, from none to as much as can be freed.

    The first answer has no byte bound: where wrapping a run makes the step faster, it is in it.
    """
    useful = [r for r in runs if r.freed_bytes > 0 or r.added_s < 0]
    if not useful:
        return ()
    freed = np.array([r.freed_bytes / 2**20 for r in useful])
    added = np.array([r.added_s * 1e3 for r in useful])
    z = cp.Variable(len(useful), boolean=True)

    # No operation is in two runs:  Σ_{i ∋ e} z_i ≤ 1, only for the e where a run starts.
    starts = sorted({r.start for r in useful})
    cover = np.array([[r.start <= e < r.stop for r in useful] for e in starts], dtype=float)
    disjoint = cover @ z <= 1

    # Most that can be freed:  max Σ_i m_i z_i.
    most = solve(cp.Problem(cp.Minimize(-(freed @ z)), [disjoint]), config)
    limit = -most.objective
    answers: list[Packing] = []
    for step in range(count + 1):
        # Least time that frees enough:  min Σ_i t_i z_i  s.t.  Σ_i m_i z_i ≥ M.
        bound = limit * step / count * (1 - 1e-9)
        constraints = [disjoint, freed @ z >= bound] if step else [disjoint]
        objective = cp.Minimize(added @ z - 1e-6 * (freed @ z))
        outcome = solve(cp.Problem(objective, constraints), config)
        if outcome.status is Status.INFEASIBLE or z.value is None:
            continue
        picked = tuple(r for r, on in zip(useful, z.value, strict=True) if on > 0.5)
        packing = Packing(
            runs=tuple(sorted(picked, key=lambda r: r.start)),
            freed_bytes=sum(r.freed_bytes for r in picked),
            added_s=sum(r.added_s for r in picked),
        )
        if packing.runs and packing not in answers:
            answers.append(packing)
    return tuple(answers)
