"""Schedules within a peak limit, with output-buffer reuse.

How many bytes are reused depends on the whole schedule, so the root program is solved for
assumptions (`_solve/assumed_reuse.py`). At first they are the most that any schedule reuses, then
prices, which exclude no schedule either and usually lead to one that fits: the fastest there is. If
not, both are corrected: a schedule that does not fit shows how much is reused where memory is
tight, and no more is assumed there from then on. The next to be corrected is always the one of the
two whose schedule is faster.
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

# The most corrections of assumptions.
_MAX_CORRECTIONS = 22
# A schedule is accepted if its peak exceeds the bound by at most this part of what the bound leaves
# for it, arguments and outputs not counted, which is less than the error of predictions.
_CLOSE = 0.001
# Memory is tight at a moment at which less than this part of the limit is free.
_TIGHT = 0.03
# With each correction but the first, the reuse assumed there is lowered by this part of the limit
# once more, as long as that leaves any schedule.
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

    Its predicted peak may exceed the bound by a thousandth of what the bound leaves beyond
    arguments and outputs. Infeasibility is proved only if a program that excludes no schedule is
    infeasible. Optimality is proved only under the last assumptions, which after corrections
    exclude schedules; the bound on time holds for all.

    Args:
        chain: Blocks and their options.
        peak_bytes: Bound on the predicted peak.
        results: The gradients that the step returns.
        solve: Solves the root program under that bound.
        predict: Predicts the cost of a selection.
    """
    question = _Question(chain, peak_bytes, results, solve, predict)
    first = question.answer(most_reused(results, chain), 0.0)
    if first.fits or first.promise is None:
        return first.schedule
    priced = question.at_their_prices(first)
    tightest = max((first, *priced), key=lambda answer: answer.schedule.bound_s)
    bound_s = tightest.schedule.bound_s
    last = priced[-1]
    if last.fits or last.schedule.outcome.status is Status.INFEASIBLE:
        return replace(last.schedule, bound_s=bound_s)
    waiting = [(first, first.promise)]
    if tightest is not first and tightest.promise is not None:
        waiting.append((tightest, tightest.promise))
    num_corrections = 0
    while waiting:
        fastest = min(waiting, key=lambda pair: pair[1].time_s)
        answer, promise = fastest
        if answer.fits:
            return replace(answer.schedule, bound_s=bound_s)
        waiting.remove(fastest)
        if num_corrections < _MAX_CORRECTIONS:
            num_corrections += 1
            corrected = question.corrected(answer, promise)
            if corrected.promise is not None:
                waiting.append((corrected, corrected.promise))
    return replace(solve(NO_REUSE, 0.0), bound_s=bound_s)


class _Answer(NamedTuple):
    """The fastest schedule under assumptions, and what it is predicted to cost; None if there is no
    schedule.

    Attributes:
        num_corrections: The number of corrections in a row that led to the assumptions.
    """

    reused: AssumedReuse
    num_corrections: int
    schedule: Schedule
    promise: Prediction | None
    fits: bool


class _Question(NamedTuple):
    """The search for a schedule within a peak."""

    chain: Chain
    peak_bytes: int
    results: Sequence[Result]
    solve: Solve
    predict: Predict

    @property
    def limit_bytes(self) -> int:
        """The bound, arguments and outputs not counted."""
        return self.peak_bytes - self.chain.fixed_bytes

    def answer(self, reused: AssumedReuse, guess_s: float, num_corrections: int = 0) -> _Answer:
        """The answer under assumptions that so many corrections led to."""
        schedule = self.solve(reused, guess_s)
        if schedule.selection is None:
            return _Answer(reused, num_corrections, schedule, None, fits=False)
        promise = self.predict(self.chain, schedule.selection)
        most_bytes = self.peak_bytes + _CLOSE * self.limit_bytes
        fits = promise.peak_bytes <= most_bytes
        return _Answer(reused, num_corrections, schedule, promise, fits)

    def at_their_prices(self, answer: _Answer) -> list[_Answer]:
        """The answer at the prices that an answer shows, then at those that this one shows, and so
        on as long as the bound rises, up to one that fits or one that has no schedule."""
        answers: list[_Answer] = []
        bound_s = answer.schedule.bound_s
        while answer.promise is not None and not answer.fits:
            reused = at_prices(self.results, answer.promise, len(self.chain))
            if any(reused == known.reused for known in answers):
                break
            answer = self.answer(reused, answer.promise.time_s)
            answers.append(answer)
            if answer.schedule.bound_s <= bound_s:
                break
            bound_s = answer.schedule.bound_s
        return answers

    def corrected(self, answer: _Answer, promise: Prediction) -> _Answer:
        """The answer with less reuse where this one, which is predicted to cost so much, shows that
        too much is assumed."""

        def less(num_spares: int) -> _Answer:
            spare_bytes = int(num_spares * _SPARE * self.limit_bytes)
            reused = _less(answer.reused, answer.schedule, promise, self.limit_bytes, spare_bytes)
            return self.answer(reused, promise.time_s, num_spares + 1)

        # The next schedule has other buffers, which may reuse less.
        with_spare = less(answer.num_corrections)
        if with_spare.promise is None and answer.num_corrections:
            return less(0)
        return with_spare


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
