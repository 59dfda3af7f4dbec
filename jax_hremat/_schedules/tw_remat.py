"""Recursive separators from a tree decomposition."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jax_hremat._schedules.graph import Graph
from jax_hremat._schedules.strategy import Family
from jax_hremat._shared.deferred import Deferred

if TYPE_CHECKING:
    import networkx as nx
    from networkx.algorithms import approximation
else:
    nx = Deferred("networkx")
    approximation = Deferred("networkx.algorithms.approximation")

Bags = Sequence[frozenset[int]]


@dataclass(frozen=True, slots=True)
class TwRemat(Family):
    """Compute a separator, one value after the other, each from scratch; then what it separates.

    To compute some targets in a set of operations, take a bag of the tree decomposition whose
    removal leaves parts of at most half the operations. Compute its values in the graph's order and
    keep them. What one of them reads in a part is computed by the same procedure, and dropped when
    it is read. Then compute the targets in each part likewise.

    The levels of this recursion are the choice between memory and time: from none, which is no
    recomputation, to parts of one operation. `bounds` has what the deepest takes at most.

    Attributes:
        max_length: The most computations, as a multiple of the number of operations; deeper
            recursions, which would take more, are left out.
    """

    name = "tw-remat"
    summary = "recursive separators from a tree decomposition"
    source = (
        'Kumar, Purohit, Svitkina, Vee, Wang: "Efficient Rematerialization for Deep Networks", '
        "NeurIPS 2019, the algorithm for bounded treewidth"
    )
    leaves_out = (
        "exact treewidth: networkx's heuristics, minimum fill-in and minimum degree, are both "
        "tried; the paper's constants: `bounds` is proved for what is written here"
    )

    max_length: int = 50

    def orders(self, graph: Graph) -> Iterator[Sequence[int]]:
        yield range(len(graph))
        limit = self.max_length * len(graph)
        for bags in decompositions(graph):
            for depth in range(1, len(graph).bit_length() + 1):
                order: list[int] = []
                for i in recursive_order(graph, bags, depth):
                    order.append(i)
                    if len(order) > limit:
                        break
                if len(order) > limit:
                    break
                yield tuple(order)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the deepest recursion takes at most.

    With n operations, width w of the tree decomposition, d values read by an operation at most, and
    l = ⌊log₂ n⌋ + 1 levels: parts have at most half the operations, so there are l levels. At each,
    the values kept are those of one bag, at most w + 1, and what one of them reads, at most d. So
    there are at most l · (w + 1 + d) values besides the results. A part is processed at most once
    for each value of the bag and once for the targets, so an operation is computed at most
    (w + 2)^(l − 1) times.

    Attributes:
        width: w, for the narrower of the two heuristics' decompositions.
        peak_bytes: For l · (w + 1 + d) values and the results, as many times the largest value, and
            the largest workspace and the constants.
        num_computations: n · (w + 2)^(l − 1).
    """

    width: int
    peak_bytes: int
    num_computations: int


def bounds(graph: Graph) -> Bounds:
    """The bounds of the deepest recursion, for the narrower decomposition."""
    width = min(max(map(len, bags)) for bags in decompositions(graph)) - 1
    levels = len(graph).bit_length()
    reads = max(len(operation.reads) for operation in graph.operations)
    num_values = levels * (width + 1 + reads) + len(graph.results)
    return Bounds(
        width=width,
        peak_bytes=graph.constant_bytes
        + num_values * max(operation.output_bytes for operation in graph.operations)
        + max(operation.workspace_bytes for operation in graph.operations),
        num_computations=len(graph) * (width + 2) ** (levels - 1),
    )


def decompositions(graph: Graph) -> tuple[Bags, ...]:
    """The bags of two tree decompositions of the graph, the direction of its edges ignored."""
    undirected = _undirected(graph)
    heuristics = (approximation.treewidth_min_fill_in, approximation.treewidth_min_degree)
    return tuple(
        tuple(sorted(heuristic(undirected)[1].nodes, key=sorted)) for heuristic in heuristics
    )


def recursive_order(graph: Graph, bags: Bags, depth: int) -> Iterator[int]:
    """The computations of the recursion, so many levels deep."""
    everything = frozenset(range(len(graph)))
    return _targets(graph, _undirected(graph), bags, everything, graph.results, depth)


def _targets(
    graph: Graph,
    undirected: nx.Graph,
    bags: Bags,
    inside: frozenset[int],
    targets: Collection[int],
    depth: int,
) -> Iterator[int]:
    """The computations that make the targets, which are inside, from what is outside."""
    needed = set(targets)
    for i in sorted(inside, reverse=True):
        if i in needed:
            needed.update(inside.intersection(graph.operations[i].reads))
    if depth == 0 or len(needed) == 1:
        yield from sorted(needed)
        return
    inside = frozenset(needed)
    separator, parts = _separate(undirected, bags, inside)
    for i in sorted(separator):
        for part in parts:
            if read := part.intersection(graph.operations[i].reads):
                yield from _targets(graph, undirected, bags, part, read, depth - 1)
        yield i
    for part in parts:
        if wanted := part.intersection(targets):
            yield from _targets(graph, undirected, bags, part, wanted, depth - 1)


def _separate(
    undirected: nx.Graph, bags: Bags, inside: frozenset[int]
) -> tuple[frozenset[int], list[frozenset[int]]]:
    """The bag whose removal leaves the smallest largest part, and the parts that it leaves."""

    def parts(bag: frozenset[int]) -> list[frozenset[int]]:
        rest = undirected.subgraph(inside - bag)
        return sorted(map(frozenset, nx.connected_components(rest)), key=min)

    def largest(bag: frozenset[int]) -> tuple[int, int]:
        return max(map(len, parts(bag)), default=0), len(bag)

    some = dict.fromkeys(bag & inside for bag in bags if bag & inside)
    best = min(some, key=largest)
    return best, parts(best)


def _undirected(graph: Graph) -> nx.Graph:
    undirected = nx.Graph()
    undirected.add_nodes_from(range(len(graph)))
    for i, operation in enumerate(graph.operations):
        undirected.add_edges_from((j, i) for j in operation.reads)
    return undirected
