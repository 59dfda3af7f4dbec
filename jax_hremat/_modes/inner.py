"""The bodies of scans and conds: their own modes, and those of what stands inside them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from jax_hremat._compiler.rates import Rates
from jax_hremat._cost.analytic import operation_times_s
from jax_hremat._modes.block_modes import BlockSearch, SearchConfig
from jax_hremat._modes.roles import product_roles
from jax_hremat._modes.runs import PRICES, Run
from jax_hremat._partition.blocks import make_block
from jax_hremat._program.bodies import Body, Cond, Scan
from jax_hremat._program.region import Loop, Region
from jax_hremat._solve.backend import SolverConfig

# A segment length this close to a divisor of the scan's length becomes it: no steps left over.
_NEAR = 1.5
# From so many steps on, what a scan inside keeps is less in segments.
_LEAST_TRIPS = 4


class BodySearch(BlockSearch):
    """The candidate modes of a body as one block; holds no results."""

    def __init__(
        self, body: Body, rates: Rates, config: SearchConfig, solver: SolverConfig
    ) -> None:
        super().__init__(
            body.graph,
            make_block(body.graph, 0, len(body.graph.operations)),
            product_roles(body.graph.operations),
            operation_times_s(body.graph, rates),
            1 / rates.bytes_per_s,
            config,
            solver,
        )
        self._body = body

    @functools.cached_property
    def _runs(self) -> tuple[Run, ...]:
        # One more price: what leaves a body is copied into the stack of a scan's steps, or out of
        # the branch, and back.
        return self._best_runs(self._body.kept, (*PRICES, 256.0))

    def nested_modes(self) -> list[Region]:
        """The body, bare and wrapped, with the scans and conds inside it in modes that keep
        little."""
        inner = self._body.inner.values()
        styles = [_wrapped_inside] if inner else []
        if any(isinstance(i, Scan) and i.trips >= _LEAST_TRIPS for i in inner):
            styles.append(_in_segments)
        bodies = dict.fromkeys([self.bare, self.wrapped])
        return [
            replace(own, children=_keeping_little(self._body, style))
            for style in styles
            for own in bodies
        ]


def near_divisor(length: int, trips: int) -> int:
    """The divisor of `trips` nearest to a length in ratio, if it is near; else the length."""
    divisors = [d for d in range(1, trips + 1) if trips % d == 0]
    nearest = min(divisors, key=lambda d: (max(d / length, length / d), d))
    return nearest if max(nearest / length, length / nearest) <= _NEAR else length


_Style = Callable[[Scan], Loop]


def _keeping_little(body: Body, style: _Style) -> tuple[Region, ...]:
    """The scans inside, in a style, and the conds, each branch wrapped; what has an effect is
    left as it is."""
    found = []
    for at, inner in sorted(body.inner.items()):
        if isinstance(inner, Cond):
            branches = tuple(_bare(b) if b.pinned else _wrapped(b, style) for b in inner.branches)
            found.append(Region(at, at + 1, branches=branches))
        elif not inner.body.pinned:
            found.append(Region(at, at + 1, loop=style(inner)))
    return tuple(found)


def _bare(body: Body) -> Region:
    return Region(0, len(body.graph.operations))


def _wrapped(body: Body, style: _Style) -> Region:
    return replace(_bare(body), wrapped=True, children=_keeping_little(body, style))


def _wrapped_inside(scan: Scan) -> Loop:
    return Loop(_wrapped(scan.body, _wrapped_inside))


def _in_segments(scan: Scan) -> Loop:
    length = near_divisor(round(scan.trips**0.5), scan.trips)
    step = _wrapped(scan.body, _in_segments)
    # A step with nothing to wrap inside is spared by its segment already.
    step = step if step.children else _bare(scan.body)
    return Loop(step, (length,) if 1 < length < scan.trips else ())
