"""Work of a Pallas kernel: its jaxpr's equations, times how often each runs over the grid.

Integer scalars that follow from a point's position in the grid are computed, so that loops whose
bound depends on the point, as in causal attention, count with their actual number of steps. In a
large grid, evenly spaced points stand for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jax_hremat._jax.jaxprs import Literal, inner_jaxprs, open_jaxpr
from jax_hremat._primitives import products
from jax_hremat._primitives.elementwise import ELEMENT_FLOPS, MOVES
from jax_hremat._primitives.trips import Known, scalar_result, while_trips
from jax_hremat._primitives.work import MatrixUnit, Work

_MAX_POINTS = 256

# Primitives of kernels that compute nothing.
_MOVES = MOVES | frozenset(
    """addupdate barrier_arrive barrier_wait broadcast_to commit_group commit_smem copy_gmem_to_smem
    copy_smem_to_gmem debug_barrier_p dynamic_update_slice get join layout_cast load masked_load
    masked_swap max_contiguous multiple_of num_programs optimization_barrier program_id
    set_max_registers_p swap wait_smem_to_gmem wgmma_wait""".split()
)
_REDUCTIONS = frozenset(
    """argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum cumsum cummax
    cumprod""".split()
)


class _NotKnown(Exception):
    """The kernel contains something that no rule covers."""


def kernel_work(eqn: Any, moved_bytes: float) -> Work | None:
    """The work of all grid points of a `pallas_call`; None if its jaxpr does not determine it.

    That is the case if a loop's length is not known, or a primitive has unknown cost.

    Args:
        eqn: The `pallas_call`.
        moved_bytes: Bytes of its operands and results, each counted once: repeated reads are
            assumed to hit the cache.
    """
    grid = eqn.params["grid_mapping"].grid
    if not all(isinstance(extent, int) for extent in grid):
        return None
    num_points = math.prod(grid)
    count = min(num_points, _MAX_POINTS)
    chosen = (np.arange(count) * num_points) // max(count, 1)
    point = np.unravel_index(chosen, grid) if grid else ()
    counter = _Counter(point, grid)
    jaxpr = open_jaxpr(eqn.params["jaxpr"])
    try:
        counter.walk(jaxpr, [None] * len(jaxpr.invars), np.full(count, num_points / max(count, 1)))
    except _NotKnown:
        return None
    return Work(
        flops=tuple(counter.flops.items()),
        vector_flops=counter.vector_flops,
        bytes=moved_bytes,
        concurrent=True,
    )


class _Counter:
    """Sums up the flops of one kernel."""

    def __init__(self, point: Sequence[np.ndarray], grid: Sequence[int]) -> None:
        self.flops: dict[MatrixUnit, float] = {}
        self.vector_flops = 0.0
        self._point = point
        self._grid = grid

    def walk(self, jaxpr: Any, inputs: Sequence[Known], times: np.ndarray) -> list[Known]:
        """Count a jaxpr that runs `times` times at each point, and return what is known about its
        outputs."""
        known: dict[Any, Known] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atoms: Iterable[Any]) -> list[Known]:
            return [v.val if isinstance(v, Literal) else known.get(v) for v in atoms]

        for eqn in jaxpr.eqns:
            made = self._equation(eqn, read(eqn.invars), times)
            known.update(zip(eqn.outvars, made, strict=True))
        return read(jaxpr.outvars)

    def _equation(self, eqn: Any, inputs: list[Known], times: np.ndarray) -> list[Known]:
        name = eqn.primitive.name
        nothing: list[Known] = [None] * len(eqn.outvars)
        if name in ("program_id", "num_programs"):
            axis = eqn.params["axis"]
            return [self._point[axis] if name == "program_id" else self._grid[axis]]
        if name == "scan":
            self._inside(eqn.params["jaxpr"], times * eqn.params["length"])
        elif name == "while":
            trips = while_trips(eqn, inputs)
            if trips is None:
                raise _NotKnown(name)
            self._inside(eqn.params["body_jaxpr"], times * trips)
        elif name == "cond":
            return self._branches(eqn, inputs, times)
        elif bodies := list(inner_jaxprs(eqn)):
            for body in map(open_jaxpr, bodies):
                fits = len(bodies) == 1 and len(body.invars) == len(inputs)
                made = self.walk(body, inputs if fits else [None] * len(body.invars), times)
                if fits and len(made) == len(nothing):
                    nothing = made
        else:
            self._count(eqn, float(times.sum()))
            if len(eqn.outvars) == 1:
                return [scalar_result(eqn, inputs)]
        return nothing

    def _inside(self, body: Any, times: np.ndarray) -> None:
        """Count a loop's body; nothing is known about its inputs."""
        body = open_jaxpr(body)
        self.walk(body, [None] * len(body.invars), times)

    def _branches(self, eqn: Any, inputs: list[Known], times: np.ndarray) -> list[Known]:
        """Count each branch as often as it is chosen, or all of them where that is not known."""
        which, *operands = inputs
        for number, branch in enumerate(eqn.params["branches"]):
            chosen = 1.0 if which is None else np.asarray(which, np.int64) == number
            self.walk(open_jaxpr(branch), operands, times * chosen)
        return [None] * len(eqn.outvars)

    def _count(self, eqn: Any, times: float) -> None:
        name = eqn.primitive.name
        if name == "dot_general":
            for unit, flops in products.dot_general(eqn).flops:
                self.flops[unit] = self.flops.get(unit, 0.0) + times * flops
        elif name in _REDUCTIONS:
            self.vector_flops += times * math.prod(eqn.invars[0].aval.shape)
        elif name in ELEMENT_FLOPS:
            size = math.prod(eqn.outvars[0].aval.shape)
            self.vector_flops += times * ELEMENT_FLOPS[name] * size
        elif name not in _MOVES:
            raise _NotKnown(name)
