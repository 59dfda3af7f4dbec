"""The width of a program: the bytes handed on at each position, and where they are fewest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from jax_hremat._trace.graph import Graph

# A value that outlives this many heavy operations is a long skip connection. It is held wherever
# the program is cut, so the width leaves it out.
_SKIP_SPAN = 16


def unfused_operations(graph: Graph, *, reductions: bool = True) -> list[int]:
    """Operations on the differentiated path that XLA does not fuse away, with or without
    reductions, which it fuses with what they read."""
    return [
        op.id
        for op in graph.operations
        if op.on_path and not op.fusible and (reductions or not op.primitive.startswith("reduce"))
    ]


def heavy_operations(graph: Graph) -> list[int]:
    """Operations on the differentiated path that XLA does not fuse away, reductions only if there
    are no others."""
    heavy = unfused_operations(graph, reductions=False)
    return heavy if len(heavy) > 1 else unfused_operations(graph)


def widths(graph: Graph) -> list[int]:
    """Bytes of the values that cross a cut before each operation, and after the last one."""
    n = len(graph.operations)
    heavy = set(heavy_operations(graph))
    heavy_before = list(accumulate((i in heavy for i in range(n)), initial=0))
    change = [0] * (n + 2)
    for value in graph.values:
        if value.producer is None or value.last_use <= value.producer:
            continue
        if heavy_before[value.last_use] - heavy_before[value.producer] > _SKIP_SPAN:
            continue
        change[value.producer + 1] += value.size_bytes
        change[value.last_use + 1] -= value.size_bytes
    return list(accumulate(change))[: n + 1]


def narrow_cuts(graph: Graph, between: Sequence[int] | None = None) -> list[int]:
    """The last of the narrowest positions between every two heavy operations, in order, or between
    every two of the operations given.

    An element-wise operation that follows a block, such as an activation, thereby belongs to the
    block; otherwise both its argument and its result would be held.
    """
    heavy = heavy_operations(graph) if between is None else between
    return [positions[-1] for positions in _narrowest(graph, heavy)]


def narrow_ends(graph: Graph) -> list[int]:
    """The first and the last of the narrowest positions between every two heavy operations, each
    once. In a stack of layers these are before and after the element-wise operations."""
    return sorted(
        {end for p in _narrowest(graph, heavy_operations(graph)) for end in (p[0], p[-1])}
    )


def _narrowest(graph: Graph, heavy: Sequence[int]) -> list[list[int]]:
    width = widths(graph)
    edges = [0, *(h + 1 for h in heavy)]
    ranges = [range(a, b + 1) for a, b in zip(edges, heavy, strict=False)]
    least = [min(width[i] for i in one) for one in ranges]
    return [[i for i in s if width[i] == w] for s, w in zip(ranges, least, strict=True)]
