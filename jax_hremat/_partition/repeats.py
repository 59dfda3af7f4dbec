"""A partitioner for repeated layers: find the repetition, cut once in each repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from jax_hremat._partition.width import heavy_operations, widths
from jax_hremat._trace.graph import Graph

# How many distances between equal heavy operations are tried as the length of a repeat.
_MAX_PERIODS = 64


def partition_by_repeats(graph: Graph) -> list[int]:
    """Cut each repeated range of operations into its repeats, where it is narrowest.

    A range of operations repeats with a period p if operation i + p computes the same as operation
    i for at least p operations. The longest such range is cut first (of equally long ones, the one
    with the shortest period), then the rest on each side in the same way. A rest without
    repetition stays one block.
    """
    numbers: dict[str, int] = {}
    kinds = np.array(
        [numbers.setdefault(f"{op.signature}{op.active}", len(numbers)) for op in graph.operations]
    )
    width, heavy = widths(graph), heavy_operations(graph)
    cuts: list[int] = []
    ranges = [(0, len(graph.operations))]
    while ranges:
        start, stop = ranges.pop()
        inside = [h for h in heavy if start <= h < stop]
        found = _best_repeat(kinds[start:stop], [h - start for h in inside])
        if found is None:
            continue
        first, period, covered = (found[0] + start, found[1], found[2])
        # The first cut is the narrowest of the first period; the rest follow by the period.
        phase = min(range(first, first + period), key=lambda i: (width[i], i))
        repeats = list(range(phase, first + covered + 1, period))
        cuts += repeats
        ranges += [(start, repeats[0]), (repeats[-1], stop)]
    return sorted(set(cuts))


def _best_repeat(kinds: np.ndarray, heavy: Sequence[int]) -> tuple[int, int, int] | None:
    """First operation, period and length of the longest repeated range."""
    best: tuple[int, int, int] | None = None
    for period in _periods(kinds, heavy):
        same = np.flatnonzero(kinds[:-period] != kinds[period:])
        edges = np.concatenate([[-1], same, [len(kinds) - period]])
        gaps = np.diff(edges) - 1
        longest = int(gaps.argmax())
        if gaps[longest] < period:
            continue
        covered = int(gaps[longest]) + period
        if best is None or (covered, -period) > (best[2], -best[1]):
            best = (int(edges[longest]) + 1, period, covered)
    return best


def _periods(kinds: np.ndarray, heavy: Sequence[int]) -> list[int]:
    """The most common distances between a heavy operation and the next ones equal to it."""
    positions: dict[int, list[int]] = {}
    for h in heavy:
        positions.setdefault(int(kinds[h]), []).append(h)
    distances: Counter[int] = Counter()
    for at in positions.values():
        for step in (1, 2, 3, 4, 6, 8):
            distances.update(b - a for a, b in zip(at, at[step:], strict=False))
    return sorted(p for p, _ in distances.most_common(_MAX_PERIODS))
