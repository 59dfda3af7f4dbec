"""`Candidates` -> the trade-off of memory and time: its whole curve, or one point of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np

from jax_hremat._planner.candidate import Candidate
from jax_hremat._planner.candidates import Candidates
from jax_hremat._planner.search_for import Search, search_for
from jax_hremat._shared.hull import above_lower_hull, lower_hull
from jax_hremat._shared.pareto import pareto_front

# The peak of a plan is asked for if the plan's step is longer, by more than this part of the step
# without rematerialization, than the lower convex hull of all plans allows at that peak.
_ABOVE_HULL = 0.01
# The predicted peak, and then the compiled one, is found up to this part of the peak …
_TOLERANCE = 0.01
# … or as far as this many halvings (predictions, then whole budgets) reach.
_MAX_GUESSES = 8
_MAX_BUDGETS = 5


def spread(candidates: Candidates, num_points: int) -> list[Candidate]:
    """The fastest plans at up to `num_points` budgets between the least peak and the peak without
    rematerialization, as far as they are on the Pareto front (`pareto_front`); lowest peak first.

    The two ends are asked for first: the plan of least peak need not be the fastest within its
    peak. Each further budget is placed where the plans so far leave most open: between one asked
    for and the peak of the next answer, where the bytes from one to the other are most, times the
    seconds that the lower convex hull of all plans falls from one to the other. The budget in the
    middle is asked for next. An answer far above the hull leaves as much open as one on it.

    All plans compiled on the way count, so there may be more plans than budgets. Where one is slow
    for its peak, that peak is asked for first: the plan was made for another budget.
    """
    low = search_for(candidates, 0).floor().peak_bytes
    high = candidates.plain.peak_bytes
    asked: set[int] = set()
    budget: int | None = high
    while budget is not None and len(asked) < num_points:
        search_for(candidates, budget).search()
        asked.add(budget)
        budget = _next_budget(candidates, asked, high) if low in asked else low
    return _front(candidates, high)


def _next_budget(candidates: Candidates, asked: Collection[int], high: int) -> int | None:
    """The budget to ask for next; None if there is none worth asking for."""
    front = _front(candidates, high)
    slowest = _slowest_for_its_peak(front, asked, candidates.plain.step_s)
    return slowest or _most_open(candidates, front, sorted(asked))


def _front(candidates: Candidates, high: int) -> list[Candidate]:
    """The Pareto front of the plans of at most a peak."""
    return pareto_front(candidates.within(high), lambda c: (c.peak_bytes, c.step_s))


def _slowest_for_its_peak(
    front: Sequence[Candidate], asked: Collection[int], plain_s: float
) -> int | None:
    """The peak of the plan that is the furthest above the lower convex hull of all, if that is too
    far, and that peak was not asked for; None if there is none."""
    above_s = above_lower_hull([(c.peak_bytes, c.step_s) for c in front])
    slow = [
        (above, c.peak_bytes)
        for above, c in zip(above_s, front, strict=True)
        if above > _ABOVE_HULL * plain_s and c.peak_bytes not in asked
    ]
    return max(slow)[1] if slow else None


def _most_open(
    candidates: Candidates, front: Sequence[Candidate], asked: Sequence[int]
) -> int | None:
    """A budget between two of those asked for, which are sorted; None if nothing is open."""
    corners = lower_hull([(c.peak_bytes, c.step_s) for c in front])
    corners_bytes, corners_s = zip(*corners, strict=True)
    answers = [candidates.within(budget)[0] for budget in asked]
    intervals = [
        (budget, above.peak_bytes)
        for budget, (below, above) in zip(asked, pairwise(answers), strict=False)
        if below.step_s > above.step_s and budget + 1 < above.peak_bytes
    ]
    if not intervals:
        return None

    def open_area(interval: tuple[int, int]) -> float:
        from_s, to_s = np.interp(interval, corners_bytes, corners_s)
        return float((interval[1] - interval[0]) * (from_s - to_s))

    low, high = max(intervals, key=open_area)
    return (low + high) // 2


def least_peak_within(candidates: Candidates, step_s: float) -> Candidate:
    """The plan of least compiled peak whose estimated step is no longer than `step_s`.

    By bisection: first on predictions alone, then on the fastest compiled plan of each budget.

    Args:
        candidates: Plans known so far.
        step_s: At least the time of the step without rematerialization, so that the plain plan
            meets it.
    """
    guess = _guess_bytes(candidates, search_for(candidates, 0), step_s)
    search_for(candidates, guess).search()
    too_slow = candidates.context.fixed_bytes
    for _ in range(_MAX_BUDGETS):
        best = _lowest(candidates, step_s)
        if best.peak_bytes - too_slow <= _TOLERANCE * best.peak_bytes:
            break
        # The least peak is most likely near the predicted one, so the first step down is small.
        limit = int(best.peak_bytes * (1 - _TOLERANCE))
        if best.peak_bytes > guess:
            limit = (best.peak_bytes + max(too_slow, guess)) // 2
        search_for(candidates, limit).search()
        if _lowest(candidates, step_s).peak_bytes > limit:
            too_slow = limit
    return _lowest(candidates, step_s)


def _lowest(candidates: Candidates, step_s: float) -> Candidate:
    fast = [c for c in candidates.within(candidates.plain.peak_bytes) if c.step_s <= step_s]
    return min(fast, key=lambda c: (c.peak_bytes, c.step_s))


def _guess_bytes(candidates: Candidates, search: Search, step_s: float) -> int:
    """The least predicted peak of a step no longer than `step_s`, up to the tolerance."""
    low, high = candidates.context.fixed_bytes, candidates.plain.prediction.peak_bytes
    for _ in range(_MAX_GUESSES):
        if high - low <= _TOLERANCE * high:
            break
        middle = (low + high) // 2
        found = search.predicted(middle)
        if found is not None and candidates.step_s(found) <= step_s:
            high = min(found.peak_bytes, middle)
        else:
            low = middle
    return high
