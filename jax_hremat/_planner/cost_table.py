"""`Step` -> `CostTable`: the blocks of a program, their options and what these cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from jax_hremat._cost.option import Option
from jax_hremat._cost.source import block_prices
from jax_hremat._emit.step import Step
from jax_hremat._options.block_options import BlockOptions
from jax_hremat._options.chain import make_chain
from jax_hremat._options.search import search_options
from jax_hremat._partition.blocks import Partition, partition_graph
from jax_hremat._partition.tree import block_tree
from jax_hremat._planner.config import PlannerConfig
from jax_hremat._planner.standard import layer_selection
from jax_hremat._primitives.kernels import KernelBook
from jax_hremat._shared.progress import Progress
from jax_hremat._solve.chain import Chain, Selection
from jax_hremat._solve.keeping import keeping_columns
from jax_hremat._solve.nests import nest_columns
from jax_hremat._trace.bodies import Cond, Scan, bodies_of
from jax_hremat._trace.graph import Graph, build_graph
from jax_hremat._trace.sharding import on_one_device
from jax_hremat._trace.trace import Program
from jax_hremat._xla.cache import CompileCache
from jax_hremat._xla.inferred_sharding import inferred_shardings
from jax_hremat._xla.rates import rates
from jax_hremat._xla.target import Target


@dataclass(frozen=True, slots=True)
class CostTable:
    """The blocks of a program and their costs, known before any whole step is compiled.

    Attributes:
        program: The program.
        graph: The program's operations and values.
        partition: The program's blocks.
        bodies: The program's scans and conds, by operation.
        options: Options of each kind of block.
        timings_s: Seconds spent, by stage.
    """

    program: Program
    graph: Graph
    partition: Partition
    bodies: Mapping[int, Scan | Cond]
    options: dict[int, BlockOptions]
    timings_s: Mapping[str, float]

    @property
    def num_measured(self) -> int:
        """How many options of blocks were compiled or timed."""
        return sum(o.num_measured for o in self.options.values())

    def chain(
        self,
        always_bytes: int,
        choose: Callable[[BlockOptions], Sequence[Option]] | None = None,
    ) -> Chain:
        """The program as a chain, with all options or those chosen for each kind of block.

        Args:
            always_bytes: Bytes that are alive in every plan.
            choose: Selects some options of a kind of block. Without `choose`, groups may also keep
                values of their blocks, and have groups inside.
        """
        of_blocks = self.of_blocks
        if choose is not None:
            return self._chain_of(always_bytes, [choose(options) for options in of_blocks])
        chain = self._chain_of(always_bytes, [options.in_groups for options in of_blocks])
        return self.with_nests(replace(chain, listed=keeping_columns(chain)))

    def with_nests(self, chain: Chain) -> Chain:
        """The chain, of which groups may also have groups inside."""
        nests = nest_columns(chain, block_tree(self.partition.kinds))
        return replace(chain, listed=(*chain.listed, *nests))

    def _chain_of(self, always_bytes: int, chosen: Sequence[Sequence[Option]]) -> Chain:
        some = [tuple(dict.fromkeys(options)) for options in chosen]
        return make_chain(self.graph, self.partition, self.options, some, always_bytes)

    def layers_under(self, policy: str, chain: Chain, every: int = 1) -> Selection:
        """Every layer, or one in `every` layers, under a named policy; all other blocks plain."""
        plain = [o.plain for o in self.of_blocks]
        under_policy = [o.under_policy(policy) for o in self.of_blocks]
        return layer_selection(chain, self.partition.kinds, plain, under_policy, every)

    @property
    def has_scans(self) -> bool:
        """Whether the program has a scan to plan."""
        return any(isinstance(body, Scan) for body in self.bodies.values())

    @property
    def of_blocks(self) -> list[BlockOptions]:
        """The options of each block."""
        return [self.options[kind] for kind in self.partition.kinds]

    @property
    def policies(self) -> list[str]:
        """Names of the policies under which a user would write a block; of policies that result in
        the same options, only the first."""
        names = [name for options in self.options.values() for name, _ in options.by_hand]
        found: dict[tuple[Option, ...], str] = {}
        for name in dict.fromkeys(names):
            found.setdefault(tuple(o.under_policy(name) for o in self.options.values()), name)
        return list(found.values())


def priced(
    step: Step,
    target: Target,
    config: PlannerConfig,
    trace_s: float,
    cache: CompileCache | None,
    progress: Progress,
    kernels: KernelBook | None = None,
) -> CostTable:
    """Build the graph, the partition, and the options of each kind of block with their costs."""
    program = step.program
    timings = {"trace": trace_s}
    with timed(timings, "trace"):
        graph = build_graph(program)
    # Inside a `shard_map` the program is already that of one device.
    if step.mesh is not None and not (program.mesh is not None and program.mesh.manual):
        with timed(timings, "layout"):
            graph = on_one_device(program, graph, inferred_shardings(step, step.mesh, target))
    with timed(timings, "partition"):
        partition = partition_graph(graph, config.partitioners[0])
        bodies = bodies_of(program, graph)
    with (
        timed(timings, "cost"),
        block_prices(config.cost, program, graph, target, cache, kernels) as price,
    ):
        options = search_options(
            graph,
            partition,
            bodies,
            price,
            rates(target, kernels),
            config.search,
            config.solver,
            progress,
        )
    return CostTable(program, graph, partition, bodies, options, timings)


@contextmanager
def timed(timings_s: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        timings_s[stage] = timings_s.get(stage, 0.0) + time.perf_counter() - start
