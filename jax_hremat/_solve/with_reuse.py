"""Schedules within a peak limit, with output-buffer reuse.

How many bytes are reused depends on the whole schedule, so the root program is solved for
assumptions (`_solve/assumed_reuse.py`): at first the most that any schedule reuses. A schedule that
does not fit shows how much is reused where memory is tight; no more is assumed there from then on.
Where that leads to no schedule that fits, or only slowly to one, because a smaller buffer frees
less than it shrinks by, buffers count at prices from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from jax_hremat._solve.assumed_reuse import NO_REUSE, AssumedReuse, at_prices, most_reused
from jax_hremat._solve.backend import Status
from jax_hremat._solve.chain import Chain, Schedule, Selection
from jax_hremat._solve.output_reuse import Result
from jax_hremat._solve.prediction import Prediction

# The most schedules that do not fit, with prices and without.
_MAX_MISSES = 11
# Corrections lead slowly to a schedule that fits if one of them leaves more than this part of what
# the schedule before it exceeds the limit by.
_SLOW = 0.5
# A schedule is accepted if its peak exceeds the bound by at most this part of the bound, which is
# less than the error of predictions.
_CLOSE = 0.001
# Memory is tight at a moment at which less than this part of the limit is free.
_TIGHT = 0.03
# With each schedule that does not fit, the reuse assumed there is lowered by this part of the limit
# once more.
_SPARE = 0.003

# The fastest schedule under assumptions, given a guess of its time in seconds.
Solve = Callable[[AssumedReuse, float], Schedule]
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

    Its predicted peak may exceed the bound by a thousandth. Infeasibility is proved only if a
    program that excludes no schedule is infeasible. Optimality is proved only under the last
    assumptions; the bound on time holds for all schedules.

    Args:
        chain: Blocks and their options.
        peak_bytes: Bound on the predicted peak.
        results: The gradients that the step returns.
        solve: Solves the root program under that bound.
        predict: Predicts the cost of a selection.
    """
    question = _Question(chain, peak_bytes, solve, predict)
    first = question.answer(most_reused(results, chain), 0.0)
    bound_s = first.schedule.bound_s
    *misses, last = question.corrected(first, slowly=False)
    if last.fits or (last.promise is None and not misses):
        return replace(last.schedule, bound_s=bound_s)
    answer = misses[-1] if last.promise is None else last
    at_their_prices: list[_Answer] = []
    while answer.promise is not None:
        reused = at_prices(results, answer.promise, len(chain))
        if any(reused == known.reused for known in at_their_prices):
            break
        answer = question.answer(reused, answer.promise.time_s)
        if answer.fits or answer.schedule.outcome.status is Status.INFEASIBLE:
            return replace(answer.schedule, bound_s=max(bound_s, answer.schedule.bound_s))
        at_their_prices.append(answer)
        if answer.schedule.bound_s <= bound_s:
            break
        bound_s = answer.schedule.bound_s
    tightest = max(at_their_prices, key=lambda answer: answer.schedule.bound_s)
    for start in (tightest, last):
        *_, answer = question.corrected(start, slowly=True)
        if answer.fits:
            return replace(answer.schedule, bound_s=bound_s)
    return replace(solve(NO_REUSE, 0.0), bound_s=bound_s)


class _Answer(NamedTuple):
    """The fastest schedule under assumptions, and what it is predicted to cost; None if there is no
    schedule."""

    reused: AssumedReuse
    schedule: Schedule
    promise: Prediction | None
    fits: bool


class _Question(NamedTuple):
    """The search for a schedule within a peak."""

    chain: Chain
    peak_bytes: int
    solve: Solve
    predict: Predict

    def answer(self, reused: AssumedReuse, guess_s: float) -> _Answer:
        """The answer under assumptions."""
        schedule = self.solve(reused, guess_s)
        if schedule.selection is None:
            return _Answer(reused, schedule, None, fits=False)
        promise = self.predict(self.chain, schedule.selection)
        fits = promise.peak_bytes <= (1 + _CLOSE) * self.peak_bytes
        return _Answer(reused, schedule, promise, fits)

    def corrected(self, answer: _Answer, *, slowly: bool) -> list[_Answer]:
        """An answer, and those with less and less reuse up to one that fits, one that has no
        schedule, one that shows that corrections lead slowly to another if `slowly` is false, or
        the last that is tried."""
        limit_bytes = self.peak_bytes - self.chain.fixed_bytes
        answers = [answer]
        while answer.promise is not None and not answer.fits and len(answers) <= _MAX_MISSES:
            # The next schedule has other buffers, which may reuse less.
            spare_bytes = int(len(answers) * _SPARE * limit_bytes)
            reused = _less(answer.reused, answer.schedule, answer.promise, limit_bytes, spare_bytes)
            before_bytes = answer.promise.peak_bytes - self.peak_bytes
            answer = self.answer(reused, answer.promise.time_s)
            answers.append(answer)
            if answer.promise is not None and not slowly:
                left_bytes = answer.promise.peak_bytes - self.peak_bytes
                if left_bytes > _SLOW * before_bytes:
                    break
        return answers


def _less(
    reused: AssumedReuse,
    schedule: Schedule,
    promise: Prediction,
    limit_bytes: int,
    spare_bytes: int,
) -> AssumedReuse:
    """The same assumptions, but for where a schedule leaves little memory or none: there no more is
    saved than the schedule takes less than the program counts, less `spare_bytes`."""
    forward, backward = list(reused.forward), list(reused.backward)
    for moment in promise.moments:
        if moment.live_bytes > (1 - _TIGHT) * limit_bytes:
            of_pass, counted = (
                (backward, schedule.backward_bytes)
                if moment.in_backward
                else (forward, schedule.forward_bytes)
            )
            lowered = counted[moment.block] - moment.live_bytes - spare_bytes
            of_pass[moment.block] = min(of_pass[moment.block], lowered)
    return reused._replace(forward=tuple(forward), backward=tuple(backward))
