"""The candidate options of one block that are worth compiling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

from jax_hremat._cost.option import pareto
from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._options.block_options import BlockOptions, block_options, option_of
from jax_hremat._options.by_hand import regions_by_hand
from jax_hremat._options.checkpoint_all import checkpoint_all
from jax_hremat._options.config import PRECISION, Negligible, SearchConfig
from jax_hremat._options.outputs import with_outputs
from jax_hremat._options.packing import packings_of_hull
from jax_hremat._options.roles import Role
from jax_hremat._options.runs import Run, RunModel
from jax_hremat._options.segments import segments_of_least_peak
from jax_hremat._partition.blocks import Block, has_deferrable_input
from jax_hremat._plan.region import Region
from jax_hremat._shared.hull import above_lower_hull
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.saved import SavedValues, saved_value_sets, value_refs
from jax_hremat._trace.graph import Graph

# A single run that frees more than this part of what a plain block keeps acts like the whole block.
_MOST = 0.9
# A set of runs that lowers the hull by less than this part of the time of the block's forward is
# not worth compiling.
_LEAST_GAIN = 2e-3


class BlockSearch:
    """The candidate options of one block; holds no results.

    Args:
        graph: The graph that the block is of.
        block: The block.
        roles: What each matrix product is for, by operation.
        times_s: Seconds of each operation, by the analytic model.
        config: How many candidates there may be.
        solver: Limits of the leaf programs.
        negligible: What makes no difference to the program's plans.
        at_loss: Whether the block's backward follows its forward at once.
    """

    def __init__(
        self,
        graph: Graph,
        block: Block,
        roles: Mapping[int, Role],
        times_s: Sequence[float],
        config: SearchConfig,
        solver: SolverConfig,
        negligible: Negligible,
        *,
        at_loss: bool = False,
    ) -> None:
        self._graph = graph
        self._block = block
        self._negligible = negligible
        self._at_loss = at_loss
        self._roles = roles
        self._config = config
        self._solver = solver
        self.plain = Region(block.start, block.stop)
        self.checkpointed = checkpoint_all(graph, self.plain, self._checkpoint)
        operations = graph.operations[block.start : block.stop]
        self._trivial = not any(op.needs or op.opaque_bytes for op in operations)
        self._times_s = times_s

    def models(self, measured: Mapping[Region, OptionCost]) -> tuple[RunModel, ...]:
        """What runs of the block may free and add: of a block that is compiled by itself, what its
        plain option says. Which inputs other blocks keep anyway is not known: all of them, or those
        that the plain block keeps."""
        profile = measured[self.plain].profile
        assert profile is not None, "the cost of a plain block has its profile"
        graph, block = self._graph, self._block
        computed = frozenset(v for v in block.inputs if graph.values[v].kind == "computed")
        by_plain = frozenset(block.inputs[i] for i in measured[self.plain].kept_inputs)
        kept = dict.fromkeys((computed, by_plain))
        return tuple(RunModel(graph, block, profile, inputs) for inputs in kept)

    def plain_regions(self) -> list[Region]:
        """The candidates that need no search: the plain block, and the block as a user would write
        it."""
        if self._trivial:
            return [self.plain]
        return [self.plain, self.checkpointed, *self.hand_regions().values()]

    def first_wave(
        self, measured: Mapping[Region, OptionCost], *, lower_peak: bool = True
    ) -> list[Region]:
        """Candidates with sets of runs, with runs that XLA may make one kernel of, in segments, and
        with values that the checkpointed block keeps. A block that keeps nothing is checkpointed
        where that binds what its backward writes into.

        Args:
            measured: The costs of the candidates so far that could be compiled, the block as it is
                among them.
            lower_peak: Whether candidates that only lower the peak of the block's backward are
                worth anything.
        """
        if self._trivial:
            return [self.checkpointed] if measured[self.plain].unbound_bytes else []
        models = self.models(measured)
        sets = self._saved_sets(models[0].times_s)
        regions = [r for model in models for r in self._on_hull(model, sets, measured)]
        regions += self._in_one_kernel(models[0])
        if lower_peak:
            regions += self._lowering_peak(models)
        return list(dict.fromkeys(regions))

    def second_wave(
        self, measured: Mapping[Region, OptionCost], *, lower_peak: bool = True
    ) -> list[Region]:
        """Sets of runs again, if one of which XLA may make one kernel made the block faster, and
        the checkpointed block with runs inside: with the fastest, if they are faster than no runs,
        and with those that lower the peak of the block's backward, the fastest and those that keep
        least. A single run that recomputes nearly everything has the same peak as the whole block,
        so it is left out."""
        if self._trivial or not self.checkpointed.checkpointed:
            return []
        plain = measured[self.plain]
        regions: list[Region] = []
        models = self.models(measured)
        tried = {r: measured[r].time_s for r in self._in_one_kernel(models[0]) if r in measured}
        fastest = min(tried, key=lambda region: tried[region], default=self.plain)
        if tried.get(fastest, plain.time_s) < plain.time_s:
            fused = [range(child.start, child.stop) for child in fastest.children]
            for model in models:
                regions += self._on_hull(model.fusing(fused), (), measured)
        options = pareto(
            option_of(region, cost)
            for region, cost in measured.items()
            if region.children and not region.checkpointed
        )
        nested = [option for option in options[:1] if option.cost.time_s < plain.time_s]
        if lower_peak:
            several = [
                option
                for option in options
                if len(option.region.children) > 1
                or option.cost.kept_bytes >= (1 - _MOST) * plain.kept_bytes
            ]
            nested += [*several[:1], *several[-1:]]
        regions += [replace(self.checkpointed, children=o.region.children) for o in nested]
        return list(dict.fromkeys(regions))

    def _on_hull(
        self,
        model: RunModel,
        sets: Sequence[SavedValues],
        measured: Mapping[Region, OptionCost],
    ) -> list[Region]:
        """Sets of runs, sets of values that the checkpointed block keeps, and single runs, each on
        the lower convex hull of seconds added over bytes freed, as far as can be told without
        compiling them; of several that are alike, and of one like a measured option, no other. In a
        set, one run of which too little is expected would spoil the others."""
        count, negligible = self._config.max_packings, self._negligible
        precision_s = max(PRECISION * model.forward_s, negligible.time_s)
        precision_bytes = max(PRECISION * model.kept_bytes, negligible.kept_bytes)
        least_gain_s = self._least_gain_s(model)
        runs = model.runs if count else ()
        packings = packings_of_hull(runs, count, least_gain_s)
        with_runs = {self._with_runs(p.runs): (p.freed_bytes, p.added_s) for p in packings}
        alone = {self._with_runs((run,)): (run.freed_bytes, run.added_s) for run in runs}
        saving = {
            self._keeping(some): (model.freed_bytes(some.values), some.recompute_s) for some in sets
        }
        plain = measured[self.plain]
        taken: list[_Point] = [(0.0, 0.0)]
        for region, cost in measured.items():
            if region != self.plain:
                taken.append((model.freed_bytes_of(plain, cost), cost.time_s - plain.time_s))
        near = [
            *_near_hull(with_runs, precision_s),
            *_near_hull(saving, precision_s),
            *_near_hull(alone, 0.0)[:count],
        ]
        chosen = []
        for region, point in near:
            is_like_another = any(
                abs(point[0] - other[0]) <= precision_bytes
                and abs(point[1] - other[1]) <= precision_s
                for other in taken
            )
            if not is_like_another:
                taken.append(point)
                chosen.append(region)
        return chosen

    def _in_one_kernel(self, model: RunModel) -> list[Region]:
        """The block with the runs checkpointed of which XLA may make one kernel: with that which
        would save most, and with all."""
        if not self._config.max_packings:
            return []
        ranges = model.maybe_in_one_kernel(self._least_gain_s(model))
        sets = dict.fromkeys((tuple(ranges[:1]), tuple(sorted(ranges, key=lambda r: r.start))))
        return [
            self._with_runs([model.run(one.start, one.stop) for one in some])
            for some in sets
            if some
        ]

    def _lowering_peak(self, models: Sequence[RunModel]) -> list[Region]:
        """Candidates that may lower the peak of the block's backward: the single run that lowers it
        most, and the block in segments."""
        runs = [model.lowering_most for model in models if self._config.max_packings]
        regions = [self._with_runs((run,)) for run in runs if run is not None]
        segments = self._segments(models[-1])
        if segments:
            in_segments = self._with_runs(segments)
            regions.append(in_segments)
            if self.checkpointed.checkpointed:
                regions.append(replace(self.checkpointed, children=in_segments.children))
        return regions

    def _least_gain_s(self, model: RunModel) -> float:
        return max(_LEAST_GAIN * model.forward_s, self._negligible.time_s)

    def _segments(self, model: RunModel) -> tuple[Run, ...]:
        if not self._config.max_packings:
            return ()
        return segments_of_least_peak(self._graph, self._block, model, at_loss=self._at_loss)

    def hand_regions(self) -> dict[str, Region]:
        """The block as a user would write it, by the names of policies."""
        return regions_by_hand(
            self._graph, self.checkpointed, self._roles, policies=self._config.policies
        )

    def adopted(self, region: Region) -> Region:
        """The region of another block of the same form, for this block."""

        def here(region: Region) -> Region:
            barrier = region.checkpointed and has_deferrable_input(
                self._graph, self._block, region.start, region.stop
            )
            return replace(region, barrier=barrier, children=tuple(map(here, region.children)))

        return here(region.shifted(self._block.start - region.start))

    def _saved_sets(self, times_s: Mapping[int, float]) -> Sequence[SavedValues]:
        """Sets of values for the checkpointed block to keep, given the seconds of each
        operation."""
        if not self._config.max_saved_sets or not self.checkpointed.checkpointed:
            return []
        found = saved_value_sets(
            self._graph,
            self._block.start,
            self._block.stop,
            times_s,
            self._solver,
            self._config.max_saved_sets + 1,
        )
        return found[1:]

    def _keeping(self, some: SavedValues) -> Region:
        return replace(self.checkpointed, saved=value_refs(self._graph, some.values))

    def _with_runs(self, runs: Sequence[Run]) -> Region:
        children = tuple(
            replace(self._checkpoint(run.start, run.stop), saved=value_refs(self._graph, run.saved))
            for run in runs
        )
        return replace(self.plain, children=children)

    def _checkpoint(self, start: int, stop: int) -> Region:
        barrier = has_deferrable_input(self._graph, self._block, start, stop)
        return Region(start, stop, checkpointed=True, barrier=barrier)

    def options(self, measured: Mapping[Region, OptionCost]) -> BlockOptions:
        options = block_options(
            self._block.start, self.plain, self.checkpointed, self.hand_regions(), measured
        )
        return options.mapped(
            lambda option: with_outputs(self._graph, self._block, option, self._times_s)
        )


# Bytes freed, and seconds added.
_Point: TypeAlias = tuple[float, float]
_T = TypeVar("_T")


def _near_hull(points: Mapping[_T, _Point], precision_s: float) -> list[tuple[_T, _Point]]:
    """The points on the lower convex hull of them and of the plain block, which frees nothing, or
    less than `precision_s` above it."""
    useful = {key: p for key, p in points.items() if p[0] > 0 or p[1] < 0}
    heights_s = above_lower_hull([*useful.values(), (0, 0.0)])[:-1]
    near = zip(useful.items(), heights_s, strict=True)
    return [item for item, height_s in near if height_s <= precision_s]
