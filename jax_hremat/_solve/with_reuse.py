"""Schedules within a peak, where results lend their memory until they are there.

How much they lend depends on the whole schedule (`_solve/output_reuse.py`), so the root program takes
it as given: first all that they have, then, where that does not fit, what they lend to the schedule
found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax_hremat._solve.chain import Chain, Selection
from jax_hremat._solve.output_reuse import Result
from jax_hremat._solve.prediction import Prediction
from jax_hremat._solve.schedule import NO_REUSE, ReusedBytes, Schedule

_MAX_SOLVES = 8
# A schedule is close enough if its peak is above the bound by no more than this part of it; what is
# missing is less than predictions are off.
_CLOSE = 0.001
# With each schedule that does not fit, results are given this part of the limit less to lend.
_SPARE = 0.003
# While it is not known what results lend, schedules need not be the fastest to the last.
ROUGH_GAP = 0.005

# The fastest schedule, given what results lend.
Solve = Callable[[ReusedBytes], Schedule]
# What a selection costs, with what results lend to it.
Predict = Callable[[Chain, Selection], Prediction]


def fastest_with_reuse(
    chain: Chain, peak_bytes: int, results: Sequence[Result], solve: Solve, predict: Predict
) -> Schedule:
    """The fastest schedule found within a predicted peak.

    It may be above the bound by a thousandth. That there is none is proved where already the first
    program has none; that it is the fastest, only for what results were given to lend.

    Args:
        chain: Blocks and their options.
        peak_bytes: Bound on the predicted peak.
        results: The results.
        solve: The root program under that bound.
        predict: What a selection costs.
    """
    reused = _all_of(results, len(chain))
    for count in range(1, _MAX_SOLVES + 1):
        schedule = solve(reused)
        if schedule.selection is None:
            break
        promise = predict(chain, schedule.selection)
        if promise.peak_bytes <= (1 + _CLOSE) * peak_bytes:
            return schedule
        # The next schedule has other buffers, to which as much may not be lent.
        limit_bytes = peak_bytes - chain.fixed_bytes
        reused = _less(reused, promise, limit_bytes, int(count * _SPARE * limit_bytes))
    return solve(NO_REUSE)


def _all_of(results: Sequence[Result], num_blocks: int) -> ReusedBytes:
    """What results have: in the forward all, in the backward those of blocks further ahead."""
    every = sum(r.size_bytes for r in results)
    ahead = (sum(r.size_bytes for r in results if r.block < k) for k in range(num_blocks))
    return ReusedBytes((every,) * num_blocks, tuple(ahead))


def _less(
    reused: ReusedBytes, promise: Prediction, limit_bytes: int, spare_bytes: int
) -> ReusedBytes:
    """What results lend to the schedule of a promise, at the moments at which it does not fit."""
    forward, backward = list(reused.forward), list(reused.backward)
    for moment in promise.moments:
        if moment.live_bytes > limit_bytes:
            of_pass = backward if moment.in_backward else forward
            of_pass[moment.block] = moment.reused_bytes - spare_bytes
    return ReusedBytes(tuple(forward), tuple(backward))
