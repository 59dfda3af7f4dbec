"""The candidate options of scan and cond bodies, and of the scans and conds inside these bodies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

from jax_hremat._cost.analytic import operation_times_s
from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._options.block_search import BlockSearch
from jax_hremat._options.checkpoint_all import checkpoint_all
from jax_hremat._options.config import Negligible, SearchConfig
from jax_hremat._options.roles import product_roles
from jax_hremat._options.runs import RunModel, needed_values, profile_of_held
from jax_hremat._partition.blocks import make_block
from jax_hremat._plan.region import Loop, Region
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.saved import materialised_values
from jax_hremat._trace.bodies import Body, Cond, Scan
from jax_hremat._xla.rates import Rates

# A segment length within this ratio of a divisor of the scan's length is replaced by the divisor,
# so that no steps are left over.
_NEAR = 1.5
# From this many steps on, an inner scan keeps less in segments.
_LEAST_TRIPS = 4


class BodySearch(BlockSearch):
    """The candidate options of a body as one block; holds no results."""

    def __init__(
        self, body: Body, rates: Rates, config: SearchConfig, solver: SolverConfig
    ) -> None:
        super().__init__(
            body.graph,
            make_block(body.graph, 0, len(body.graph.operations)),
            product_roles(body.graph.operations),
            operation_times_s(body.graph, rates),
            config,
            solver,
            Negligible(),
        )
        self._body = body

    def models(self, measured: Mapping[Region, OptionCost]) -> tuple[RunModel, ...]:
        return self._bounds

    @functools.cached_property
    def _bounds(self) -> tuple[RunModel, ...]:
        """What runs of the body may free and add. A body is not compiled by itself; what XLA keeps
        of it lies between two bounds: the fewest values from which fusible operations can make the
        rest, and every residual of JAX's linearization."""
        graph, block = self._body.kept, self._block
        fewest = materialised_values(graph, block.start, block.stop, self._solver)
        return tuple(
            RunModel(graph, block, profile_of_held(graph, block, held, self._times_s), held)
            for held in (fewest, needed_values(graph, block))
        )

    def nested_regions(self) -> list[Region]:
        """The body, plain and checkpointed, with the scans and conds inside in options that keep
        little."""
        inner = self._body.inner.values()
        styles = [_checkpointed_inside] if inner else []
        if any(isinstance(i, Scan) and i.trips >= _LEAST_TRIPS for i in inner):
            styles.append(_in_segments)
        return [
            region
            for inside in (_keeping_little(self._body, style) for style in styles)
            for region in (inside, checkpoint_all(self._body.graph, inside, self._checkpoint))
        ]


def near_divisor(length: int, trips: int) -> int:
    """The divisor of `trips` nearest to `length` in ratio, if it is near; else `length`."""
    divisors = [d for d in range(1, trips + 1) if trips % d == 0]
    nearest = min(divisors, key=lambda d: (max(d / length, length / d), d))
    return nearest if max(nearest / length, length / nearest) <= _NEAR else length


_Style = Callable[[Scan], Loop]


def _keeping_little(body: Body, style: _Style) -> Region:
    """The plain body, with its scans in a given style and each branch of its conds checkpointed."""
    found = []
    for at, inner in sorted(body.inner.items()):
        if isinstance(inner, Cond):
            branches = tuple(_checkpointed(branch, style) for branch in inner.branches)
            found.append(Region(at, at + 1, branches=branches))
        else:
            found.append(Region(at, at + 1, loop=style(inner)))
    return Region(0, len(body.graph.operations), children=tuple(found))


def _checkpointed(body: Body, style: _Style) -> Region:
    return checkpoint_all(body.graph, _keeping_little(body, style), _checkpoint)


def _checkpoint(start: int, stop: int) -> Region:
    return Region(start, stop, checkpointed=True)


def _checkpointed_inside(scan: Scan) -> Loop:
    return Loop(_checkpointed(scan.body, _checkpointed_inside))


def _in_segments(scan: Scan) -> Loop:
    length = near_divisor(round(scan.trips**0.5), scan.trips)
    step = _checkpointed(scan.body, _in_segments)
    if scan.body.effectful:
        return Loop(step)
    # The segment already recomputes a step with nothing checkpointed inside.
    step = step if step.children else replace(step, checkpointed=False)
    return Loop(step, (length,) if 1 < length < scan.trips else ())
