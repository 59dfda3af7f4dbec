"""The laws of a strategy, which hold for every graph; for the library's strategies and your own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax_hremat.schedules import (
    Graph,
    Schedule,
    Simulation,
    Strategy,
    simulate,
    without_recompute,
)

# Times are sums of floats.
_ROUNDING = 1e-9


def check_laws(
    strategy: Strategy, graph: Graph, bound_s: Callable[[int], float] | None = None
) -> None:
    """Check a strategy on a graph.

    Args:
        strategy: The strategy.
        graph: The graph.
        bound_s: For a peak, a time that no schedule with frontier-advancing stages beats, as
            `Checkmate` proves it.

    Raises:
        AssertionError: A law is broken.
    """
    for text in (strategy.name, strategy.summary, strategy.source, strategy.leaves_out):
        assert text and "\n" not in text, "each is one line"
    lowest = simulate(graph, strategy.lowest(graph))
    whole = simulate(graph, without_recompute(graph))
    peaks_bytes = peaks_between(lowest, whole)
    below, *schedules = strategy.schedules(graph, [lowest.peak_bytes - 1, *peaks_bytes])
    assert below is None, "no peak is below the lowest"

    slowest_s = float("inf")
    for peak_bytes, schedule in zip(peaks_bytes, schedules, strict=True):
        assert schedule is not None, "there is a schedule within every peak from the lowest on"
        # Valid, or this raises.
        run = simulate(graph, schedule)
        assert run.peak_bytes <= peak_bytes, "a schedule is within the peak asked for"
        proven_s = slowest_s
        if schedule.bound_s is not None:
            assert schedule.bound_s <= run.time_s * (1 + _ROUNDING), "a bound is one"
            proven_s = slowest_s + run.time_s - schedule.bound_s
        assert run.time_s <= proven_s * (1 + _ROUNDING), "more memory is never slower"
        slowest_s = min(slowest_s, run.time_s)
        if bound_s is not None and advances(graph, schedule):
            assert run.time_s >= bound_s(peak_bytes) * (1 - _ROUNDING), "none beats the optimum"
    middle = len(peaks_bytes) // 2
    again = strategy.schedule(graph, peaks_bytes[middle])
    assert again == schedules[middle], "equal questions have equal answers"


def peaks_between(lowest: Simulation, whole: Simulation, count: int = 3) -> Sequence[int]:
    """Peaks from the lowest to that without recomputation, evenly spaced."""
    span = max(0, whole.peak_bytes - lowest.peak_bytes)
    return [lowest.peak_bytes + span * k // (count - 1) for k in range(count)]


def advances(graph: Graph, schedule: Schedule) -> bool:
    """Whether operations are first computed in the graph's order, and between two such first
    computations each operation is computed at most once, in that order."""
    frontier, before = 0, -1
    for i in schedule.order:
        if i > frontier or (i < frontier and i <= before):
            return False
        before = -1 if i == frontier else i
        frontier += i == frontier
    return frontier == len(graph)
