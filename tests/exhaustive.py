"""The fastest schedules of small graphs, by searching all states of memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from jax_hremat.schedules import Graph

# What was computed for the first time so far, the last operation computed since, what is there.
_State = tuple[int, int, int]


def fastest_s(graph: Graph, peak_bytes: int, *, advancing: bool = False) -> float | None:
    """The time of the fastest schedule within a peak; None if there is none.

    Args:
        graph: At most about ten operations.
        peak_bytes: Bound on the peak.
        advancing: Whether operations are first computed in the graph's order, and between two such
            first computations each operation is computed at most once, in that order.
    """
    wanted = sum(1 << i for i in graph.results)
    best: dict[_State, float] = {(0, -1, 0): 0.0}
    heap: list[tuple[float, _State]] = [(0.0, (0, -1, 0))]
    while heap:
        time_s, state = heapq.heappop(heap)
        if best[state] < time_s:
            continue
        if state[2] & wanted == wanted:
            return time_s
        for step_s, following in _steps(graph, peak_bytes, state, advancing):
            if time_s + step_s < best.get(following, float("inf")):
                best[following] = time_s + step_s
                heapq.heappush(heap, (time_s + step_s, following))
    return None


def _steps(
    graph: Graph, peak_bytes: int, state: _State, advancing: bool
) -> Iterator[tuple[float, _State]]:
    frontier, last, there = state
    memory = graph.constant_bytes + sum(
        operation.output_bytes for i, operation in enumerate(graph.operations) if there >> i & 1
    )
    for i, operation in enumerate(graph.operations):
        if there >> i & 1:
            yield 0.0, (frontier, last, there & ~(1 << i))
            continue
        if any(not there >> j & 1 for j in operation.reads):
            continue
        if memory + operation.output_bytes + operation.workspace_bytes > peak_bytes:
            continue
        if not advancing:
            yield operation.time_s, (0, -1, there | 1 << i)
        elif i == frontier:
            yield operation.time_s, (frontier + 1, -1, there | 1 << i)
        elif last < i < frontier:
            yield operation.time_s, (frontier, i, there | 1 << i)
