"""`Graph`, `Partition` -> options of every kind of block: candidates, compiled and pruned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from jax_hremat._cost.analytic import operation_times_s
from jax_hremat._cost.compiled import ModeCost
from jax_hremat._cost.roofline import Rates
from jax_hremat._modes.block_modes import BlockOptions, BlockSearch, SearchConfig
from jax_hremat._modes.loop_modes import LoopSearch
from jax_hremat._partition.blocks import Block, Partition
from jax_hremat._program.graph import Graph
from jax_hremat._program.loop import LoopBody
from jax_hremat._program.region import Region
from jax_hremat._shared import compat as _compat
from jax_hremat._solve.backend import SolverConfig

# Measures one block in one mode.
Measure = Callable[[Block, Region], ModeCost]
Progress = Callable[[str, int, int], None]


def search_options(
    graph: Graph,
    partition: Partition,
    loops: Mapping[int, LoopBody],
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

    Args:
        graph: The program's graph.
        partition: Its blocks.
        loops: The bodies of its scans, by operation.
        measure: Measures a block in a mode.
        rates: The target's.
        config: How many modes.
        solver: Limits of each integer program.
        progress: Told how far it is.

    Returns:
        For each of `partition.unique`, its options.
    """
    times_s = operation_times_s(graph, rates)
    byte_s = 1 / rates.bytes_per_s
    limits = config.for_shares(_residual_shares(graph, partition))

    def search(kind: int) -> BlockSearch | LoopSearch:
        block, scaled = partition.blocks[kind], limits[kind]
        if len(block) == 1 and block.start in loops:
            return LoopSearch(graph, block, loops[block.start], rates, scaled, solver)
        return BlockSearch(graph, block, times_s, byte_s, scaled, solver)

    searches = {kind: search(kind) for kind in partition.unique}
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
