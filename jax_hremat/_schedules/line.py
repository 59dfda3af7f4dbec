"""A graph as a line: its forward operations one after the other, and the backward of each.

The line may be cut before an operation if the backwards behind the cut can all run before those in
front of it. What passes a cut are the values made in front of it and read behind it, by forwards or
backwards. A cut that one value passes, that of the operation in front of it, is a neck; a chain has
one before each operation but the first.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from jax_hremat._schedules.graph import Graph


@dataclass(frozen=True, slots=True)
class Line:
    """The operations of a graph in a line.

    Attributes:
        forward: The forward operations, in the graph's order; a place is a position in this tuple.
        backward: For each place, the backward operations that stand there, in the graph's order:
            those of the forward operation, and what reads these and none of earlier places.
        cuts: The places before which the line may be cut.
        necks: Those cuts that only the value of the place in front of them passes.
        passing: For each cut, in order, the values that pass it.
        is_backward: For each operation of the graph, whether it is a backward.
        places: For each operation of the graph, the place at which it stands.
    """

    forward: tuple[int, ...]
    backward: tuple[tuple[int, ...], ...]
    cuts: tuple[int, ...]
    necks: tuple[int, ...]
    passing: tuple[tuple[int, ...], ...]
    is_backward: tuple[bool, ...]
    places: tuple[int, ...]

    def passing_at(self, cut: int) -> tuple[int, ...]:
        """The values that pass a cut."""
        return self.passing[bisect_left(self.cuts, cut)]


def line_of(graph: Graph) -> Line:
    """Lay out the operations of a graph in a line."""
    is_backward: list[bool] = []
    for operation in graph.operations:
        reads_one = any(is_backward[j] for j in operation.reads)
        is_backward.append(operation.backward_of is not None or reads_one)
    forward = tuple(i for i, backward in enumerate(is_backward) if not backward)
    place = {i: p for p, i in enumerate(forward)}
    for i, operation in enumerate(graph.operations):
        if operation.backward_of is not None:
            place[i] = place[operation.backward_of]
        elif is_backward[i]:
            place[i] = min(place[j] for j in operation.reads if is_backward[j])
    backward: list[list[int]] = [[] for _ in forward]
    for i in range(len(graph)):
        if is_backward[i]:
            backward[place[i]].append(i)

    # For each value, the last place at which it is read, and the cuts that a reader forbids.
    last_read = [place[i] for i in range(len(graph))]
    forbidden = [0] * (len(forward) + 1)
    for i, operation in enumerate(graph.operations):
        for j in operation.reads:
            if not is_backward[j]:
                last_read[j] = max(last_read[j], place[i])
            # Backwards run from the last place to the first, so no backward reads a value of a
            # later place's forward, nor one of an earlier place's backward.
            low, high = sorted((place[i], place[j]))
            if is_backward[i] and (place[j] < place[i]) == is_backward[j] and low < high:
                forbidden[low + 1] += 1
                forbidden[high + 1] -= 1
    cuts: list[int] = []
    passing: list[tuple[int, ...]] = []
    depth = 0
    for cut in range(1, len(forward)):
        depth += forbidden[cut]
        if depth == 0:
            cuts.append(cut)
            passing.append(tuple(i for i in forward[:cut] if last_read[i] >= cut))
    necks = [
        c for c, values in zip(cuts, passing, strict=True) if values in ((), (forward[c - 1],))
    ]
    return Line(
        forward=forward,
        backward=tuple(map(tuple, backward)),
        cuts=tuple(cuts),
        necks=tuple(necks),
        passing=tuple(passing),
        is_backward=tuple(is_backward),
        places=tuple(place[i] for i in range(len(graph))),
    )
