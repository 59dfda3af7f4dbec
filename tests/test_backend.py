"""HiGHS behind cvxpy: a status for every outcome."""

import math

import cvxpy as cp
import numpy as np
import pytest

from jax_hremat import SolverError
from jax_hremat._solve import checkmate
from jax_hremat._solve.backend import SolverConfig, Status, solve
from jax_hremat.schedules import Checkmate, Graph, Operation


def market_split() -> cp.Problem:
    """Equalities over booleans that no solver decides at once (Cornuéjols and Dawande 1998)."""
    rng = np.random.default_rng(0)
    x = cp.Variable(40, boolean=True)
    weights = rng.integers(1, 100, (5, 40))
    return cp.Problem(cp.Maximize(rng.random(40) @ x), [weights @ x == weights.sum(1) // 2])


def knapsack(room: float) -> cp.Problem:
    x = cp.Variable(3, boolean=True)
    sizes, worth = np.array([2.0, 3.0, 4.0]), np.array([3.0, 4.0, 6.0])
    return cp.Problem(cp.Minimize(-worth @ x), [sizes @ x <= room, cp.sum(x) >= 1])


def test_a_solution_is_told_with_its_objective_and_gap():
    found = solve(knapsack(6.0), SolverConfig())
    assert (found.status, found.objective) == (Status.OPTIMAL, pytest.approx(-9.0))
    assert found.gap <= 1e-3


def test_no_solution_is_infeasible():
    found = solve(knapsack(1.0), SolverConfig())
    assert (found.status, found.objective) == (Status.INFEASIBLE, math.inf)


def test_zeros_at_the_limit_are_no_solution():
    found = solve(market_split(), SolverConfig(max_nodes=3))
    assert (found.status, found.objective) == (Status.UNDECIDED, math.inf)


def test_a_schedule_that_is_not_found_at_the_limit_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkmate, "solve", lambda _, config: solve(market_split(), config))
    strategy = Checkmate(solver=SolverConfig(max_nodes=3))
    operations = [Operation(name=name, time_s=1.0, output_bytes=1) for name in ("one", "two")]
    graph = Graph(tuple(operations), (0, 1))
    for ask in (lambda: strategy.schedule(graph, 2), lambda: strategy.lowest(graph)):
        with pytest.raises(SolverError, match=r"within 3 nodes.*max_nodes"):
            ask()
