"""The candidate options of one block that are worth compiling, and the options they become.

A candidate is a region (`_plan/region.py`); once compiled or timed, it is an option with a cost.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from jax_hremat._cost.option import Option, Origin, pareto
from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._options.checkpoint_all import checkpoint_all
from jax_hremat._options.outputs import with_outputs
from jax_hremat._options.packing import packings_of_hull
from jax_hremat._options.roles import PRESETS, Role, named_results
from jax_hremat._options.runs import Run, RunModel
from jax_hremat._options.segments import segments_of_least_peak
from jax_hremat._partition.blocks import Block, has_deferrable_input
from jax_hremat._plan.region import Region
from jax_hremat._shared.hull import above_lower_hull
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.saved import SavedValues, saved_value_sets, value_refs
from jax_hremat._trace.graph import Graph, Operation

# A single run that frees more than this part of what a plain block keeps acts like the whole block.
_MOST = 0.9
# What a candidate frees and adds is known to this part of what the block keeps and of the time of
# its forward.
_PRECISION = 1e-2
# A set of runs that lowers the hull by less than this part of that time is not worth compiling.
_LEAST_GAIN = 2e-3


@dataclass(frozen=True, slots=True)
class Negligible:
    """What makes no difference to the program's plans, if an option of a block is better by it.

    Attributes:
        kept_bytes: Bytes kept between the block's forward and its backward.
        time_s: Seconds.
    """

    kept_bytes: float = 0.0
    time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """How many candidate options of each kind of block are compiled.

    A kind of block that holds a fair share of the program's residuals gets all of them; a kind that
    holds less gets fewer.

    Attributes:
        max_packings: The most sets of runs checkpointed together.
        max_saved_sets: The most sets of values that a wholly checkpointed block keeps.
        max_segments: The most lengths of checkpointed segments of a scan.
        fair_share: Share of the program's residual bytes from which a kind gets the maximum.
        max_candidates: The most candidates of the whole program, the plain, checkpointed and
            standard ones of each kind not counted; with very many kinds, each kind gets fewer.
        policies: Whether the block is also compiled under each policy by which a user would write
            it.
        max_workers: The most compilations at a time.
    """

    max_packings: int = 6
    max_saved_sets: int = 3
    max_segments: int = 5
    fair_share: float = 0.05
    max_candidates: int = 200
    policies: bool = True
    max_workers: int = max(2, min(8, os.cpu_count() or 1))

    def for_shares(self, shares: Mapping[int, float]) -> dict[int, SearchConfig]:
        """The limits of each kind of block, given the kind's share of the residuals."""
        parts = {k: min(1.0, math.sqrt(s / self.fair_share)) for k, s in shares.items()}
        most = self.max_packings + self.max_saved_sets
        fewer = min(1.0, self.max_candidates / max(most * sum(parts.values()), 1.0))
        return {kind: self.scaled(part * fewer) for kind, part in parts.items()}

    def scaled(self, part: float) -> SearchConfig:
        """The same limits scaled by a part."""
        return replace(
            self,
            max_packings=round(part * self.max_packings),
            max_saved_sets=round(part * self.max_saved_sets),
            max_segments=round(part * self.max_segments),
        )


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """The options of one kind of block.

    Attributes:
        options: The Pareto-optimal options, fastest first.
        plain: The block without checkpoints.
        checkpointed: The block under one `jax.checkpoint` without a policy, except operations that
            must run exactly once.
        by_hand: (policy name, option) pairs: the block as a user would write it under the policy;
            "block" stands for `jax.checkpoint` without a policy.
        num_measured: How many options were compiled or timed.
    """

    options: tuple[Option, ...]
    plain: Option
    checkpointed: Option
    by_hand: tuple[tuple[str, Option], ...]
    num_measured: int

    @property
    def near_hull(self) -> tuple[Region, ...]:
        """The regions worth trying in a block that differs in sizes alone, the plain one first:
        those of the options on the lower convex hull of time over bytes kept, or hardly above it,
        and those that need no search."""
        points = [(option.cost.kept_bytes, option.cost.time_s) for option in self.options]
        precision_s = _PRECISION * self.plain.cost.forward_s
        heights_s = above_lower_hull(points)
        near = (o for o, h in zip(self.options, heights_s, strict=True) if h <= precision_s)
        by_hand = (option for _, option in self.by_hand)
        every = (self.plain, self.checkpointed, *by_hand, *near)
        return tuple(dict.fromkeys(option.region for option in every))

    @property
    def in_groups(self) -> tuple[Option, ...]:
        """The options that a group may use: the Pareto-optimal ones, the plain one unless one of
        them has the same costs, and every option of `by_hand` that keeps values by name, even if it
        is dominated."""
        also = [option for _, option in self.by_hand if option.origin == "names"]
        if not any(o.dominates(self.plain) and self.plain.dominates(o) for o in self.options):
            also.insert(0, self.plain)
        return tuple(dict.fromkeys((*self.options, *also)))

    def mapped(self, change: Callable[[Option], Option]) -> BlockOptions:
        """The same options, each changed by a function."""
        return replace(
            self,
            options=tuple(map(change, self.options)),
            plain=change(self.plain),
            checkpointed=change(self.checkpointed),
            by_hand=tuple((name, change(option)) for name, option in self.by_hand),
        )

    def under_policy(self, policy: str) -> Option:
        """The block as a user would write it under a policy; plain if there is no such option."""
        return dict(self.by_hand).get(policy, self.plain)


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
        negligible: Negligible = Negligible(),
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

    def models(
        self, measured: Mapping[Region, OptionCost], *, in_one_kernel: bool = False
    ) -> tuple[RunModel, ...]:
        """What runs of the block may free and add: of a block that is compiled by itself, what its
        plain option says. Which inputs other blocks keep anyway is not known: all of them, or those
        that the plain block keeps."""
        profile = measured[self.plain].profile
        assert profile is not None, "the cost of a plain block has its profile"
        graph, block = self._graph, self._block
        computed = frozenset(v for v in block.inputs if graph.values[v].kind == "computed")
        by_plain = frozenset(block.inputs[i] for i in measured[self.plain].kept_inputs)
        kept = dict.fromkeys((computed, by_plain))
        return tuple(
            RunModel(graph, block, profile, inputs, in_one_kernel=in_one_kernel) for inputs in kept
        )

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
        where that binds what its backward writes into."""
        if self._trivial:
            return [self.checkpointed] if measured[self.plain].unbound_bytes else []
        models = self.models(measured)
        sets = self._saved_sets(models[0])
        regions = [r for model in models for r in self._on_hull(model, sets, measured)]
        regions += self._in_one_kernel(measured)
        if lower_peak:
            regions += [r for model in models for r in self._lowering_peak(model)]
        segments = self._segments(models[-1]) if lower_peak else ()
        if segments:
            in_segments = self._with_runs(segments)
            regions.append(in_segments)
            if self.checkpointed.checkpointed:
                regions.append(replace(self.checkpointed, children=in_segments.children))
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
        tried = (measured.get(region, plain) for region in self._in_one_kernel(measured))
        if any(cost.time_s < plain.time_s for cost in tried):
            for model in self.models(measured, in_one_kernel=True):
                regions += self._on_hull(model, (), measured)
        options = pareto(
            _option(0, region, cost)
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
        """Sets of runs, and sets of values that the checkpointed block keeps, on the lower convex
        hull of seconds added over bytes freed, as far as can be told without compiling them; of
        several that are alike, and of one like a measured option, no other."""
        count, negligible = self._config.max_packings, self._negligible
        precision_s = max(_PRECISION * model.forward_s, negligible.time_s)
        precision_bytes = max(_PRECISION * model.kept_bytes, negligible.kept_bytes)
        least_gain_s = self._least_gain_s(model)
        packings = packings_of_hull(model.runs() if count else [], count, least_gain_s)
        with_runs = {self._with_runs(p.runs): (p.freed_bytes, p.added_s) for p in packings}
        saving = {
            replace(self.checkpointed, saved=value_refs(self._graph, s.values)): (
                model.freed_bytes(s.values),
                s.recompute_s,
            )
            for s in sets
        }
        plain = measured[self.plain]
        taken: list[_Point] = [(0.0, 0.0)]
        for region, cost in measured.items():
            if region != self.plain:
                taken.append((model.freed_bytes_of(plain, cost), cost.time_s - plain.time_s))
        near = [*_near_hull(with_runs, precision_s), *_near_hull(saving, precision_s)]
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

    def _in_one_kernel(self, measured: Mapping[Region, OptionCost]) -> list[Region]:
        """The block with the runs checkpointed of which XLA may make one kernel: with that which
        would save most, and with all."""
        if not self._config.max_packings:
            return []
        model = self.models(measured, in_one_kernel=True)[0]
        runs = model.faster_runs(self._least_gain_s(model))
        sets = dict.fromkeys((tuple(runs[:1]), tuple(sorted(runs, key=lambda run: run.start))))
        return [self._with_runs(some) for some in sets if some]

    def _lowering_peak(self, model: RunModel) -> list[Region]:
        """Single runs on the lower convex hull of seconds added over bytes by which they lower the
        peak of the block's backward."""
        count = self._config.max_packings
        runs = model.runs() if count else []
        lowering = {run: (model.lowered_bytes(run), run.added_s) for run in runs}
        return [self._with_runs((run,)) for run, _ in _near_hull(lowering, 0.0)[:count]]

    def _least_gain_s(self, model: RunModel) -> float:
        return max(_LEAST_GAIN * model.forward_s, self._negligible.time_s)

    def _segments(self, model: RunModel) -> tuple[Run, ...]:
        if not self._config.max_packings:
            return ()
        return segments_of_least_peak(self._graph, self._block, model, at_loss=self._at_loss)

    def hand_regions(self) -> dict[str, Region]:
        """The block under `jax.checkpoint`: without a policy, under each standard policy, and under
        MaxText's presets. Each region lists its saved values one by one. Of a product with a
        `checkpoint_name`, a preset keeps the named value."""
        if not self.checkpointed.checkpointed:
            return {"block": self.checkpointed} if self.checkpointed.children else {}
        if not self._config.policies:
            return {"block": self.checkpointed}
        operations = self._graph.operations[self._block.start : self._block.stop]
        products = [op for op in operations if op.primitive == "dot_general"]
        saved = {
            "block": [],
            "dots_saveable": _results(products),
            "dots_with_no_batch_dims_saveable": _results(
                op for op in products if not op.has_batch_dims
            ),
        }
        named = named_results(self._graph, self._block.start, self._block.stop)
        for name, preset in PRESETS.items() if self._roles else ():
            by_role = [op for op in operations if self._roles.get(op.id) in preset.roles]
            instead = named if preset.by_name else {}
            saved[name] = [instead.get(op.id, v) for op in by_role for v in op.outputs]
        return {
            name: replace(self.checkpointed, saved=value_refs(self._graph, kept))
            for name, kept in saved.items()
        }

    def adopted(self, region: Region) -> Region:
        """The region of another block of the same form, for this block."""

        def here(region: Region) -> Region:
            barrier = region.checkpointed and has_deferrable_input(
                self._graph, self._block, region.start, region.stop
            )
            return replace(region, barrier=barrier, children=tuple(map(here, region.children)))

        return here(region.shifted(self._block.start - region.start))

    def _saved_sets(self, model: RunModel) -> Sequence[SavedValues]:
        """Sets of values for the checkpointed block to keep."""
        if not self._config.max_saved_sets or not self.checkpointed.checkpointed:
            return []
        found = saved_value_sets(
            self._graph,
            self._block.start,
            self._block.stop,
            model.times_s,
            self._solver,
            self._config.max_saved_sets + 1,
        )
        return found[1:]

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


def _results(operations: Iterable[Operation]) -> list[int]:
    return [v for op in operations for v in op.outputs]


def block_options(
    start: int,
    plain: Region,
    checkpointed: Region,
    by_hand: Mapping[str, Region],
    measured: Mapping[Region, OptionCost],
) -> BlockOptions:
    """The options of one block, from the measured costs of its candidates.

    Args:
        start: The block's first operation.
        plain: The plain region.
        checkpointed: The region that checkpoints the whole block.
        by_hand: Regions that a user would write, by the name of the policy.
        measured: The cost of each region that was compiled or timed.
    """

    def option(region: Region) -> Option:
        return _option(start, region, measured[region])

    return BlockOptions(
        options=pareto(option(region) for region in measured),
        plain=option(plain),
        checkpointed=option(checkpointed if checkpointed in measured else plain),
        by_hand=tuple(
            (name, option(region)) for name, region in by_hand.items() if region in measured
        ),
        num_measured=len(measured),
    )


def _option(start: int, region: Region, cost: OptionCost) -> Option:
    return Option(region.shifted(-start), cost, _origin(region))


def _origin(region: Region) -> Origin:
    if any(r.loop is not None for _, r in region.walk()):
        return "loop"
    if any(r.branches for _, r in region.walk()):
        return "branches"
    if region.saved:
        return "names"
    if region.children:
        return "runs"
    return "checkpointed" if region.checkpointed else "plain"
