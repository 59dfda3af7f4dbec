"""The candidate options of one cond that are worth compiling: options of its branches.

JAX passes the residuals of every branch to the backward (zeros for a branch not taken). So a cond
keeps the sum over its branches, and each branch can be made to keep less on its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._options.block_options import BlockOptions, block_options
from jax_hremat._options.config import SearchConfig
from jax_hremat._options.inner import BodySearch
from jax_hremat._partition.blocks import Block
from jax_hremat._plan.region import Region
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._trace.bodies import Cond
from jax_hremat._trace.graph import Graph
from jax_hremat._xla.rates import Rates


class BranchSearch:
    """The candidate options of a block that is one cond; holds no results."""

    def __init__(
        self,
        graph: Graph,
        block: Block,
        cond: Cond,
        rates: Rates,
        config: SearchConfig,
        solver: SolverConfig,
    ) -> None:
        self._block = block
        self._config = config
        self.plain = Region(block.start, block.stop)
        self.checkpointed = replace(
            self.plain, checkpointed=not graph.operations[block.start].effectful
        )
        share = config.scaled(1 / len(cond.branches))
        self._branches = [BodySearch(body, rates, share, solver) for body in cond.branches]

    def plain_regions(self) -> list[Region]:
        return [self.plain, self.checkpointed, *self._by_hand().values()]

    def first_wave(
        self, measured: Mapping[Region, OptionCost], *, lower_peak: bool = True
    ) -> list[Region]:
        """Candidates with one branch in another option and the other branches plain."""
        return [
            self._alone(i, region)
            for i, branch in enumerate(self._branches)
            for region in (
                branch.checkpointed,
                *branch.first_wave({branch.plain: measured[self.plain]}, lower_peak=lower_peak),
                *branch.nested_regions(),
            )
            if region != branch.plain
        ]

    def second_wave(
        self, measured: Mapping[Region, OptionCost], *, lower_peak: bool = True
    ) -> list[Region]:
        """Candidates with sets of runs in one branch, then combinations of the measured options of
        all branches."""
        of_branches = [self._measured_alone(i, measured) for i in range(len(self._branches))]
        regions = []
        for i, (branch, found) in enumerate(zip(self._branches, of_branches, strict=True)):
            nested = branch.nested_regions()
            plain = {region: cost for region, cost in found.items() if region not in nested}
            nested_runs = branch.second_wave(plain, lower_peak=lower_peak)
            regions += [self._alone(i, m) for m in nested_runs if m != branch.plain]
        together = _together(of_branches, max(1, self._config.max_packings))
        return regions + [self._cond(branches) for branches in together]

    def options(self, measured: Mapping[Region, OptionCost]) -> BlockOptions:
        return block_options(
            self._block.start, self.plain, self.checkpointed, self._by_hand(), measured
        )

    def _by_hand(self) -> dict[str, Region]:
        """The cond under each policy, which JAX applies inside the branches."""
        of_branches = [branch.hand_regions() for branch in self._branches]
        shared = [name for name in of_branches[0] if all(name in m for m in of_branches)]
        inside = {name: self._cond([m[name] for m in of_branches]) for name in shared}
        return inside | (
            {"block": self.checkpointed} if inside and self.checkpointed.checkpointed else {}
        )

    def _measured_alone(
        self, i: int, measured: Mapping[Region, OptionCost]
    ) -> dict[Region, OptionCost]:
        """The costs measured with only branch i not plain, by that branch's region."""
        found = {self._branches[i].plain: measured[self.plain]}
        for region, cost in measured.items():
            for child in region.children:
                if child.branches and region == self._alone(i, child.branches[i]):
                    found[child.branches[i]] = cost
        return found

    def _alone(self, i: int, region: Region) -> Region:
        return self._cond([region if j == i else b.plain for j, b in enumerate(self._branches)])

    def _cond(self, branches: Sequence[Region]) -> Region:
        start = self._block.start
        child = Region(start, start + 1, branches=tuple(branches))
        return replace(self.plain, children=(child,))


def _together(
    of_branches: Sequence[Mapping[Region, OptionCost]], count: int
) -> list[tuple[Region, ...]]:
    """One option for each branch, at several prices of memory (Lagrangian relaxation).

    At a price of λ seconds per kept byte, Σ_i (time_i + λ · kept_i) is least if each branch i has
    its own best option. The prices are those at which an option is worth as much as the plain one,
    and infinity. At most `count` of the answers are returned, evenly spread from the last.
    """

    def charged(cost: OptionCost, price: float) -> tuple[float, float]:
        if price == math.inf:
            return (cost.kept_bytes, cost.time_s)
        return (cost.time_s + price * cost.kept_bytes, cost.kept_bytes)

    prices = {math.inf}
    for found in of_branches:
        plain = next(iter(found.values()))
        for cost in found.values():
            freed = plain.kept_bytes - cost.kept_bytes
            if freed > 0:
                prices.add(max((cost.time_s - plain.time_s) / freed, 0.0))
    answers = list(
        dict.fromkeys(
            tuple(min(found, key=lambda m: charged(found[m], price)) for found in of_branches)
            for price in sorted(prices)
        )
    )
    count = min(count, len(answers))
    return [answers[-1 - i * len(answers) // count] for i in range(count)]
