"""The candidate options of one block that are worth compiling, and the options they become.

A candidate is a region (`_plan/region.py`); once compiled or timed, it is an option with a cost.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jax_hremat._cost.option import Option, Origin, pareto
from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._options.checkpoint_all import checkpoint_all
from jax_hremat._options.outputs import with_outputs
from jax_hremat._options.packing import pareto_packings
from jax_hremat._options.roles import PRESETS, Role, named_results
from jax_hremat._options.runs import (
    PRICES,
    Run,
    candidate_runs,
    residuals,
    saving_what_is_made_of_arguments,
)
from jax_hremat._options.segments import segments_of_least_peak
from jax_hremat._partition.blocks import Block, has_deferrable_input
from jax_hremat._plan.region import Region, ValueRef
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.saved import materialised_values, saved_value_sets, value_refs
from jax_hremat._trace.graph import Graph, Operation

# A single run that frees more than this part of what a plain block keeps acts like the whole block.
_MOST = 0.9


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """How many candidate options of each kind of block are compiled.

    A kind of block that holds a fair share of the program's residuals gets all of them; a kind that
    holds less gets fewer.

    Attributes:
        max_runs: The most runs checkpointed alone.
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

    max_runs: int = 10
    max_packings: int = 6
    max_saved_sets: int = 3
    max_segments: int = 5
    fair_share: float = 0.05
    max_candidates: int = 400
    policies: bool = True
    max_workers: int = max(2, min(8, os.cpu_count() or 1))

    def for_shares(self, shares: Mapping[int, float]) -> dict[int, SearchConfig]:
        """The limits of each kind of block, given the kind's share of the residuals."""
        parts = {k: min(1.0, math.sqrt(s / self.fair_share)) for k, s in shares.items()}
        most = self.max_runs + self.max_packings + self.max_saved_sets
        fewer = min(1.0, self.max_candidates / max(most * sum(parts.values()), 1.0))
        return {kind: self.scaled(part * fewer) for kind, part in parts.items()}

    def scaled(self, part: float) -> SearchConfig:
        """The same limits scaled by a part."""
        return replace(
            self,
            max_runs=round(part * self.max_runs),
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
    def regions(self) -> tuple[Region, ...]:
        """The regions of all options, the plain one first, their operations counted from 0."""
        by_hand = (option for _, option in self.by_hand)
        every = (self.plain, self.checkpointed, *by_hand, *self.options)
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
        times_s: Seconds of each operation.
        byte_s: Seconds to move a byte.
        config: How many candidates there may be.
        solver: Limits of the leaf programs.
        at_loss: Whether the block's backward follows its forward at once.
        kept: The same graph, each value with the bytes that are kept of it, where those are not its
            size (`Body.kept`).
        prices: What a freed byte is worth when runs are ranked, in multiples of `byte_s`.
    """

    def __init__(
        self,
        graph: Graph,
        block: Block,
        roles: Mapping[int, Role],
        times_s: Sequence[float],
        byte_s: float,
        config: SearchConfig,
        solver: SolverConfig,
        *,
        at_loss: bool = False,
        kept: Graph | None = None,
        prices: Sequence[float] = PRICES,
    ) -> None:
        self._graph = graph
        self._kept = graph if kept is None else kept
        self._prices = prices
        self._block = block
        self._at_loss = at_loss
        self._roles = roles
        self._config = config
        self._solver = solver
        self.plain = Region(block.start, block.stop)
        self.checkpointed = checkpoint_all(graph, self.plain, self._checkpoint)
        operations = graph.operations[block.start : block.stop]
        self._trivial = not any(op.needs or op.opaque_bytes for op in operations)
        self._times_s = times_s
        self._byte_s = byte_s

    @functools.cached_property
    def _runs(self) -> tuple[Run, ...]:
        if self._trivial or not self._config.max_runs:
            return ()
        graph, block, most = self._kept, self._block, self._config.max_runs
        held = materialised_values(graph, block.start, block.stop, self._solver)
        return candidate_runs(graph, block, held, self._times_s, self._byte_s, most, self._prices)

    @functools.cached_property
    def _segments(self) -> tuple[Run, ...]:
        if self._trivial or not self._config.max_packings:
            return ()
        graph, block = self._kept, self._block
        held = residuals(graph, block)
        return segments_of_least_peak(graph, block, held, self._times_s, at_loss=self._at_loss)

    def plain_regions(self) -> list[Region]:
        """The candidates that need no search: the plain block, and the block as a user would write
        it."""
        if self._trivial:
            return [self.plain]
        return [self.plain, self.checkpointed, *self.hand_regions().values()]

    def first_wave(self) -> list[Region]:
        """Candidates with a single run, in segments, and with values that the checkpointed block
        keeps."""
        if self._trivial:
            return []
        regions = [self._with_runs((run,)) for run in self._runs]
        if self._segments:
            in_segments = self._with_runs(self._segments)
            regions.append(in_segments)
            if self.checkpointed.checkpointed:
                regions.append(replace(self.checkpointed, children=in_segments.children))
        if self.checkpointed.checkpointed:
            regions += [replace(self.checkpointed, saved=refs) for refs in self._saved_sets()]
        return regions

    def second_wave(self, measured: Mapping[Region, OptionCost]) -> list[Region]:
        """Candidates with sets of runs, chosen by what was measured of each run alone. What a run
        makes of arguments alone, such as the cast of a weight, it may keep; what that changes is
        taken from the model. A set whose expected cost a measured option dominates is left out. A
        block that keeps nothing is checkpointed where that binds what its backward writes into."""
        plain = measured[self.plain]
        if self._trivial:
            return [self.checkpointed] if plain.unbound_bytes else []
        regions_alone = {run: self._with_runs((run,)) for run in self._runs}
        alone = {
            run: measured[region] for run, region in regions_alone.items() if region in measured
        }
        by_measure: dict[Run, OptionCost] = {}
        for run, cost in alone.items():
            measured_run = replace(
                run,
                freed_bytes=plain.kept_bytes - cost.kept_bytes,
                added_s=cost.time_s - plain.time_s,
            )
            by_measure[measured_run] = cost
            saving = saving_what_is_made_of_arguments(self._kept, measured_run, self._times_s)
            by_measure[saving] = replace(
                cost,
                kept_bytes=plain.kept_bytes - saving.freed_bytes,
                backward_s=cost.backward_s + saving.added_s - measured_run.added_s,
            )
        count = max(1, self._config.max_packings)
        packings = pareto_packings(list(by_measure), count)
        options = [_option(self._block.start, region, cost) for region, cost in measured.items()]
        regions = []
        for packing in packings:
            region = self._with_runs(packing.runs)
            cost = _together(plain, [by_measure[run] for run in packing.runs])
            expected = _option(self._block.start, region, cost)
            if not any(option.dominates(expected) for option in options):
                regions.append(region)
        if self.checkpointed.checkpointed:
            # Inside a checkpointed block, runs lower the peak of the block's backward, not what the
            # block keeps. A single run that recomputes nearly everything has the same peak as the
            # whole block, so it is left out.
            nested = [
                self._with_runs(p.runs)
                for p in packings
                if len(p.runs) > 1 or p.freed_bytes <= _MOST * plain.kept_bytes
            ]
            regions += [
                replace(self.checkpointed, children=m.children) for m in (nested[:1] + nested[-1:])
            ]
        return regions

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

    def _saved_sets(self) -> list[tuple[ValueRef, ...]]:
        if not self._config.max_saved_sets:
            return []
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


def _together(plain: OptionCost, alone: Sequence[OptionCost]) -> OptionCost:
    """The expected cost of several runs together: times and kept bytes change by the sum of what
    each run alone changes; every other figure is the least of the runs'."""
    return OptionCost(
        forward_s=plain.forward_s + sum(cost.forward_s - plain.forward_s for cost in alone),
        backward_s=plain.backward_s + sum(cost.backward_s - plain.backward_s for cost in alone),
        kept_bytes=plain.kept_bytes + sum(cost.kept_bytes - plain.kept_bytes for cost in alone),
        kept_inputs=_in_all([cost.kept_inputs for cost in alone]),
        kept_outputs=_in_all([cost.kept_outputs for cost in alone]),
        forward_peak_bytes=min(cost.forward_peak_bytes for cost in alone),
        backward_peak_bytes=min(cost.backward_peak_bytes for cost in alone),
    )


def _in_all(positions: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(set(positions[0]).intersection(*positions)))


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
