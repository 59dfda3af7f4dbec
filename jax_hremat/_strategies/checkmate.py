"""Checkmate: an integer program over the forwards and backwards of all blocks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from jax_hremat._plan.free_schedule import FreeSchedule
from jax_hremat._schedules.checkmate import order_of
from jax_hremat._schedules.checkmate_lp import least_possible_bytes, rounded
from jax_hremat._schedules.schedule import with_drops, without_unread
from jax_hremat._schedules.simulate import Simulation, simulate, without_recompute
from jax_hremat._solve.backend import SolverConfig, Status
from jax_hremat._solve.chain import Chain, Group, Selection
from jax_hremat._solve.checkmate import Operations, Stages, fastest_stages
from jax_hremat._strategies.nearest_nest import nearest_nest, parts
from jax_hremat._strategies.segments import with_groups
from jax_hremat._strategies.step_graph import step_graph
from jax_hremat._strategies.strategy import Choices, Curve, Strategy

PROVEN = "integer program, proven optimal"
UNPROVEN = "integer program, not proven optimal"
ROUNDED = "relaxation, rounded"

# Peaks for which schedules are found, evenly spaced below that of the plain selection.
_NUM_PEAKS = 7
# Fractions of the relaxation above these are rounded up, each tried.
_THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)
# The solver's tolerance may let a schedule pass that exceeds the limit by a few bytes.
_MAX_SOLVES = 2
# Above these numbers of blocks, the program ends at the root of its tree and half a per cent of the
# step's time from the optimum; its relaxation alone is solved; stages are put together.
_MOST_BLOCKS_WITH_TREE = 10
_MOST_BLOCKS_AS_INTEGERS = 50
_MOST_STAGES = 50
_MAX_NODES = 100
_ROOT_GAP = 0.005
# What the solver's tolerance leaves of a gap.
_NO_GAP = 1e-6


class Checkmate(Strategy):
    """Free schedules of the blocks by integer programming, and the nests nearest to them.

    The program is Checkmate's, over the operations of `step_graph`, and its schedules are those of
    the paper: between two backwards, each forward may run again once. Checkpoints cannot express
    them, so there are two figures. The free schedule for a peak (`free`) is found by the program
    for that very peak and followed by the simulator. What can be chosen are nests: the program is
    solved for seven peaks below that of the plain selection, and of each of its schedules the
    nearest nest and its parts are listed, each with its own prediction, beside the plain selection
    and that in which every block is checkpointed. As a nest takes more than its schedule, the nest
    for a budget is that of a schedule for less, or a part of one.

    With at most 10 blocks, a program ends at 100 nodes or the solver's limit; with at most 50, at
    the root of its tree; beyond that, and wherever the program ends without a proof, the relaxation
    is solved and rounded as in the paper. With more than 50 blocks, several backwards are one
    stage. All limits are counts.
    """

    name = "checkmate"
    summary = "an integer program over all blocks at all times; the nests nearest to its schedules"
    source = (
        "Jain, Jain, Nrusimha, Gholami, Abbeel, Keutzer, Stoica, Gonzalez: Checkmate: Breaking the "
        "Memory Wall with Optimal Tensor Rematerialization (MLSys 2020): the integer program, and "
        "two-phase rounding, deterministic"
    )
    leaves_out = (
        "what is inside blocks, and the steps of scans; forwards that run again before the first "
        "backward, and backwards that run again. Orders that nested checkpoints cannot express are "
        "simulated, not emitted"
    )

    def choices(self, chain: Chain, solver: SolverConfig) -> Choices:
        return _Schedules(chain, solver)


@dataclass(frozen=True, slots=True)
class _Found:
    """A schedule.

    Attributes:
        run: What it takes.
        nest: The groups of the nest nearest to it.
        found_by: What found it.
    """

    run: Simulation
    nest: list[Group]
    found_by: str


@dataclass(frozen=True, slots=True)
class _Answer:
    """What was found for a peak.

    Attributes:
        found: The schedules.
        proof: What is proven of the only one; None if nothing is.
    """

    found: tuple[_Found, ...]
    proof: str | None = None


class _Schedules:
    """The schedules of one chain, and the nests nearest to them."""

    def __init__(self, chain: Chain, solver: SolverConfig) -> None:
        self._chain = chain
        self._step = step_graph(chain)
        self._operations = _with_few_stages(self._step.operations)
        large = len(chain) > _MOST_BLOCKS_WITH_TREE
        self._solver = SolverConfig(
            max_nodes=min(solver.max_nodes, 1 if large else _MAX_NODES),
            relative_gap=max(solver.relative_gap, _ROOT_GAP if large else 0.0),
        )

    def fastest(self, peak_bytes: int) -> Selection | None:
        return self._nests.fastest(peak_bytes)

    def lowest(self) -> Selection:
        return self._nests.lowest()

    def free(self, peak_bytes: int) -> FreeSchedule | None:
        """The fastest schedule found whose simulated peak is at most `peak_bytes`; None if there
        is none."""
        plain = self._plain
        if plain.peak_bytes <= peak_bytes:
            return FreeSchedule(plain.peak_bytes, plain.time_s, PROVEN)
        here = self._within(peak_bytes)
        # A proven one is as good as any up to the gap; others may be slower than one for less.
        proven = here.proof is not None
        known = here.found if proven else (*here.found, *self._for_all_peaks)
        fitting = [found for found in known if found.run.peak_bytes <= peak_bytes]
        if not fitting:
            return None
        best = min(fitting, key=lambda found: (found.run.time_s, found.run.peak_bytes))
        return FreeSchedule(
            peak_bytes=best.run.peak_bytes,
            step_s=best.run.time_s,
            found_by=here.proof or best.found_by,
        )

    @functools.cached_property
    def _nests(self) -> Curve:
        """The nests of all schedules that do not depend on the budget."""
        blocks = range(len(self._chain))
        return Curve(
            self._chain,
            [
                Selection((0,) * len(self._chain)),
                with_groups(self._chain, ((block, block) for block in blocks)),
                *(part for found in self._for_all_peaks for part in parts(self._chain, found.nest)),
            ],
        )

    @functools.cached_property
    def _plain(self) -> Simulation:
        return simulate(self._step.graph, without_recompute(self._step.graph))

    @functools.cached_property
    def _for_all_peaks(self) -> tuple[_Found, ...]:
        graph = self._step.graph
        least = least_possible_bytes(graph) + graph.constant_bytes
        steps = range(1, _NUM_PEAKS + 1)
        room = self._plain.peak_bytes - least
        peaks = [least + room * step // (_NUM_PEAKS + 1) for step in steps]
        return tuple(found for peak_bytes in peaks for found in self._within(peak_bytes).found)

    def _within(self, peak_bytes: int) -> _Answer:
        """What is found for a peak; the schedules of the relaxation may be above it."""
        limit = peak_bytes - self._step.graph.constant_bytes
        if limit < 0:
            return _Answer(())
        if len(self._chain) > _MOST_BLOCKS_AS_INTEGERS:
            return _Answer(tuple(self._roundings(limit)))
        for _ in range(_MAX_SOLVES):
            stages = self._solved(limit)
            if stages.outcome.status is Status.INFEASIBLE:
                return _Answer(())
            if stages.computed is None:
                break
            found = self._found(stages.computed, UNPROVEN)
            excess = found.run.peak_bytes - peak_bytes
            if excess <= 0 and stages.outcome.status is Status.OPTIMAL:
                return _Answer((found,), proof=_proof(stages.outcome.gap))
            if excess <= 0:
                return _Answer((found, *self._roundings(limit)))
            limit -= excess
        return _Answer(tuple(self._roundings(limit)))

    def _solved(self, limit_bytes: int, *, relaxed: bool = False) -> Stages:
        return fastest_stages(self._operations, limit_bytes, self._solver, relaxed=relaxed)

    def _roundings(self, limit_bytes: int) -> Iterator[_Found]:
        """The relaxation, rounded by each threshold."""
        stages = self._solved(limit_bytes, relaxed=True)
        if stages.kept is not None:
            for threshold in _THRESHOLDS:
                computed = rounded(self._operations, stages.kept > threshold)
                # Rounding does not know what must run only once.
                if all(computed[:, k].sum() == 1 for k in self._operations.once):
                    yield self._found(computed, ROUNDED)

    def _found(self, computed: np.ndarray, found_by: str) -> _Found:
        graph, forward = self._step.graph, self._step.forward
        order = without_unread(graph, order_of(computed))
        return _Found(
            run=simulate(graph, with_drops(graph, order)),
            nest=nearest_nest(
                [block for block, at in enumerate(forward) if stage[at] > 0.5]
                for stage in computed[1:]
            ),
            found_by=found_by,
        )


def _proof(gap: float) -> str:
    """The words for a proof that leaves a relative gap."""
    return PROVEN if gap <= _NO_GAP else f"integer program, proven within {gap:.1%} of the optimum"


def _with_few_stages(operations: Operations) -> Operations:
    """The operations with the first stage as it is and consecutive other ones together, so that
    they are few."""
    first, *backwards = operations.ends
    together = -(-len(backwards) // _MOST_STAGES)
    return replace(operations, ends=(first, *backwards[::-together][::-1]))
