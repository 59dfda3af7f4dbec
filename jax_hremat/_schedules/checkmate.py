"""The fastest schedule with frontier-advancing stages, by integer programming."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jax_hremat._schedules.graph import Graph
from jax_hremat._schedules.schedule import Schedule, with_drops
from jax_hremat._schedules.simulate import simulate
from jax_hremat._schedules.strategy import Strategy
from jax_hremat._shared.errors import SolverError
from jax_hremat._solve.backend import SolverConfig, Status, undecided
from jax_hremat._solve.checkmate import Operations, Stages, fastest_stages, lowest_stages

PAPER = (
    'Jain et al.: "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", '
    "MLSys 2020"
)

# The most programs that are solved for one schedule.
_MAX_SOLVES = 4
# HiGHS lets rows exceed their bounds by about this part.
_SOLVER_TOLERANCE = 2e-6


@dataclass(frozen=True, slots=True)
class Checkmate(Strategy):
    """The fastest of all schedules that compute operations for the first time in the graph's order,
    and between two of these first computations each operation at most once, in the graph's order.

    The program has about n² binary variables for n operations. At the limit of nodes the best
    schedule found is the answer; `Schedule.bound_s` says how far from the optimum it may be.

    Attributes:
        max_operations: Larger graphs are refused.
        solver: The solver's limits.

    Raises:
        SolverError: The graph is too large, or the solver reached its limit without a schedule, and
            without proof that there is none.
    """

    name = "checkmate"
    summary = "fastest of almost all schedules, by integer programming"
    source = f"{PAPER}: its integer program (see `_solve/checkmate.py`)"
    leaves_out = (
        "as the paper does: other orders of first computations, even where the value of one is "
        "dropped unread, and computing an operation twice between two of them"
    )

    max_operations: int = 100
    solver: SolverConfig = SolverConfig(max_nodes=20_000, relative_gap=1e-6)

    def schedule(self, graph: Graph, peak_bytes: int) -> Schedule | None:
        check_size(graph, self.max_operations)
        limit = peak_bytes - graph.constant_bytes
        bound_s: float | None = None
        # Where sizes have no large common divisor, the solver's tolerance may let a schedule pass
        # that exceeds the limit by a few bytes.
        for _ in range(_MAX_SOLVES):
            if limit < 0:
                return None
            stages = fastest_stages(operations_of(graph), limit, self.solver)
            if stages.outcome.status is Status.UNDECIDED:
                raise undecided(self.solver)
            if bound_s is None:
                bound_s = stages.bound * graph.time_s
            if stages.computed is None:
                return None
            schedule = _schedule(graph, stages, bound_s)
            excess = simulate(graph, schedule).peak_bytes - peak_bytes
            if excess <= 0:
                return schedule
            # What the solver lets pass is a part of the limit.
            limit -= max(excess, int(_SOLVER_TOLERANCE * limit))
        raise SolverError(
            f"HiGHS found only schedules that exceed {peak_bytes} bytes, within its tolerance; "
            f"give sizes in larger units"
        )

    def lowest(self, graph: Graph) -> Schedule:
        check_size(graph, self.max_operations)
        low = _schedule(graph, lowest_stages(operations_of(graph), self.solver), None)
        # None may be found: all as low may exceed the limit within the solver's tolerance.
        return self.schedule(graph, simulate(graph, low).peak_bytes) or low


def check_size(graph: Graph, max_operations: int) -> None:
    """Refuse a graph for which the program would be too large.

    Raises:
        SolverError: It has more operations than that.
    """
    if len(graph) > max_operations:
        raise SolverError(
            f"the graph has {len(graph)} operations, and Checkmate's program, which grows with "
            f"their square, takes at most {max_operations}; choose another strategy, or raise "
            f"max_operations"
        )


def operations_of(graph: Graph) -> Operations:
    """The graph as the program takes it."""
    return Operations(
        reads=[operation.reads for operation in graph.operations],
        time_s=[operation.time_s for operation in graph.operations],
        output_bytes=[operation.output_bytes for operation in graph.operations],
        workspace_bytes=[operation.workspace_bytes for operation in graph.operations],
        results=graph.results,
    )


def order_of(computed: np.ndarray) -> list[int]:
    """The computations of the stages, one after the other."""
    return [int(k) for stage in computed for k in np.flatnonzero(stage > 0.5)]


def _schedule(graph: Graph, stages: Stages, bound_s: float | None) -> Schedule:
    assert stages.computed is not None
    return with_drops(graph, order_of(stages.computed), bound_s=bound_s)
