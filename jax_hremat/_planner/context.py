"""`Step` -> `PlanningContext`: everything known about a step before a budget is given."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from jax_hremat._cost.kernels import kernel_book
from jax_hremat._cost.option import Option
from jax_hremat._cost.source import CostSource, block_prices
from jax_hremat._emit.step import Step
from jax_hremat._jax.trace_context import in_settings_of_this_thread
from jax_hremat._options.block_options import BlockOptions, SearchConfig
from jax_hremat._options.chain import make_chain
from jax_hremat._options.search import search_options
from jax_hremat._partition.blocks import Partition, Partitioner, partition_graph
from jax_hremat._partition.cut_points import partition_by_width
from jax_hremat._partition.tree import block_tree
from jax_hremat._plan.openings import Openings
from jax_hremat._plan.region import Region
from jax_hremat._planner.standard import (
    COUNTS,
    grouped_selections,
    layer_selection,
)
from jax_hremat._primitives.kernels import KernelBook, KernelPrice
from jax_hremat._shared.errors import UnsupportedConfigError
from jax_hremat._shared.progress import Progress
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.chain import Chain, Selection
from jax_hremat._solve.keeping import keeping_columns
from jax_hremat._solve.nests import nest_columns
from jax_hremat._solve.output_reuse import Result, gradients_of
from jax_hremat._solve.prediction import Prediction, predict
from jax_hremat._solve.regions import Barriers, selection_region
from jax_hremat._strategies.registry import TREE, strategy_of
from jax_hremat._strategies.strategy import Strategy
from jax_hremat._trace.bodies import Cond, Scan, bodies_of
from jax_hremat._trace.graph import Graph, build_graph
from jax_hremat._trace.mesh import is_known
from jax_hremat._trace.sharding import on_one_device
from jax_hremat._trace.trace import Program
from jax_hremat._xla.cache import CompileCache
from jax_hremat._xla.certify import CompiledStep, StepCompiler
from jax_hremat._xla.inferred_sharding import inferred_shardings
from jax_hremat._xla.rates import rates
from jax_hremat._xla.target import Target

_logger = logging.getLogger("jax_hremat")

# Output-buffer reuse is ignored below this part of the live bytes of a step without
# rematerialization.
_WORTH_REUSE = 0.05


Effort = Literal["low", "normal", "high"]


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """How hard the planner tries. `of_effort` gives configurations by name.

    Attributes:
        search: How many options of each kind of block are compiled.
        solver: Limits of each mixed-integer program.
        partitioner: Where the program is cut into blocks: `partition_by_width`,
            `partition_by_repeats`, `partition_by_score`, `partition_flat`, or your own function
            from a graph to positions of operations. With a tuple of several, the program is
            planned with each, and the best plan is returned.
        max_rounds: How many more times the whole step is compiled, after the first plan, to meet
            the budget or to use what is left of it.
        floor_rounds: How many searches, each for a plan a hundredth below the least peak found, are
            made before a budget is refused; the refusal names the least peak found.
        cost: Where the costs of blocks come from: "compiled", a roofline over XLA's compiled
            program; "analytic", from the shapes, where only whole steps are compiled; "measured",
            timed on the target's device, which must be attached.
        cache_dir: Folder for compilation results and plans, so that planning the same program for
            the same target, in any process, does not compile it again. None for the folder of the
            environment variable `JAX_HREMAT_CACHE_DIR`, or for the user's cache folder if that is
            not set; an empty text for no cache. A folder is held to about 1 GiB: what was not used
            for longest is removed.
        kernel_costs: Your own costs of kernels that XLA only calls; they take precedence over
            everything known about a kernel. Keys are the name of the call target, of the Pallas
            kernel or of the primitive; values are functions `(operands, results) -> (flops, bytes)`
            of tuples of `jax.ShapeDtypeStruct`, for one execution on one device. The flops run at
            the rate of matrix products of the first operands' type. Plans made with your own costs
            are not cached, because a cache key cannot tell one function from another.
        open_checkpoints: Whether to plan a program as if its own `jax.checkpoint`s, `nn.remat`s and
            the like were not there. If false, each of them stays one operation that no plan
            changes, and "without rematerialization" means with them.
        unroll_scans: A function with scans of at most this many steps is planned twice: with its
            scans as they are, and as if their steps were written one after another (scans inside
            longer scans or conds stay scans). The better plan is returned. In the second form each
            step is planned on its own, and what it keeps is not copied into a stack and back;
            but compilation takes longer. "Without rematerialization" means with scans.
        strategy: Which system of the field chooses the plan: "tree", the library's own and the
            default; the name of another (`jax-hremat strategies` lists them); or a
            `jax_hremat.Strategy` of your own, whose plans are not cached. A strategy decides where
            the program is cut and which options of blocks are priced; plans of all of them are
            emitted, compiled and certified alike.
    """

    search: SearchConfig = field(default_factory=SearchConfig)
    solver: SolverConfig = field(default_factory=SolverConfig)
    partitioner: Partitioner | tuple[Partitioner, ...] = partition_by_width
    max_rounds: int = 3
    floor_rounds: int = 10
    cost: CostSource = "compiled"
    cache_dir: str | os.PathLike[str] | None = None
    kernel_costs: Mapping[str, KernelPrice] = field(default_factory=dict, hash=False)
    open_checkpoints: bool = False
    unroll_scans: int = 0
    strategy: str | Strategy = TREE

    def __post_init__(self) -> None:
        if self.unroll_scans < 0:
            raise ValueError(
                f"PlannerConfig(unroll_scans={self.unroll_scans}): a number of steps, up to which "
                f"scans are written out, or 0 for none"
            )
        if not self.partitioners:
            raise ValueError("PlannerConfig(partitioner=()): at least one partitioner is needed")
        strategy_of(self.strategy)  # Raises if there is none.
        for name, cost in self.kernel_costs.items():
            if not callable(cost):
                raise ValueError(
                    f"PlannerConfig(kernel_costs={{{name!r}: {cost!r}}}): a kernel's cost is a "
                    f"function of its operands' and its results' shapes that returns (flops, bytes)"
                )
        if self.cost not in get_args(CostSource):
            known = ", ".join(map(repr, get_args(CostSource)))
            raise ValueError(f"PlannerConfig(cost={self.cost!r}): costs are one of {known}")

    @staticmethod
    def of_effort(effort: Effort) -> PlannerConfig:
        """The configuration of a named effort.

        Args:
            effort: "low": about half as many options of each block are compiled, and fewer plans
                for the budget. "normal": `PlannerConfig()`. "high": about twice as many options of
                each block, more plans for the budget, and short scans also written out.

        Raises:
            ValueError: There is no such effort.
        """
        match effort:
            case "low":
                search = SearchConfig(
                    max_runs=3, max_packings=2, max_saved_sets=1, max_segments=2, max_candidates=100
                )
                return PlannerConfig(search=search, max_rounds=2, floor_rounds=2)
            case "normal":
                return PlannerConfig()
            case "high":
                search = SearchConfig(
                    max_runs=20, max_packings=12, max_saved_sets=6, max_candidates=800
                )
                return PlannerConfig(search=search, max_rounds=8, floor_rounds=20, unroll_scans=8)
        known = ", ".join(map(repr, get_args(Effort)))
        raise ValueError(f"effort={effort!r}: the efforts are {known}")

    @property
    def of_strategy(self) -> PlannerConfig:
        """The configuration as the strategy changes it: where it cuts, and what it prices."""
        strategy = strategy_of(self.strategy)
        if strategy is None:
            return self
        return replace(
            self,
            partitioner=tuple(map(strategy.partitioner, self.partitioners)),
            search=strategy.search(self.search),
        )

    @property
    def partitioners(self) -> tuple[Partitioner, ...]:
        """The partitioners with which a program is planned, each once."""
        given = self.partitioner if isinstance(self.partitioner, tuple) else (self.partitioner,)
        return tuple(dict.fromkeys(given))

    @property
    def of_each_partitioner(self) -> list[PlannerConfig]:
        """The configuration with each of the partitioners alone."""
        return [replace(self, partitioner=partitioner) for partitioner in self.partitioners]

    @property
    def forms(self) -> tuple[Openings, ...]:
        """The forms in which a function is planned, that with its scans as they are first."""
        steps = dict.fromkeys((0, self.unroll_scans))
        return tuple(Openings(self.open_checkpoints, scan_steps) for scan_steps in steps)


def config_of(config: PlannerConfig | None, effort: Effort | None) -> PlannerConfig:
    """The configuration given, or that of the effort given, which is "normal" if neither is.

    Raises:
        ValueError: Both are given, or there is no such effort.
    """
    if config is None:
        return PlannerConfig.of_effort("normal" if effort is None else effort)
    if effort is not None:
        raise ValueError(
            f"both effort={effort!r} and config={config!r}: give one of them; to change a named "
            f"effort, give config=dataclasses.replace(PlannerConfig.of_effort({effort!r}), …)"
        )
    return config


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
        only = [tuple(dict.fromkeys(options)) for options in chosen]
        return make_chain(self.graph, self.partition, self.options, always_bytes, only=only)

    def layers_under(self, policy: str, chain: Chain, every: int = 1) -> Selection:
        """Every layer, or one in `every` layers, under a named policy; all other blocks plain."""
        return layer_selection(chain, self.partition.kinds, *self._by_hand(policy), every)

    def _by_hand(self, policy: str) -> tuple[list[Option], list[Option]]:
        """For each block, its plain option and its option under a named policy."""
        of_blocks = self.of_blocks
        return [o.plain for o in of_blocks], [o.under_policy(policy) for o in of_blocks]

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


@dataclass(frozen=True, slots=True)
class PlanningContext:
    """Everything known about a program before a budget is given; plans for any budget follow.

    Attributes:
        step: The step whose memory the budget bounds, with the traced program inside.
        costs: The program's blocks and their costs.
        baseline: The step without rematerialization, compiled.
        compile_step: Compiles the whole step under a plan; remembers what it compiled.
        target: The device that everything was compiled for.
        config: How hard the planner tries.
        timings_s: Seconds spent so far, by stage. For the baseline, only the part of its
            compilation after the costs are known.
        results: The gradients, if the step returns them unchanged and XLA reuses enough of their
            memory before they are written; else empty.
        surplus_bytes: Compiled peak of the baseline less its predicted peak: memory around the
            program, such as an accumulated gradient, which is alive in every plan. 0 where reuse of
            results is predicted, whose error it could be.
    """

    step: Step
    costs: CostTable
    baseline: CompiledStep
    compile_step: StepCompiler
    target: Target
    config: PlannerConfig
    timings_s: Mapping[str, float]
    results: tuple[Result, ...]
    surplus_bytes: int = 0

    def predict(self, chain: Chain, selection: Selection) -> Prediction:
        """The predicted cost of a selection, output-buffer reuse included."""
        return predict(chain, selection, self.results)

    @property
    def program(self) -> Program:
        """The program that is planned."""
        return self.step.program

    @property
    def fixed_bytes(self) -> int:
        """Arguments and outputs, which no plan changes."""
        memory = self.baseline.memory
        return memory.argument_bytes + memory.output_bytes - memory.alias_bytes

    def chain(self, choose: Callable[[BlockOptions], Sequence[Option]] | None = None) -> Chain:
        """The program as a chain, with all options or those chosen for each kind of block."""
        return self.costs.chain(self.fixed_bytes + self.surplus_bytes, choose)

    def standard_plans(self) -> list[tuple[Chain, Selection]]:
        """The plans that a user could write by hand: no checkpoints; every block under one policy;
        only the steps of every scan under one policy; every layer under one policy; one in a few
        layers, or every few consecutive blocks together, under `jax.checkpoint`."""
        names = self.costs.policies
        plain = self.chain(lambda o: (o.plain,))
        plans = [uniform(plain)]
        plans += [
            uniform(self.chain(lambda o, name=name: (o.under_policy(name),))) for name in names
        ]
        if self.costs.has_scans:
            plans += [self.steps_under(name) for name in names]
        plans += [self.layers_under(name) for name in names]
        plans += [self.layers_under("block", every) for every in COUNTS]
        plans += [(plain, selection) for selection in grouped_selections(plain)]
        found: dict[Region, tuple[Chain, Selection]] = {}
        for chain, selection in plans:
            root = selection_region(self.costs.graph, chain, selection, Barriers.NONE)
            found.setdefault(root, (chain, selection))
        return list(found.values())

    def steps_under(self, policy: str) -> tuple[Chain, Selection]:
        """The steps of every scan under a named policy; all other blocks plain."""

        def steps(options: BlockOptions) -> Option:
            under_policy = options.under_policy(policy)
            return under_policy if under_policy.origin == "loop" else options.plain

        return uniform(self.chain(lambda o: (steps(o),)))

    def layers_under(self, policy: str, every: int = 1) -> tuple[Chain, Selection]:
        """Every layer, or one in `every` layers, under a named policy; all other blocks plain."""
        chain = self.chain(lambda o: (o.plain, o.under_policy(policy)))
        return chain, self.costs.layers_under(policy, chain, every)


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


def prepare(
    step: Step, target: Target, config: PlannerConfig, trace_s: float, progress: Progress
) -> PlanningContext:
    """Find the costs and compile the baseline at the same time.

    With measured costs the baseline is compiled first, and the blocks then one at a time, so that
    nothing else runs during a measurement.
    """
    if step.mesh is None and step.program.shardings:
        _logger.warning(
            "the arguments lie on a mesh of several devices, in a way that is not known while they "
            "are being traced, or of a module's call: planned as for one device that holds them "
            "whole. Plan the loss outside the `jit`, with `plan_remat` or `fit_step`, and apply "
            "the plan in it"
        )
    if step.mesh is not None and not all(map(is_known, step.program.shardings)):
        _logger.warning(
            "it is not known how the arguments lie on the mesh (%s) while they are being traced: "
            "planned as if they lay as the compiler likes, given what the function says of its "
            "own values. Plan the loss outside the `jit`, with `plan_remat` or `fit_step`, and "
            "apply the plan in it",
            step.mesh,
        )
    if step.mesh is not None and step.mesh.num_devices > 1 and config.cost != "compiled":
        raise UnsupportedConfigError(
            f"PlannerConfig(cost={config.cost!r}), and the arguments lie on a mesh of devices "
            f"({step.mesh}): what the devices exchange is known only of what is compiled. Plan "
            f"with cost='compiled'"
        )
    cache = CompileCache.at(config.cache_dir)
    if cache is not None:
        cache.trim()
    timings: dict[str, float] = {}
    with timed(timings, "trace"):
        kernels = kernel_book(step, config.kernel_costs)
    compile_whole = StepCompiler(step, target, cache, kernels)
    everything = Region(0, step.program.num_operations)
    with ThreadPoolExecutor(1) as pool:
        baseline = pool.submit(in_settings_of_this_thread(compile_whole), everything)
        if config.cost == "measured":
            config = replace(config, search=replace(config.search, max_workers=1))
            with timed(timings, "baseline"):
                baseline.result()
        trace_s += timings.pop("trace")
        costs = priced(step, target, config, trace_s, cache, progress, kernels)
        timings |= costs.timings_s
        with timed(timings, "baseline"):
            compiled = baseline.result()
    _warn_of_unpriced(compiled)
    context = PlanningContext(
        step=step,
        costs=costs,
        baseline=compiled,
        compile_step=compile_whole,
        target=target,
        config=config,
        timings_s=timings,
        results=() if step.traced is not None else gradients_of(costs.graph, costs.partition),
    )
    plain = uniform(context.chain(lambda o: (o.plain,)))
    predicted = context.predict(*plain)
    if predicted.peak.reused_bytes < _WORTH_REUSE * predicted.peak.live_bytes:
        context = replace(context, results=())
    if context.results:
        # Less reuse than predicted, which other plans need not share.
        return context
    surplus_bytes = max(0, compiled.memory.peak_bytes - context.predict(*plain).peak_bytes)
    return replace(context, surplus_bytes=surplus_bytes)


def _warn_of_unpriced(step: CompiledStep) -> None:
    if step.unpriced_kernels:
        _logger.warning(
            "nothing is known of what these kernels compute, and they are priced at their bytes "
            "alone, so that plans may run them again too freely: %s. Say what they cost with "
            "PlannerConfig(kernel_costs={%r: lambda operands, results: (flops, bytes)})",
            ", ".join(step.unpriced_kernels),
            step.unpriced_kernels[0],
        )


def uniform(chain: Chain) -> tuple[Chain, Selection]:
    return chain, Selection((0,) * len(chain))


@contextmanager
def timed(timings_s: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        timings_s[stage] = timings_s.get(stage, 0.0) + time.perf_counter() - start
