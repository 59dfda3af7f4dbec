"""Schedules within a peak limit, with output-buffer reuse.

How many bytes are reused depends on the whole schedule (`_solve/output_reuse.py`), so the root
program takes them as given: at first as the most that can be reused at all. A schedule that does
not fit shows how much is reused where memory is tight; no more is assumed there from then on.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace

from jax_hremat._solve.chain import Chain, Schedule, Selection
from jax_hremat._solve.output_reuse import NO_REUSE, Result, ReusedBytes
from jax_hremat._solve.prediction import Prediction

_MAX_MISSES = 11
# A schedule is accepted if its peak exceeds the bound by at most this part of the bound, which is
# less than the error of predictions.
_CLOSE = 0.001
# Memory is tight at a moment at which less than this part of the limit is free.
_TIGHT = 0.03
# With each schedule that does not fit, the reuse assumed there is lowered by this part of the limit
# once more.
_SPARE = 0.003

# The fastest schedule, given the reused bytes and a time in seconds that none undercuts.
Solve = Callable[[ReusedBytes, float], Schedule]
# The predicted cost of a selection, with its own reused bytes.
Predict = Callable[[Chain, Selection], Prediction]


def fastest_with_reuse(
    chain: Chain,
    peak_bytes: int,
    results: Sequence[Result],
    solve: Solve,
    predict: Predict,
) -> Schedule:
    """The fastest schedule found within a predicted peak.

    Its predicted peak may exceed the bound by a thousandth. Infeasibility is proved only if the
    first program is infeasible. Optimality is proved only for the reused bytes that were assumed.

    Args:
        chain: Blocks and their options.
        peak_bytes: Bound on the predicted peak.
        results: The gradients that the step returns.
        solve: Solves the root program under that bound, for given reused bytes and a time that no
            schedule undercuts.
        predict: Predicts the cost of a selection.
    """
    limit_bytes = peak_bytes - chain.fixed_bytes
    reused = most_reused(results, chain)
    first = schedule = solve(reused, 0.0)
    num_misses = 0
    while schedule.selection is not None:
        promise = predict(chain, schedule.selection)
        if promise.peak_bytes <= (1 + _CLOSE) * peak_bytes:
            # Only the first program assumes all reuse, so that its bound holds for all schedules.
            return replace(schedule, bound_s=first.bound_s)
        num_misses += 1
        if num_misses == _MAX_MISSES:
            break
        # The next schedule has other buffers, which may reuse less; none is faster than this one.
        reused = _less(reused, promise, limit_bytes, int(num_misses * _SPARE * limit_bytes))
        schedule = solve(reused, schedule.bound_s)
    if first.selection is None:
        return first
    return replace(solve(NO_REUSE, first.bound_s), bound_s=first.bound_s)


def most_reused(results: Sequence[Result], chain: Chain) -> ReusedBytes:
    """The most that any schedule reuses: in each idle result the largest buffer that fits. In the
    forward of a block all results are idle, in its backward those that earlier blocks complete."""
    sizes = {0, *(value.size_bytes for value in chain.boundary_values)}
    for option in itertools.chain.from_iterable(chain.options):
        cost = option.cost
        sizes.update(cost.kept_sizes, cost.forward_sizes, cost.backward_sizes)
        sizes.add(option.outputs_bytes)
    ascending = sorted(sizes)
    most = [(r.block, ascending[bisect_right(ascending, r.size_bytes) - 1]) for r in results]
    ahead = (sum(size for block, size in most if block < k) for k in range(len(chain)))
    return ReusedBytes((sum(size for _, size in most),) * len(chain), tuple(ahead))


def _less(
    reused: ReusedBytes, promise: Prediction, limit_bytes: int, spare_bytes: int
) -> ReusedBytes:
    """The assumed reuse, lowered where the predicted schedule leaves little memory or none: there
    to the bytes that this schedule reuses, less `spare_bytes`."""
    forward, backward = list(reused.forward), list(reused.backward)
    for moment in promise.moments:
        if moment.live_bytes > (1 - _TIGHT) * limit_bytes:
            of_pass = backward if moment.in_backward else forward
            lowered = moment.reused_bytes - spare_bytes
            of_pass[moment.block] = min(of_pass[moment.block], lowered)
    return ReusedBytes(tuple(forward), tuple(backward))
