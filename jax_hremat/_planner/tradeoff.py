"""`Candidates` -> the trade-off of memory and time: its whole curve, or one point of it."""

from __future__ import annotations

from jax_hremat._planner.candidates import Candidate, Candidates
from jax_hremat._planner.search_for import Search, search_for

# The predicted peak, and then the compiled one, is found up to this part of the peak …
_TOLERANCE = 0.01
# … or as far as this many halvings (predictions, then whole budgets) reach.
_MAX_GUESSES = 8
_MAX_BUDGETS = 5


def spread(candidates: Candidates, num_points: int) -> list[Candidate]:
    """The fastest plans at budgets evenly spread between the least peak and the peak without
    rematerialization; lowest peak first, dominated plans left out.

    All plans compiled on the way count, so there may be more plans than budgets.
    """
    low = search_for(candidates, 0).floor().peak_bytes
    high = candidates.plain.peak_bytes
    for point in range(1, num_points - 1):
        search_for(candidates, low + (high - low) * point // (num_points - 1)).search()
    front: list[Candidate] = []
    for candidate in candidates.within(high):
        if not front or candidate.peak_bytes < front[-1].peak_bytes:
            front.append(candidate)
    return front[::-1]


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
