"""Checkpoints between parts of the forward: √n parts, and recursively."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from jax_hremat._schedules.graph import Graph
from jax_hremat._schedules.line import Line, line_of
from jax_hremat._schedules.parts import needed
from jax_hremat._schedules.strategy import Family

_PAPER = 'Chen, Xu, Zhang, Guestrin: "Training Deep Nets with Sublinear Memory Cost", 2016'


@dataclass(frozen=True, slots=True)
class Chen(Family):
    """Parts of about equal size; what passes from one to the next is stored, the rest of a part is
    recomputed before its backward.

    On a chain of n operations with values of one size, √n parts take O(√n) memory for one more
    forward.
    """

    name = "chen"
    summary = "parts of about equal size, each recomputed as a whole"
    source = f"{_PAPER}: Algorithm 1, with the parts of Algorithm 3 for budgets of 1/k of all bytes"
    leaves_out = (
        "the search for the budget of a part: all k are tried, with cuts anywhere and with cuts "
        "only where one value passes; the last part is not recomputed"
    )

    def orders(self, graph: Graph) -> Iterator[Sequence[int]]:
        line = line_of(graph)
        sizes = [graph.operations[i].output_bytes for i in line.forward]
        ends = dict.fromkeys(
            _equal_parts(sizes, cuts, sum(sizes) / count)
            for cuts in (line.cuts, line.necks)
            for count in range(1, len(cuts) + 2)
        )
        for stops in ends:
            yield tuple(_process(graph, line, _Part(stops, ()), 0, len(sizes), ()))


@dataclass(frozen=True, slots=True)
class ChenRecursive(Family):
    """Parts of parts: the line is divided into equally many, each part again, and so on.

    With two parts at every level, a chain of n operations with values of one size takes O(log n)
    memory and n · log n forwards.
    """

    name = "chen-recursive"
    summary = "equal parts of equal parts, recomputed as needed"
    source = f"{_PAPER}: section 4.3, g(n) = k + g(n / (k + 1)), for every k and every depth"
    leaves_out = (
        "the choice of k and of the depth: all are tried, with cuts anywhere and with cuts only "
        "where one value passes; parts are equal in their number of cuts, not in bytes"
    )

    def orders(self, graph: Graph) -> Iterator[Sequence[int]]:
        line = line_of(graph)
        count = len(line.forward)
        trees: dict[_Part, None] = {_Part((), ()): None}
        for cuts in (line.cuts, line.necks):
            for parts in range(2, len(cuts) + 2):
                depth = 1
                while parts ** (depth - 1) <= len(cuts):
                    trees[_levels(cuts, parts, depth)] = None
                    depth += 1
        for tree in trees:
            yield tuple(_process(graph, line, tree, 0, count, ()))


@dataclass(frozen=True, slots=True)
class _Part:
    """How a part of the line is divided: the places where its parts but the first begin, and how
    these are divided in turn; no division where `parts` is empty."""

    stops: tuple[int, ...]
    parts: tuple[_Part, ...]


def _process(
    graph: Graph, line: Line, part: _Part, start: int, stop: int, stored: Collection[int]
) -> Iterator[int]:
    """The computations that run the backwards of the places from `start` up to `stop`, given what
    passes the cut at `start`. Of the part's own values some may be stored; they are not
    computed again."""
    stops = part.stops
    passing = [i for cut in stops for i in line.passing_at(cut)]
    held = {*stored, *passing}
    if stops:
        yield from needed(graph, line.forward[start : stops[-1]], passing, stored)
    inner = part.parts or (_Part((), ()),) * (len(stops) + 1)
    bounds = list(zip((start, *stops), (*stops, stop), inner, strict=True))
    for a, b, within in reversed(bounds):
        if within.stops:
            yield from _process(graph, line, within, a, b, held)
            continue
        own = line.forward[a:b]
        backward = [i for place in reversed(range(a, b)) for i in line.backward[place]]
        read = {j for i in backward for j in graph.operations[i].reads}
        yield from needed(graph, own, {*read, *_results(graph, own)}, held)
        yield from sorted(backward)


def _results(graph: Graph, operations: Sequence[int]) -> set[int]:
    return set(operations) & set(graph.results)


def _equal_parts(sizes: Sequence[int], cuts: Sequence[int], part_bytes: float) -> tuple[int, ...]:
    """Where parts begin if each ends at the last cut before it exceeds a size."""
    before = list(itertools.accumulate(sizes, initial=0))
    stops: list[int] = []
    start = 0
    for cut, following in itertools.pairwise((*cuts, len(sizes))):
        if before[following] - before[start] > part_bytes:
            stops.append(cut)
            start = cut
    return tuple(stops)


def _levels(cuts: Sequence[int], parts: int, depth: int) -> _Part:
    """Divide a part into so many, so many levels deep; `cuts` are those inside it."""
    count = min(parts, len(cuts) + 1)
    if depth == 0 or count < 2:
        return _Part((), ())
    # Between the cuts inside it, a part has one unit more than cuts.
    ends = [(len(cuts) + 1) * k // count for k in range(count + 1)]
    inner = [cuts[a : b - 1] for a, b in itertools.pairwise(ends)]
    stops = tuple(cuts[end - 1] for end in ends[1:-1])
    return _Part(stops, tuple(_levels(some, parts, depth - 1) for some in inner))
