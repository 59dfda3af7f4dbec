"""TW-Remat: what separates the graph is kept, and each part is scheduled in the same way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jax_hremat._shared.deferred import Deferred
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.chain import Chain, Group
from jax_hremat._strategies.segments import with_groups
from jax_hremat._strategies.strategy import Choices, Curve, Strategy

if TYPE_CHECKING:
    import networkx as nx
    import networkx.algorithms.approximation as nxa
else:
    nx = Deferred("networkx")
    nxa = Deferred("networkx.algorithms.approximation")


class TwRemat(Strategy):
    """Balanced separators of the graph of blocks, from a tree decomposition; recursively."""

    name = "tw-remat"
    summary = "separators from a tree decomposition, each part in the same way (tw · log n)"
    source = (
        "Kumar, Purohit, Svitkina, Vee, Wang: Efficient Rematerialization for Deep Networks "
        "(NeurIPS 2019), section 3; decompositions by minimal fill-in"
    )
    leaves_out = (
        "values are computed in program order, so a part that is not consecutive becomes several; "
        "inside a block nothing is separated. Parts below some number of blocks are kept whole; "
        "all such numbers are tried"
    )

    def choices(self, chain: Chain, solver: SolverConfig) -> Choices:
        graph = nx.Graph()
        graph.add_nodes_from(range(len(chain)))
        for value in chain.boundary_values:
            graph.add_edges_from((value.producer, reader) for reader in value.readers)
        _, decomposition = nxa.treewidth_min_fill_in(graph)
        levels = list(_levels(graph, decomposition))
        depths = range(len(levels) + 1)
        groups = (
            {group for level in levels[:depth] for group in level if group[1] < len(chain) - 1}
            for depth in depths
        )
        return Curve(chain, (with_groups(chain, found) for found in groups))


def _levels(graph: Any, decomposition: Any) -> Iterator[list[Group]]:
    """The consecutive parts that the separators of each level of the recursion leave; the blocks of
    the separators are parts of their own."""
    parts = [sorted(graph.nodes)]
    while any(len(part) > 1 for part in parts):
        separated = [_separated(graph, decomposition, part) for part in parts if len(part) > 1]
        parts = [part for found in separated for part in found]
        yield [(part[0], part[-1]) for part in parts]


def _separated(graph: Any, decomposition: Any, part: Sequence[int]) -> list[list[int]]:
    """A part of consecutive blocks, divided at the bag whose removal leaves the smallest largest
    rest."""
    inside = set(part)
    found: list[list[list[int]]] = []
    for bag in sorted(decomposition.nodes, key=sorted):
        separator = inside & bag
        if separator and separator != inside:
            found.append(_runs(part, separator))
    if not found:
        return [[block] for block in part]
    return min(found, key=lambda runs: (max(map(len, runs)), runs))


def _runs(part: Sequence[int], separator: set[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for block in part:
        if block in separator or not runs or runs[-1][0] in separator:
            runs.append([block])
        else:
            runs[-1].append(block)
    return runs
