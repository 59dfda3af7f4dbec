"""A partitioner by H-Rockmate's score: merges the nodes with the smallest interface for their
number."""

from __future__ import annotations

from itertools import pairwise

from jax_hremat._partition.blocks import boundary
from jax_hremat._partition.width import narrow_cuts
from jax_hremat._trace.graph import Graph

# As in H-Rockmate: the most nodes of a part, the number of top-level parts at which merging stops,
# and the exponent α.
_MAX_NODES = 20
_ENOUGH = 30
_ALPHA = 0.5


def partition_by_score(graph: Graph) -> list[int]:
    """Merge neighbouring nodes bottom-up by H-Rockmate's score (Gusak et al. 2024, algorithm 1).

    A node is a heavy operation with the operations fused to it. The score of a part S is
    −(bytes of its inputs + bytes of its outputs) · |S|^α, larger is better. Parts are taken best
    first, each disjoint from, inside or around those taken before, until few enough are left at
    the top. The original looks for chains and for flows between a fork and its join; here a part
    is any sequence of nodes in program order, which is what one region can contain, and which
    includes both kinds. Arguments do not count as inputs, since they are held anyway.
    """
    cuts = sorted({0, *narrow_cuts(graph), len(graph.operations)})
    nodes = list(pairwise(cuts))
    scored = sorted(
        (_cost(graph, nodes[i][0], nodes[j][1]) * (j - i + 1) ** _ALPHA, -i, j)
        for i in range(len(nodes))
        for j in range(i + 1, min(i + _MAX_NODES, len(nodes)))
    )
    # The part each node is in, by its first and last node.
    top = {i: (i, i) for i in range(len(nodes))}
    count = len(nodes)
    for _, minus_first, last in scored:
        if count <= _ENOUGH:
            break
        first = -minus_first
        a, b = top[first], top[last]
        if a == b or a[0] < first or b[1] > last:
            # The candidate is inside a part already, or crosses the edge of one.
            continue
        count -= len({top[i] for i in range(first, last + 1)}) - 1
        top.update(dict.fromkeys(range(first, last + 1), (first, last)))
    return sorted({nodes[part[0]][0] for part in top.values()})


def _cost(graph: Graph, start: int, stop: int) -> int:
    inputs, outputs = boundary(graph, start, stop)
    return sum(
        graph.values[v].size_bytes
        for v in (*inputs, *outputs)
        if graph.values[v].kind == "computed"
    )
