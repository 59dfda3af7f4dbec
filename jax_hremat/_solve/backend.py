"""The only call to the solver, HiGHS through cvxpy, with a `Status` for every outcome."""

from __future__ import annotations

import enum
import warnings
from dataclasses import dataclass, replace
from typing import Any

from jax_hremat._shared.errors import SolverError
from jax_hremat._solve.modelling import cp


class Status(enum.Enum):
    """How a solve ended; any other end raises a `SolverError`."""

    OPTIMAL = "optimal within the requested gap"
    LIMIT = "best found within the limits of the solver"
    INFEASIBLE = "no solution exists"
    NOT_FOUND = "no solution found, and no proof that there is none"
    UNDECIDED = "neither a solution nor a proof of none within the limits of labels and nodes"
    NOT_SOLVED = "a standard policy, no slower than the solver's plans"


@dataclass(frozen=True, slots=True)
class SolverConfig:
    """Limits of the solvers, in counts and not in seconds, so that answers do not depend on the
    load of the machine.

    Attributes:
        max_nodes: The most nodes of the branch-and-bound tree of one integer program. The best
            solution found at the limit is a result, with its gap.
        max_labels: The most partial schedules that are kept before one block, where label
            setting solves the root program. The best schedule found is a result, with its gap.
        relative_gap: Relative distance between solution and bound at which the search stops.

    Raises:
        ValueError: A limit is negative.
    """

    max_nodes: int = 2000
    max_labels: int = 20_000
    relative_gap: float = 1e-3

    def __post_init__(self) -> None:
        if self.max_nodes < 0 or self.relative_gap < 0 or self.max_labels < 1:
            raise ValueError(
                f"{self}: max_nodes and relative_gap may not be negative, and max_labels is at "
                f"least 1"
            )

    def part(self, part: float) -> SolverConfig:
        """The same limits with this part of the nodes."""
        return replace(self, max_nodes=round(part * self.max_nodes))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a solve proved.

    Attributes:
        status: How it ended.
        objective: Value of the solution, in the program's own unit; `inf` if infeasible.
        gap: Relative distance between the objective and the solver's proven bound.
    """

    status: Status
    objective: float
    gap: float


def solve(problem: cp.Problem, config: SolverConfig) -> Outcome:
    """Solve one minimisation with HiGHS, on one thread with a fixed seed.

    The relative gap refers to the objective as HiGHS sees it, without its constant term.

    Raises:
        SolverError: The solver failed.
    """
    with warnings.catch_warnings():
        # cvxpy warns that a solution at a limit may be inaccurate; the status records the limit.
        warnings.filterwarnings("ignore", message="Solution may be inaccurate")
        try:
            problem.solve(
                solver=cp.HIGHS,
                mip_max_nodes=config.max_nodes,
                mip_rel_gap=config.relative_gap,
                mip_abs_gap=1e-6,
                random_seed=0,
                threads=1,
            )
        except cp.SolverError as error:
            raise SolverError(
                f"HiGHS failed on a program with {problem.size_metrics.num_scalar_variables} "
                f"variables: {error}"
            ) from error
    if problem.status in (cp.INFEASIBLE, cp.INFEASIBLE_INACCURATE, "infeasible_or_unbounded"):
        return Outcome(Status.INFEASIBLE, float("inf"), 0.0)
    if problem.status == cp.OPTIMAL:
        return Outcome(Status.OPTIMAL, _objective(problem), _gap(problem))
    if problem.status in (cp.USER_LIMIT, cp.OPTIMAL_INACCURATE):
        if not _has_solution(problem):
            return Outcome(Status.UNDECIDED, float("inf"), float("inf"))
        return Outcome(Status.LIMIT, _objective(problem), _gap(problem))
    raise SolverError(f"HiGHS ended with the status {problem.status!r}")


def undecided(config: SolverConfig) -> SolverError:
    """The error for a limit that was reached without a result."""
    return SolverError(
        f"no solution was found within {config.max_nodes} nodes and {config.max_labels} labels, "
        f"and no proof that there is none. Raise `solver=SolverConfig(max_nodes=…, max_labels=…)`"
    )


def _has_solution(problem: cp.Problem) -> bool:
    """Whether the values of the variables are a solution; HiGHS returns zeros if it has none."""
    stats: Any = problem.solver_stats
    return problem.value is not None and stats.extra_stats.primal_solution_status != 0


def _objective(problem: cp.Problem) -> float:
    value: Any = problem.value
    return float(value)


def _gap(problem: cp.Problem) -> float:
    if not problem.is_mixed_integer():
        return 0.0
    stats: Any = problem.solver_stats
    return float(stats.extra_stats.mip_gap)
