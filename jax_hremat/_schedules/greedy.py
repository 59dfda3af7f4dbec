"""Values dropped one after the other, the one first that frees most for longest at least time."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_hremat._schedules.graph import Graph
from jax_hremat._schedules.schedule import Compute, with_drops
from jax_hremat._schedules.simulate import simulate
from jax_hremat._schedules.strategy import Family


@dataclass(frozen=True, slots=True)
class Greedy(Family):
    """Begin without recomputation; while something is there at the peak that is not read, drop it
    and compute it again before it is read.

    Of these values, the one with the largest product of bytes and idle time, divided by the time to
    compute it again from what is there, if that makes the peak lower or reached less often;
    otherwise the next.

    Attributes:
        max_drops: The most values dropped.
    """

    name = "greedy"
    summary = "drops what frees most bytes for longest at least time"
    source = (
        'the choice of what to recompute in Peng et al.: "Capuchin: Tensor-based GPU Memory '
        'Management for Deep Learning", ASPLOS 2020; the idle time is the staleness of DTR '
        "(Kirisame et al., ICLR 2021)"
    )
    leaves_out = (
        "swapping to the host's memory; measured accesses, since the graph has them; updating the "
        "recompute times of the other values, since all are computed anew after each choice"
    )

    max_drops: int = 1000

    def orders(self, graph: Graph) -> Iterator[Sequence[int]]:
        order = tuple(range(len(graph)))
        yield order
        height = _height(graph, order)
        for _ in range(self.max_drops):
            lower = _lower(graph, order, height)
            if lower is None:
                return
            order, height = lower
            yield order


def _lower(
    graph: Graph, order: tuple[int, ...], height: tuple[int, int, int]
) -> tuple[tuple[int, ...], tuple[int, int, int]] | None:
    """The order with one more value dropped, and its height."""
    peak = height[2]
    uses = _uses(graph, order)
    elapsed_s = [0.0]
    for i in order:
        elapsed_s.append(elapsed_s[-1] + graph.operations[i].time_s)
    found = []
    for i, steps in enumerate(uses):
        k = bisect_right(steps, peak)
        # It is there, used before the peak and read after it, but not made again.
        if k == 0 or k == len(steps) or steps[k - 1] == peak:
            continue
        before, after = steps[k - 1], steps[k]
        if after < len(order) and order[after] == i:
            continue
        again = _closure(graph, order, uses, i, after)
        again_s = math.fsum(graph.operations[j].time_s for j in again)
        idle_s = elapsed_s[after] - elapsed_s[before + 1]
        worth = graph.operations[i].output_bytes * idle_s
        found.append((-worth / again_s if again_s else -math.inf, i, after, again))
    for _, _, after, again in sorted(found):
        changed = (*order[:after], *again, *order[after:])
        new = _height(graph, changed)
        if new[:2] < height[:2]:
            return changed, new
    return None


def _uses(graph: Graph, order: Sequence[int]) -> list[list[int]]:
    """For each operation, the steps at which its value is made or read; the end, for a result."""
    uses: list[list[int]] = [[] for _ in range(len(graph))]
    for step, i in enumerate(order):
        for j in graph.operations[i].reads:
            uses[j].append(step)
        uses[i].append(step)
    for i in graph.results:
        uses[i].append(len(order))
    return uses


def _closure(
    graph: Graph, order: Sequence[int], uses: Sequence[Sequence[int]], i: int, step: int
) -> tuple[int, ...]:
    """What is computed to have a value again before a step, if it is dropped: itself, and whatever
    it depends on that is not there."""
    needed: set[int] = set()
    stack = [i]
    while stack:
        j = stack.pop()
        if j not in needed:
            needed.add(j)
            stack += [r for r in graph.operations[j].reads if not _there(order, uses[r], r, step)]
    return tuple(sorted(needed))


def _there(order: Sequence[int], steps: Sequence[int], i: int, step: int) -> bool:
    """Whether a value is kept for a use at this step or later."""
    k = bisect_left(steps, step)
    return k < len(steps) and (steps[k] == len(order) or order[steps[k]] != i)


def _height(graph: Graph, order: Sequence[int]) -> tuple[int, int, int]:
    """The peak in bytes, how many computations reach it, and the first of these."""
    schedule = with_drops(graph, order)
    after = zip(schedule.steps, simulate(graph, schedule).memory_bytes, strict=True)
    running = [
        memory + graph.operations[step.operation].workspace_bytes
        for step, memory in after
        if isinstance(step, Compute)
    ]
    peak = max(running)
    return peak, running.count(peak), running.index(peak)
