"""How hard the planner tries, and what it may do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, get_args

from jax_hremat._cost.source import CostSource
from jax_hremat._options.config import SearchConfig
from jax_hremat._partition.blocks import Partitioner
from jax_hremat._partition.cut_points import partition_by_width
from jax_hremat._plan.openings import Openings
from jax_hremat._primitives.kernels import KernelPrice
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._strategies.registry import TREE, strategy_of
from jax_hremat._strategies.strategy import Strategy

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
        max_rounds: How many more plans of the solver are compiled, after the first, to meet the
            budget or to use what is left of it; twice as many while none fits.
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
        strategy: Which method chooses the plan: "tree", the library's own and the default; the
            name of a published one (`jax-hremat strategies` lists them); or a
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
                f"PlannerConfig(unroll_scans={self.unroll_scans}) is negative: give the most steps "
                f"that a scan may have to be unrolled, or 0 for none"
            )
        if self.max_rounds < 0 or self.floor_rounds < 0:
            raise ValueError(
                f"PlannerConfig(max_rounds={self.max_rounds}, floor_rounds={self.floor_rounds}): "
                f"neither may be negative"
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
                    max_packings=3, max_saved_sets=1, max_segments=2, max_candidates=50
                )
                return PlannerConfig(search=search, max_rounds=2, floor_rounds=2)
            case "normal":
                return PlannerConfig()
            case "high":
                search = SearchConfig(max_packings=12, max_saved_sets=6, max_candidates=400)
                return PlannerConfig(search=search, max_rounds=8, floor_rounds=20, unroll_scans=8)
        known = ", ".join(map(repr, get_args(Effort)))
        raise ValueError(f"effort={effort!r}: the efforts are {known}")

    @property
    def more_effort(self) -> Effort | None:
        """The next higher effort; None if there is none, or if this is not how hard any tries."""

        def tries(config: PlannerConfig) -> tuple[object, ...]:
            search = replace(config.search, max_workers=1)
            return search, config.max_rounds, config.floor_rounds, config.unroll_scans

        efforts: tuple[Effort, ...] = get_args(Effort)
        for effort, higher in pairwise(efforts):
            if tries(self) == tries(PlannerConfig.of_effort(effort)):
                return higher
        return None

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
