"""The candidate options of one scan worth compiling: of its body, and segments of its steps.

Every candidate is compiled as the whole scan at its full length, so its cost includes the stacking
of the residuals of all steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._options.block_options import BlockOptions, block_options
from jax_hremat._options.config import SearchConfig
from jax_hremat._options.inner import BodySearch, near_divisor
from jax_hremat._partition.blocks import Block
from jax_hremat._plan.region import Loop, Region
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._trace.bodies import Scan
from jax_hremat._trace.graph import Graph
from jax_hremat._xla.rates import Rates

# From this many steps on, segments of segments are tried.
_TWO_LEVELS = 27


class LoopSearch:
    """The candidate options of a block that is one scan; holds no results."""

    def __init__(
        self,
        graph: Graph,
        block: Block,
        scan: Scan,
        rates: Rates,
        config: SearchConfig,
        solver: SolverConfig,
    ) -> None:
        self._block = block
        self._trips = scan.trips
        self._config = config
        self.plain = Region(block.start, block.stop)
        self.checkpointed = replace(
            self.plain, checkpointed=not graph.operations[block.start].effectful
        )
        self._body = BodySearch(scan.body, rates, config, solver)

    def plain_regions(self) -> list[Region]:
        regions = [self.plain, self.checkpointed]
        return regions + [
            self._scan(b) for b in self._body.plain_regions() if b != self._body.plain
        ]

    def first_wave(
        self, measured: Mapping[Region, OptionCost], *, lower_peak: bool = True
    ) -> list[Region]:
        plain = {self._body.plain: measured[self.plain]}
        found = self._body.first_wave(plain, lower_peak=lower_peak)
        return [self._scan(body) for body in (*found, *self._body.nested_regions())]

    def second_wave(
        self, measured: Mapping[Region, OptionCost], *, lower_peak: bool = True
    ) -> list[Region]:
        # Sets of runs are chosen only from bodies whose inner scans and conds are plain.
        nested = self._body.nested_regions()
        of_body = {self._body.plain: measured[self.plain]}
        of_body |= {
            child.loop.body: cost
            for region, cost in measured.items()
            for child in region.children
            if child.loop is not None and child.loop.body not in nested
        }
        with_runs = self._body.second_wave(of_body, lower_peak=lower_peak)
        packed = [body for body in with_runs if body != self._body.plain]
        regions = [self._scan(body) for body in packed]
        if self.checkpointed.checkpointed:
            least = min(of_body, key=lambda body: (of_body[body].kept_bytes, of_body[body].time_s))
            bodies = dict.fromkeys([self._body.plain, self._body.checkpointed, least, *nested])
            regions += [
                self._scan(body, segments)
                for segments in _segments(self._trips, self._config.max_segments)
                for body in bodies
            ]
        return regions

    def options(self, measured: Mapping[Region, OptionCost]) -> BlockOptions:
        by_hand = {name: self._scan(body) for name, body in self._body.hand_regions().items()}
        return block_options(self._block.start, self.plain, self.checkpointed, by_hand, measured)

    def _scan(self, body: Region, segments: tuple[int, ...] = ()) -> Region:
        start = self._block.start
        return replace(self.plain, children=(Region(start, start + 1, loop=Loop(body, segments)),))


def _segments(trips: int, count: int) -> list[tuple[int, ...]]:
    """Segment lengths to try, spaced geometrically from one step to all; then two levels of them.

    With n steps, one level of √n keeps 2 √n carries at once and two levels of ∛n keep 3 ∛n
    (Chen et al. 2016, section 4.3).
    """
    lengths = [near_divisor(round(trips ** (i / (count + 1))), trips) for i in range(1, count + 1)]
    tried: list[tuple[int, ...]] = [(s,) for s in dict.fromkeys(lengths) if 1 < s < trips]
    if tried and trips >= _TWO_LEVELS:
        outer = near_divisor(round(trips ** (2 / 3)), trips)
        inner = near_divisor(round(outer**0.5), outer)
        if trips > outer > inner > 1:
            tried.append((outer, inner))
    return tried
