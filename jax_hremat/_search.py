"""`Graph`, `Partition` -> options of every kind of block: candidates, compiled and pruned."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace

from jax_hremat import _compat
from jax_hremat._cost.analytic import operation_times_s
from jax_hremat._cost.compiled import ModeCost
from jax_hremat._cost.roofline import Rates
from jax_hremat._graph import Graph
from jax_hremat._option import Option, pareto
from jax_hremat._partition import Block, Partition, has_deferrable_input
from jax_hremat._region import Region, ValueRef
from jax_hremat._runs import Run, candidate_runs
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.packing import pareto_packings
from jax_hremat._solve.saved import materialised_values, saved_value_sets, value_refs

# Measures one block in one mode.
Measure = Callable[[Block, Region], ModeCost]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """How many modes of a block are compiled.

    A kind of block gets all of them if it holds a fair share of the program's residuals, fewer
    the less it holds.

    Attributes:
        max_runs: Runs wrapped alone, for each kind of block.
        max_packings: Sets of runs wrapped together.
        max_saved_sets: Sets of values that a wholly wrapped block keeps.
        fair_share: Share of the program's residual bytes from which a kind gets the maximum.
        max_workers: Compilations at a time.
    """

    max_runs: int = 12
    max_packings: int = 6
    max_saved_sets: int = 3
    fair_share: float = 0.05
    max_workers: int = max(2, min(8, os.cpu_count() or 1))

    def scaled(self, share: float) -> SearchConfig:
        """The limits for a kind that holds this share of the residuals."""
        part = min(1.0, math.sqrt(share / self.fair_share))
        return replace(
            self,
            max_runs=round(part * self.max_runs),
            max_packings=round(part * self.max_packings),
            max_saved_sets=round(part * self.max_saved_sets),
        )


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """The options of one kind of block.

    Attributes:
        options: Pareto-optimal ones, fastest first.
        bare: The block left as it is.
        wrapped: The block under one plain `jax.checkpoint`.
        policies: The block under each standard policy, by the policy's name.
        num_measured: How many modes were compiled or timed.
    """

    options: tuple[Option, ...]
    bare: Option
    wrapped: Option
    policies: tuple[tuple[str, Option], ...]
    num_measured: int


def search_options(
    graph: Graph,
    partition: Partition,
    measure: Measure,
    rates: Rates,
    config: SearchConfig,
    solver: SolverConfig,
    progress: Progress,
) -> dict[int, BlockOptions]:
    """Find the options of every kind of block.

    In two waves, each compiled in parallel: first single runs, the whole block and the standard
    policies; then, from what was measured, the best sets of runs, alone and inside the wrapped
    block.

    Returns:
        For each of `partition.unique`, its options.
    """
    times_s = operation_times_s(graph, rates)
    byte_s = 1 / rates.bytes_per_s
    shares = _residual_shares(graph, partition)
    searches = {
        kind: _BlockSearch(
            graph, partition.blocks[kind], times_s, byte_s, config.scaled(shares[kind]), solver
        )
        for kind in partition.unique
    }
    with ThreadPoolExecutor(config.max_workers) as pool:
        first = {kind: search.first_wave() for kind, search in searches.items()}
        done = _measure_all(pool, partition, measure, first, "compiling modes", progress)
        second = {
            kind: [m for m in search.second_wave(done[kind]) if m not in done[kind]]
            for kind, search in searches.items()
        }
        more = _measure_all(pool, partition, measure, second, "compiling sets", progress)
    return {kind: search.options({**done[kind], **more[kind]}) for kind, search in searches.items()}


def _residual_shares(graph: Graph, partition: Partition) -> dict[int, float]:
    """What part of all residuals the blocks of each kind hold, by JAX's linearization."""
    held: dict[int, int] = dict.fromkeys(partition.unique, 0)
    for block, kind in zip(partition.blocks, partition.kinds, strict=True):
        operations = graph.operations[block.start : block.stop]
        values = {v for op in operations for v in op.needs}
        held[kind] += sum(
            graph.values[v].size_bytes for v in values if graph.values[v].kind == "computed"
        ) + sum(op.opaque_bytes for op in operations)
    total = max(sum(held.values()), 1)
    return {kind: size / total for kind, size in held.items()}


def _measure_all(
    pool: Executor,
    partition: Partition,
    measure: Measure,
    modes: Mapping[int, Sequence[Region]],
    stage: str,
    progress: Progress,
) -> dict[int, dict[Region, ModeCost]]:
    measure_there = _compat.in_settings_of_this_thread(measure)
    futures = {
        (kind, mode): pool.submit(measure_there, partition.blocks[kind], mode)
        for kind, wanted in modes.items()
        for mode in dict.fromkeys(wanted)
    }
    costs: dict[int, dict[Region, ModeCost]] = {kind: {} for kind in modes}
    for count, ((kind, mode), future) in enumerate(futures.items()):
        progress(stage, count, len(futures))
        costs[kind][mode] = future.result()
    progress(stage, len(futures), len(futures))
    return costs


class _BlockSearch:
    """The candidate modes of one block; holds no results."""

    def __init__(
        self,
        graph: Graph,
        block: Block,
        times_s: Sequence[float],
        byte_s: float,
        config: SearchConfig,
        solver: SolverConfig,
    ) -> None:
        self._graph = graph
        self._block = block
        self._config = config
        self._solver = solver
        self.bare = Region(block.start, block.stop)
        self.wrapped = self._wrap(block.start, block.stop)
        operations = graph.operations[block.start : block.stop]
        if any(op.pinned for op in operations):
            # An effect must not run twice, so only the runs beside it may be wrapped.
            self.wrapped = self.bare
        self._trivial = not any(op.needs or op.opaque_bytes for op in operations)
        self._runs: tuple[Run, ...] = ()
        if not self._trivial:
            held = materialised_values(graph, block.start, block.stop, solver)
            self._runs = candidate_runs(graph, block, held, times_s, byte_s, config.max_runs)
        self._times_s = times_s

    def first_wave(self) -> list[Region]:
        modes = [self.bare]
        if self._trivial:
            return modes
        modes += [self.wrapped, *self.policy_modes().values()]
        modes += [self._with_runs((run,)) for run in self._runs]
        if self.wrapped.wrapped:
            modes += [replace(self.wrapped, saved=refs) for refs in self._saved_sets()]
        return modes

    def second_wave(self, measured: dict[Region, ModeCost]) -> list[Region]:
        runs = []
        bare = measured[self.bare]
        for run in self._runs:
            cost = measured[self._with_runs((run,))]
            runs.append(
                replace(
                    run,
                    freed_bytes=bare.kept_bytes - cost.kept_bytes,
                    added_s=cost.time_s - bare.time_s,
                )
            )
        count = max(1, self._config.max_packings)
        packings = pareto_packings(runs, self._solver, count)
        modes = [self._with_runs(p.runs) for p in packings]
        if self.wrapped.wrapped:
            # Inside a wrapped block the runs lower the peak of its backward, not what it keeps.
            nested = [m for m in modes if m.children]
            modes += [
                replace(self.wrapped, children=m.children) for m in (nested[:1] + nested[-1:])
            ]
        return modes

    def policy_modes(self) -> dict[str, Region]:
        """The block wrapped under each standard policy, the saved values named one by one."""
        if not self.wrapped.wrapped:
            return {}
        products = [
            op
            for op in self._graph.operations[self._block.start : self._block.stop]
            if op.primitive == "dot_general"
        ]
        return {
            "dots_saveable": replace(self.wrapped, saved=tuple((op.id, 0) for op in products)),
            "dots_with_no_batch_dims_saveable": replace(
                self.wrapped,
                saved=tuple((op.id, 0) for op in products if not op.has_batch_dims),
            ),
        }

    def _saved_sets(self) -> list[tuple[ValueRef, ...]]:
        sets = saved_value_sets(
            self._graph,
            self._block.start,
            self._block.stop,
            self._times_s,
            self._solver,
            self._config.max_saved_sets + 1,
        )
        return [value_refs(self._graph, s.values) for s in sets[1:]]

    def _with_runs(self, runs: Sequence[Run]) -> Region:
        children = tuple(self._wrap(r.start, r.stop) for r in runs)
        return replace(self.bare, children=children)

    def _wrap(self, start: int, stop: int) -> Region:
        tied = has_deferrable_input(self._graph, self._block, start, stop)
        return Region(start, stop, wrapped=True, tied=tied)

    def options(self, measured: dict[Region, ModeCost]) -> BlockOptions:
        policies = {name: mode for name, mode in self.policy_modes().items() if mode in measured}
        names = {mode: name for name, mode in policies.items()}

        def option(mode: Region) -> Option:
            if mode in names:
                origin = names[mode]
            elif mode.saved:
                origin = "names"
            elif mode.children:
                origin = "runs"
            else:
                origin = "wrapped" if mode.wrapped else "bare"
            return Option(mode.shifted(-self._block.start), measured[mode], origin)

        bare = option(self.bare)
        return BlockOptions(
            options=pareto(option(mode) for mode in measured),
            bare=bare,
            wrapped=option(self.wrapped) if self.wrapped in measured else bare,
            policies=tuple((name, option(mode)) for name, mode in policies.items()),
            num_measured=len(measured),
        )
