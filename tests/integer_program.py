"""The root program solved by HiGHS over listed columns, the witness of label setting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jax_hremat._solve.backend import SolverConfig, Status, solve
from jax_hremat._solve.chain import Chain, Selection, selection_of
from jax_hremat._solve.column import MIB, Column
from jax_hremat._solve.modelling import cp
from jax_hremat._solve.root_program import RootProgram


def fastest_of_columns(
    chain: Chain, columns: Sequence[Column], peak_bytes: int, config: SolverConfig
) -> Selection | None:
    """The fastest schedule of some columns whose peak is at most `peak_bytes`; None if there is
    none."""
    program = RootProgram(chain, columns)
    rows = program.rows((peak_bytes - chain.fixed_bytes) / MIB)
    added = np.array([p.added_ms for p in columns]) @ program.x
    outcome = solve(cp.Problem(cp.Minimize(added), rows.all), config)
    if outcome.status is Status.INFEASIBLE:
        return None
    assert outcome.status is Status.OPTIMAL and program.x.value is not None
    return selection_of([p for p, on in zip(columns, program.x.value, strict=True) if on > 0.5])
