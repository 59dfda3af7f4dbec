"""`Graph`, `Partition` -> options of every kind of block: candidates, compiled, then pruned."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from jax_hremat._cost.analytic import operation_times_s
from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._cost.source import Price
from jax_hremat._jax.trace_context import in_settings_of_this_thread
from jax_hremat._options.block_options import BlockOptions
from jax_hremat._options.block_search import BlockSearch
from jax_hremat._options.branch_options import BranchSearch
from jax_hremat._options.config import Negligible, SearchConfig
from jax_hremat._options.family import Family, OptionSearch
from jax_hremat._options.lines import lines
from jax_hremat._options.loop_options import LoopSearch
from jax_hremat._options.roles import product_roles
from jax_hremat._partition.blocks import Block, Partition
from jax_hremat._plan.region import Region
from jax_hremat._shared.errors import CompilationError
from jax_hremat._shared.progress import Progress
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._trace.bodies import Cond, Scan
from jax_hremat._trace.graph import Graph
from jax_hremat._xla.rates import Rates

_logger = logging.getLogger("jax_hremat")

# Options of all blocks of a kind that differ by less than this part of what the program keeps, and
# of the time of its forward, make no difference to its plans.
_NEGLIGIBLE = 1e-3


def search_options(
    graph: Graph,
    partition: Partition,
    bodies: Mapping[int, Scan | Cond],
    price: Price,
    rates: Rates,
    config: SearchConfig,
    solver: SolverConfig,
    progress: Progress,
) -> dict[int, BlockOptions]:
    """Find the options of every kind of block.

    Candidates are compiled in parallel, in waves: first the whole block, plain, checkpointed and
    under the standard policies; then, chosen by what the plain block's operations take, sets of
    runs, the block in segments, and sets of values to keep; then the best sets of runs inside the
    checkpointed block. A candidate that does not compile is left out, with a
    warning. Of kinds of blocks that differ only in sizes, one is searched (`_options/family.py`).

    Args:
        graph: The program's graph.
        partition: The program's blocks.
        bodies: The program's scans and conds, by operation.
        price: Finds the cost of a block run as a given region.
        rates: The rates of the target device.
        config: How many candidates to compile.
        solver: Limits of each integer program.
        progress: Called with the stage and the counts of waves of candidates done and in all.

    Returns:
        For each kind of block in `partition.unique`, its options.

    Raises:
        CompilationError: A plain block does not compile.
    """
    times_s = operation_times_s(graph, rates)
    roles = product_roles(graph.operations)
    held = _residual_bytes(graph, partition)
    families = _families(partition, bodies, held)
    total = max(sum(held.values()), 1)
    of_family = {family[0]: sum(held[k] for k in family) for family in families}
    limits = config.for_shares({kind: size / total for kind, size in of_family.items()})
    num_blocks = Counter(partition.kinds)

    def of_block(kind: int, family: Sequence[int]) -> BlockSearch:
        part = _NEGLIGIBLE / sum(num_blocks[k] for k in family)
        return BlockSearch(
            graph,
            partition.blocks[kind],
            roles,
            times_s,
            limits[family[0]],
            solver,
            Negligible(part * total, part * sum(times_s)),
            at_loss=kind == partition.kinds[-1],
        )

    def search(family: Sequence[int]) -> OptionSearch:
        kind = family[0]
        block, limit = partition.blocks[kind], limits[kind]
        inside = _body(block, bodies)
        if isinstance(inside, Scan):
            return LoopSearch(graph, block, inside, rates, limit, solver)
        if isinstance(inside, Cond):
            return BranchSearch(graph, block, inside, rates, limit, solver)
        return of_block(kind, family)

    searches = [
        Family(
            kind=family[0],
            search=search(family),
            others={other: of_block(other, family) for other in family[1:]},
            ends=_ends(family, graph, partition),
            blocks={k: partition.blocks[k] for k in family},
            later=_kinds_after(family, partition),
        )
        for family in families
    ]
    with ThreadPoolExecutor(config.max_workers) as pool:
        num_waves = sum(family.num_started for family in searches)
        prices = _Prices(pool, partition, price, progress, num_waves)
        for wave in zip(*(family.waves for family in searches), strict=True):
            for start in wave:
                start(prices)
        found = {k: options for family in searches for k, options in family.options(prices).items()}
        return {kind: found[kind] for kind in partition.unique}


def _families(
    partition: Partition, bodies: Mapping[int, Scan | Cond], held: Mapping[int, int]
) -> list[tuple[int, ...]]:
    """The kinds of each form, that with the largest blocks first; a scan or a cond is alone."""
    counts = Counter(partition.kinds)
    families: list[tuple[int, ...]] = []
    for kinds in partition.families:
        if _body(partition.blocks[kinds[0]], bodies) is None:
            families.append(tuple(sorted(kinds, key=lambda k: (-held[k] / counts[k], k))))
        else:
            families += [(kind,) for kind in kinds]
    return families


def _kinds_after(family: Sequence[int], partition: Partition) -> tuple[int, ...]:
    """The kinds of the blocks after all blocks of a family."""
    last = max(position for position, kind in enumerate(partition.kinds) if kind in family)
    return tuple(dict.fromkeys(partition.kinds[last + 1 :]))


def _ends(family: Sequence[int], graph: Graph, partition: Partition) -> dict[int, tuple[int, int]]:
    """For each kind of a family that is neither searched nor at an end, the kinds at the ends: of
    the line that its sizes lie on, or of the family."""
    smallest, largest = family[-1], family[0]
    ends = dict.fromkeys(family[1:-1], (smallest, largest))
    sizes = {kind: _made_bytes(partition.blocks[kind], graph) for kind in family}
    for line in lines(sizes):
        ends |= dict.fromkeys(line[1:-1], (line[0], line[-1]))
        for end in (line[0], line[-1]):
            ends.pop(end, None)
    return {kind: ends[kind] for kind in family[1:-1] if kind in ends}


def _made_bytes(block: Block, graph: Graph) -> list[int]:
    operations = graph.operations[block.start : block.stop]
    return [graph.values[v].size_bytes for op in operations for v in op.outputs]


def _body(block: Block, bodies: Mapping[int, Scan | Cond]) -> Scan | Cond | None:
    return bodies.get(block.start) if len(block) == 1 else None


def _residual_bytes(graph: Graph, partition: Partition) -> dict[int, int]:
    """The residual bytes that all blocks of each kind hold, by JAX's linearization."""
    held: dict[int, int] = dict.fromkeys(partition.unique, 0)
    for block, kind in zip(partition.blocks, partition.kinds, strict=True):
        operations = graph.operations[block.start : block.stop]
        values = {v for op in operations for v in op.needs}
        held[kind] += sum(
            graph.values[v].size_bytes for v in values if graph.values[v].kind == "computed"
        ) + sum(op.opaque_bytes for op in operations)
    return held


class _Prices:
    """The costs requested for each kind of block, each candidate once."""

    def __init__(
        self,
        pool: Executor,
        partition: Partition,
        price: Price,
        progress: Progress,
        num_waves: int,
    ) -> None:
        self._pool = pool
        self._partition = partition
        self._price = price
        self._progress = progress
        self._num_waves = num_waves
        self._futures: dict[int, dict[Region, Future[OptionCost | None]]] = {}
        self._waves: list[list[Future[OptionCost | None]]] = []

    def start(self, kind: int, regions: Iterable[Region]) -> None:
        """Begin to find the costs of candidates of a kind, in the background."""
        price = in_settings_of_this_thread(self._price_or_none)
        futures = self._futures.setdefault(kind, {})
        new = [region for region in dict.fromkeys(regions) if region not in futures]
        for region in new:
            futures[region] = self._pool.submit(price, self._partition.blocks[kind], region)
        self._waves.append([futures[region] for region in new])

    def _price_or_none(self, block: Block, region: Region) -> OptionCost | None:
        """The cost of a candidate; None if the compiler fails on a candidate other than the plain
        block."""
        try:
            return self._price(block, region)
        except CompilationError as error:
            if region == Region(block.start, block.stop):
                raise
            where = (block.start, block.stop - 1)
            _logger.warning("a region of operations %d to %d is left out: %s", *where, error)
            return None

    def of(self, kind: int) -> dict[Region, OptionCost]:
        """Wait for, and return, the costs of all candidates of a kind that were started."""
        costs = {}
        for region, future in self._futures[kind].items():
            self._report()
            cost = future.result()
            if cost is not None:
                costs[region] = cost
        self._report()
        return costs

    def _report(self) -> None:
        """Report how many waves of candidates have their costs."""
        done = sum(all(future.done() for future in wave) for wave in self._waves)
        self._progress("costs of blocks", done, self._num_waves)
