"""The modes of one block that are worth compiling, and what becomes of them as options."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jax_hremat._cost.option import Option, Origin, pareto
from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._options.checkpoint_all import checkpoint_all
from jax_hremat._options.packing import pareto_packings
from jax_hremat._options.roles import PRESETS, Role, named_results
from jax_hremat._options.runs import PRICES, Run, candidate_runs
from jax_hremat._partition.blocks import Block, has_deferrable_input
from jax_hremat._plan.region import Region, ValueRef
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.saved import materialised_values, saved_value_sets, value_refs
from jax_hremat._trace.graph import Graph, Operation

# Part of what a plain block keeps beyond which a run that frees it is as good as the whole block.
_MOST = 0.9


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """How many modes of a block are compiled.

    A kind of block gets all of them if it holds a fair share of the program's residuals, fewer
    the less it holds.

    Attributes:
        max_runs: Runs checkpointed alone, for each kind of block.
        max_packings: Sets of runs checkpointed together.
        max_saved_sets: Sets of values that a wholly checkpointed block keeps.
        max_segments: Lengths of checkpointed segments of a scan.
        fair_share: Share of the program's residual bytes from which a kind gets the maximum.
        max_modes: Modes in all, beyond the plain, the checkpointed and the standard ones of each kind;
            where a program has very many kinds, each gets fewer.
        max_workers: Compilations at a time.
    """

    max_runs: int = 10
    max_packings: int = 6
    max_saved_sets: int = 3
    max_segments: int = 5
    fair_share: float = 0.05
    max_modes: int = 400
    max_workers: int = max(2, min(8, os.cpu_count() or 1))

    def for_shares(self, shares: Mapping[int, float]) -> dict[int, SearchConfig]:
        """The limits of each kind, given what part of the residuals it holds."""
        parts = {k: min(1.0, math.sqrt(s / self.fair_share)) for k, s in shares.items()}
        most = self.max_runs + self.max_packings + self.max_saved_sets
        fewer = min(1.0, self.max_modes / max(most * sum(parts.values()), 1.0))
        return {kind: self.scaled(part * fewer) for kind, part in parts.items()}

    def scaled(self, part: float) -> SearchConfig:
        """That part of the modes."""
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
        options: Pareto-optimal ones, fastest first.
        plain: The block left as it is.
        checkpointed: The block under one plain `jax.checkpoint`, as far as it may be.
        by_hand: The block as a user would write it, by the policy's name; "block" is without.
        num_measured: How many modes were compiled or timed.
    """

    options: tuple[Option, ...]
    plain: Option
    checkpointed: Option
    by_hand: tuple[tuple[str, Option], ...]
    num_measured: int

    @property
    def in_groups(self) -> tuple[Option, ...]:
        """All that a group may be made of: the options, the block as it is, and every set of its
        values that is known by name, whatever else beats it where the block is alone."""
        named = (option for _, option in self.by_hand if option.origin == "names")
        return tuple(dict.fromkeys((*self.options, self.plain, *named)))

    def under_policy(self, policy: str) -> Option:
        """The block as a user would write it under a policy; plain if it cannot be."""
        return dict(self.by_hand).get(policy, self.plain)


class BlockSearch:
    """The candidate modes of one block; holds no results."""

    def __init__(
        self,
        graph: Graph,
        block: Block,
        roles: Mapping[int, Role],
        times_s: Sequence[float],
        byte_s: float,
        config: SearchConfig,
        solver: SolverConfig,
    ) -> None:
        self._graph = graph
        self._block = block
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
        return self._best_runs(self._graph, PRICES)

    def _best_runs(self, graph: Graph, prices: Sequence[float]) -> tuple[Run, ...]:
        if self._trivial:
            return ()
        block, most = self._block, self._config.max_runs
        held = materialised_values(graph, block.start, block.stop, self._solver)
        return candidate_runs(graph, block, held, self._times_s, self._byte_s, most, prices)

    def plain_modes(self) -> list[Region]:
        """Those that need no search: the block as it is, and as a user would write it."""
        if self._trivial:
            return [self.plain]
        return [self.plain, self.checkpointed, *self.hand_modes().values()]

    def first_wave(self) -> list[Region]:
        """Single runs, and values kept by the checkpointed block."""
        if self._trivial:
            return []
        modes = [self._with_runs((run,)) for run in self._runs]
        if self.checkpointed.checkpointed:
            modes += [replace(self.checkpointed, saved=refs) for refs in self._saved_sets()]
        return modes

    def second_wave(self, measured: Mapping[Region, OptionCost]) -> list[Region]:
        """Sets of runs, by what each of them alone was measured to do; not those that a mode
        already measured would beat."""
        plain = measured[self.plain]
        modes_alone = {run: self._with_runs((run,)) for run in self._runs}
        alone = {run: measured[mode] for run, mode in modes_alone.items() if mode in measured}
        by_measure = {
            replace(
                run,
                freed_bytes=plain.kept_bytes - cost.kept_bytes,
                added_s=cost.time_s - plain.time_s,
            ): cost
            for run, cost in alone.items()
        }
        count = max(1, self._config.max_packings)
        packings = pareto_packings(list(by_measure), count)
        options = [_option(self._block.start, mode, cost) for mode, cost in measured.items()]
        modes = []
        for packing in packings:
            mode = self._with_runs(packing.runs)
            cost = _together(plain, [by_measure[run] for run in packing.runs])
            expected = _option(self._block.start, mode, cost)
            if not any(option.dominates(expected) for option in options):
                modes.append(mode)
        if self.checkpointed.checkpointed:
            # Inside a checkpointed block the runs lower the peak of its backward, not what it keeps;
            # but one backward that needs nearly everything again peaks as the whole block's does.
            nested = [
                self._with_runs(p.runs)
                for p in packings
                if len(p.runs) > 1 or p.freed_bytes <= _MOST * plain.kept_bytes
            ]
            modes += [
                replace(self.checkpointed, children=m.children) for m in (nested[:1] + nested[-1:])
            ]
        return modes

    def hand_modes(self) -> dict[str, Region]:
        """The block checkpointed, plainly, under each standard policy, and as MaxText's presets would
        have it; the saved values named one by one. Of a product that its author has named, a
        preset keeps what the name is of."""
        if not self.checkpointed.checkpointed:
            return {"block": self.checkpointed} if self.checkpointed.children else {}
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
        children = tuple(self._checkpoint(r.start, r.stop) for r in runs)
        return replace(self.plain, children=children)

    def _checkpoint(self, start: int, stop: int) -> Region:
        barrier = has_deferrable_input(self._graph, self._block, start, stop)
        return Region(start, stop, checkpointed=True, barrier=barrier)

    def options(self, measured: Mapping[Region, OptionCost]) -> BlockOptions:
        return block_options(
            self._block.start, self.plain, self.checkpointed, self.hand_modes(), measured
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
    """What was measured of one block, as options.

    Args:
        start: Its first operation.
        plain: The mode that leaves it as it is.
        checkpointed: The mode that checkpoints all of it.
        by_hand: Modes that a user would write.
        measured: The cost of each mode that was compiled.
    """

    def option(mode: Region) -> Option:
        return _option(start, mode, measured[mode])

    return BlockOptions(
        options=pareto(option(mode) for mode in measured),
        plain=option(plain),
        checkpointed=option(checkpointed if checkpointed in measured else plain),
        by_hand=tuple((name, option(mode)) for name, mode in by_hand.items() if mode in measured),
        num_measured=len(measured),
    )


def _option(start: int, mode: Region, cost: OptionCost) -> Option:
    return Option(mode.shifted(-start), cost, _origin(mode))


def _together(plain: OptionCost, alone: Sequence[OptionCost]) -> OptionCost:
    """What runs are expected to cost together: what each alone saves and adds, in sum, and the
    least of everything else."""
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


def _origin(mode: Region) -> Origin:
    if any(r.loop is not None for _, r in mode.walk()):
        return "loop"
    if any(r.branches for _, r in mode.walk()):
        return "branches"
    if mode.saved:
        return "names"
    if mode.children:
        return "runs"
    return "checkpointed" if mode.checkpointed else "plain"
