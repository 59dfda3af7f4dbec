"""Schedules within a peak limit, with output-buffer reuse.

How many bytes are reused depends on the whole schedule (`_solve/output_reuse.py`). Without groups,
rows of the root program say how much can be placed in results (`_solve/reuse_rows.py`); where the
schedule found reuses less, the next may reuse only that part. With groups, the program takes the
reused bytes as given: first the sizes of all idle results; then, at the moments at which the
schedule found does not fit, the bytes reused by that schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from jax_hremat._solve.chain import Chain, Schedule, Selection
from jax_hremat._solve.output_reuse import NO_REUSE, Result, ReusedBytes, ReusedParts
from jax_hremat._solve.prediction import Prediction

_MAX_SOLVES = 8
# A schedule is accepted if its peak exceeds the bound by at most this part of the bound, which is
# less than the error of predictions.
_CLOSE = 0.001
# With each schedule that does not fit, the assumed reuse is lowered by this part of the limit.
_SPARE = 0.003
# As long as the reused bytes are not known, a larger gap of the solver is good enough.
ROUGH_GAP = 0.005

# The fastest schedule, given the reused bytes.
Solve = Callable[[ReusedBytes], Schedule]
# The fastest schedule without groups, given the parts of what could be reused that are.
SolveBlocks = Callable[[ReusedParts], Schedule]
# The predicted cost of a selection, with its own reused bytes.
Predict = Callable[[Chain, Selection], Prediction]


def fastest_with_reuse(
    chain: Chain,
    peak_bytes: int,
    results: Sequence[Result],
    of_blocks: SolveBlocks,
    solve: Solve,
    predict: Predict,
) -> Schedule:
    """The fastest schedule found within a predicted peak.

    Its predicted peak may exceed the bound by a thousandth. Infeasibility is proved only if the
    first program with groups is infeasible. Optimality is proved only for the reused bytes that
    were assumed.

    Args:
        chain: Blocks and their options.
        peak_bytes: Bound on the predicted peak.
        results: The gradients that the step returns.
        of_blocks: Solves the root program under that bound, without groups, for given parts of the
            reuse that its rows allow.
        solve: Solves the root program under that bound, for given reused bytes.
        predict: Predicts the cost of a selection.
    """
    best = _without_groups(chain, peak_bytes, of_blocks, predict)
    best_s = math.inf
    if best is not None and best.selection is not None:
        best_s = predict(chain, best.selection).time_s
    limit_bytes = peak_bytes - chain.fixed_bytes
    reused = all_reused(results, len(chain))
    bound_s = None
    for count in range(1, _MAX_SOLVES + 1):
        schedule = solve(reused)
        # Only the first program assumes all reuse, so that its bound holds for all schedules.
        bound_s = schedule.bound_s if bound_s is None else bound_s
        if schedule.selection is None:
            break
        promise = predict(chain, schedule.selection)
        if promise.time_s >= best_s:
            # The next schedules assume less reuse, and are slower still.
            break
        if promise.peak_bytes <= (1 + _CLOSE) * peak_bytes:
            return replace(schedule, bound_s=bound_s)
        # The next schedule has other buffers, which may reuse less.
        reused = _less(reused, promise, limit_bytes, int(count * _SPARE * limit_bytes))
    return replace(solve(NO_REUSE) if best is None else best, bound_s=bound_s)


def _without_groups(
    chain: Chain, peak_bytes: int, of_blocks: SolveBlocks, predict: Predict
) -> Schedule | None:
    """The fastest schedule without groups, if one is found that is predicted to fit."""
    limit_bytes = peak_bytes - chain.fixed_bytes
    parts = {in_backward: [1.0] * len(chain) for in_backward in (False, True)}
    for _ in range(_MAX_SOLVES):
        schedule = of_blocks(ReusedParts(tuple(parts[False]), tuple(parts[True])))
        if schedule.selection is None:
            return None
        promise = predict(chain, schedule.selection)
        if promise.peak_bytes <= (1 + _CLOSE) * peak_bytes:
            return schedule
        for moment in promise.moments:
            excess_bytes = moment.live_bytes - limit_bytes
            if excess_bytes > 0:
                # The rows allowed at least what the schedule would need to fit.
                part = moment.reused_bytes / (moment.reused_bytes + excess_bytes)
                parts[moment.in_backward][moment.block] *= part
    return None


def all_reused(results: Sequence[Result], num_blocks: int) -> ReusedBytes:
    """All idle bytes: in the forward those of all results, in the backward of a block those of the
    results that earlier blocks complete."""
    every = sum(r.size_bytes for r in results)
    ahead = (sum(r.size_bytes for r in results if r.block < k) for k in range(num_blocks))
    return ReusedBytes((every,) * num_blocks, tuple(ahead))


def _less(
    reused: ReusedBytes, promise: Prediction, limit_bytes: int, spare_bytes: int
) -> ReusedBytes:
    """The assumed reuse, lowered at the moments at which the predicted schedule does not fit: there
    to the bytes that this schedule reuses, less `spare_bytes`."""
    forward, backward = list(reused.forward), list(reused.backward)
    for moment in promise.moments:
        if moment.live_bytes > limit_bytes:
            of_pass = backward if moment.in_backward else forward
            of_pass[moment.block] = moment.reused_bytes - spare_bytes
    return ReusedBytes(tuple(forward), tuple(backward))
