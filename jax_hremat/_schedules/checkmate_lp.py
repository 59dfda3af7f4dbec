"""Checkmate's relaxation, rounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jax_hremat._schedules.checkmate import PAPER, check_size, operations_of, order_of
from jax_hremat._schedules.graph import Graph
from jax_hremat._schedules.simulate import simulate, without_recompute
from jax_hremat._schedules.strategy import Family
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.checkmate import Operations, fastest_stages


@dataclass(frozen=True, slots=True)
class CheckmateLP(Family):
    """Solve Checkmate's linear relaxation for some limits, keep what is kept by more than a
    threshold, and compute what is needed for that.

    The limits are evenly spaced between the memory that the largest operation takes and the peak
    without recomputation, whatever peak is asked for: so more memory never gives a slower schedule.

    Attributes:
        num_limits: Limits for which the relaxation is solved.
        thresholds: Above which a fraction is rounded up, each tried.
        max_operations: Larger graphs are refused.
        solver: The solver's limits.

    Raises:
        SolverError: The graph is too large.
    """

    name = "checkmate-lp"
    summary = "the relaxation of Checkmate's program, rounded"
    source = f"{PAPER}: two-phase rounding, deterministic"
    leaves_out = (
        "randomised rounding; the paper solves the relaxation for one limit somewhat below the "
        "budget, with one threshold"
    )

    num_limits: int = 8
    thresholds: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    max_operations: int = 100
    solver: SolverConfig = SolverConfig()

    def orders(self, graph: Graph) -> Iterator[Sequence[int]]:
        check_size(graph, self.max_operations)
        yield range(len(graph))
        peak = simulate(graph, without_recompute(graph)).peak_bytes - graph.constant_bytes
        least = least_possible_bytes(graph)
        operations = operations_of(graph)
        for step in range(self.num_limits):
            limit = least + (peak - least) * step // self.num_limits
            stages = fastest_stages(operations, limit, self.solver, relaxed=True)
            if stages.kept is not None:
                for threshold in self.thresholds:
                    yield order_of(rounded(operations, stages.kept > threshold))


def least_possible_bytes(graph: Graph) -> int:
    """What the largest operation takes while it runs, without the constants; no schedule has a
    lower peak."""
    return max(
        operation.output_bytes
        + operation.workspace_bytes
        + sum(graph.operations[j].output_bytes for j in operation.reads)
        for operation in graph.operations
    )


def rounded(operations: Operations, kept: np.ndarray) -> np.ndarray:
    """The least R, given S: each stage computes its operations, and whatever else is needed for
    what it computes or what is kept after it.

    Operations that may run only once are computed again like others if they are needed and not
    kept.
    """
    stages = operations.stages
    computed = np.zeros((len(stages), len(operations.reads)), dtype=bool)
    for t, new in enumerate(stages):
        computed[t, new] = True
        # Of what is kept after the stage, what was not kept before it.
        if t + 1 < len(stages):
            computed[t, : new.start] |= kept[t + 1, : new.start] & ~kept[t, : new.start]
        for k in reversed(range(new.stop)):
            if computed[t, k]:
                for i in operations.reads[k]:
                    computed[t, i] |= not kept[t, i]
                if k in operations.part_of:
                    computed[t, operations.part_of[k]] = True
    return computed
