"""The search for the options of kinds of blocks that differ in sizes alone.

The largest kind is searched. The smallest is compiled under the options found, and so are the first
and the last of the kinds whose sizes lie on a line (`_options/lines.py`); the kinds in between are
compiled only as they are, and the costs of their other options are interpolated
(`_options/scaling.py`). What a user would write by hand, and is none of these options in another
kind, is compiled in that kind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._options.block_options import BlockOptions
from jax_hremat._options.block_search import BlockSearch
from jax_hremat._options.branch_options import BranchSearch
from jax_hremat._options.loop_options import LoopSearch
from jax_hremat._options.scaling import End, interpolated_cost
from jax_hremat._partition.blocks import Block
from jax_hremat._plan.region import Region

# Candidate regions of one block, in waves, and what becomes of them once they are priced. Each wave
# follows from the block, the configuration and the costs that are passed in: those of all
# candidates so far that could be compiled, the block as it is among them. Every region covers the
# block exactly.
OptionSearch: TypeAlias = BlockSearch | LoopSearch | BranchSearch


class Costs(Protocol):
    """The costs of candidates, found in the background."""

    def start(self, kind: int, regions: Iterable[Region]) -> None:
        """Begin to find the costs of candidates of a kind, in the background."""
        ...

    def of(self, kind: int) -> Mapping[Region, OptionCost]:
        """Wait for the costs of all candidates of a kind that were started."""
        ...


@dataclass(frozen=True, slots=True)
class Family:
    """Kinds of blocks of one form.

    Attributes:
        kind: The kind that is searched.
        search: Its search.
        others: The searches of the other kinds.
        ends: For each kind whose costs are interpolated, the two kinds that they are made of.
        blocks: A block of each kind.
        later: The kinds of the blocks after all blocks of the family.
    """

    kind: int
    search: OptionSearch
    others: Mapping[int, BlockSearch]
    ends: Mapping[int, tuple[int, int]]
    blocks: Mapping[int, Block]
    later: Collection[int] = ()

    @property
    def waves(self) -> Sequence[Callable[[Costs], None]]:
        """What begins to find the costs of further candidates, in order."""
        return (self._plain, self._first, self._second, self._of_others)

    @property
    def num_started(self) -> int:
        """How many times the waves start candidates."""
        return 3 + 2 * len(self.others)

    def options(self, costs: Costs) -> dict[int, BlockOptions]:
        """The options of each kind, after all waves."""
        found = {self.kind: self.search.options(costs.of(self.kind))}
        regions = found[self.kind].near_hull
        for kind, search in self.others.items():
            compiled = costs.of(kind)
            every = self._interpolated(kind, regions, costs) if kind in self.ends else {}
            every |= compiled
            found[kind] = replace(search.options(every), num_measured=len(compiled))
        return found

    def _plain(self, costs: Costs) -> None:
        costs.start(self.kind, self.search.plain_regions())
        for kind, search in self.others.items():
            costs.start(kind, [search.plain])

    def _first(self, costs: Costs) -> None:
        measured, lower_peak = costs.of(self.kind), self._may_set_peak(costs)
        costs.start(self.kind, self.search.first_wave(measured, lower_peak=lower_peak))

    def _second(self, costs: Costs) -> None:
        measured, lower_peak = costs.of(self.kind), self._may_set_peak(costs)
        costs.start(self.kind, self.search.second_wave(measured, lower_peak=lower_peak))

    def _may_set_peak(self, costs: Costs) -> bool:
        """Whether the backward of a block of the searched kind may be where the program needs most
        memory: no later block's backward, which runs while at least as much is kept for earlier
        blocks, needs more in every option. What a group around the block keeps for its recompute is
        not looked at."""
        measured = costs.of(self.kind)
        by_hand = [measured[r] for r in self.search.plain_regions() if r in measured]
        peak_bytes = max(cost.backward_peak_bytes for cost in by_hand)
        return all(
            min(cost.backward_peak_bytes for cost in costs.of(kind).values()) <= peak_bytes
            for kind in self.later
        )

    def _of_others(self, costs: Costs) -> None:
        if not self.others:
            return
        regions = self.search.options(costs.of(self.kind)).near_hull
        for kind, search in self.others.items():
            found = self._regions_of(kind, regions)
            own = [region for region in search.plain_regions() if region not in found]
            costs.start(kind, own if kind in self.ends else [*found, *own])

    def _regions_of(self, kind: int, regions: Iterable[Region]) -> list[Region]:
        """Regions of options, as candidates of a kind of the family."""
        if kind == self.kind:
            start = self.search.plain_regions()[0].start
            return [region.shifted(start) for region in regions]
        return [self.others[kind].adopted(region) for region in regions]

    def _interpolated(
        self, kind: int, regions: Sequence[Region], costs: Costs
    ) -> dict[Region, OptionCost]:
        as_it_is = self.others[kind].plain
        plain = costs.of(kind)[as_it_is]
        both = [self._at(end, kind, regions, costs) for end in self.ends[kind]]
        found = {
            region: interpolated_cost(plain, ends)
            for region, *at_ends in zip(self._regions_of(kind, regions), *both, strict=True)
            if (ends := [end for end in at_ends if end is not None])
        }
        return found

    def _at(self, end: int, kind: int, regions: Sequence[Region], costs: Costs) -> list[End | None]:
        """The options, the plain one first, as compiled for a kind at an end, and what they keep in
        terms of another kind's inputs; None where one does not compile."""
        there, compiled = self._regions_of(end, regions), costs.of(end)
        blocks = self.blocks

        def of_kind(cost: OptionCost) -> OptionCost:
            kept = blocks[kind].inputs_alike(cost.kept_inputs, blocks[end])
            return replace(cost, kept_inputs=kept)

        return [
            End(compiled[there[0]], of_kind(compiled[region])) if region in compiled else None
            for region in there
        ]
