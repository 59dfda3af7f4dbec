"""No recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_hremat._schedules.graph import Graph
from jax_hremat._schedules.strategy import Family


@dataclass(frozen=True, slots=True)
class KeepAll(Family):
    """Every operation once, in the graph's order."""

    name = "keep-all"
    summary = "every operation once, no recomputation"
    source = "what automatic differentiation does"
    leaves_out = "other orders of the operations, which may have a lower peak"

    def orders(self, graph: Graph) -> Iterator[Sequence[int]]:
        yield range(len(graph))
