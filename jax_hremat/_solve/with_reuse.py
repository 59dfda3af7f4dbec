"""Schedules within a peak limit, with output-buffer reuse.

How many bytes are reused depends on the whole schedule, so the root program is solved for
assumptions (`_solve/assumed_reuse.py`). At first they are the most that any schedule reuses, then
prices, which exclude no schedule either and usually lead to one that fits: the fastest there is. If
not, both are corrected: a schedule that does not fit shows how much is reused where memory is
tight, and no more is assumed there from then on. The next to be corrected is always the one of the
two whose schedule is faster. From the first that fits, faster ones are looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from jax_hremat._solve.assumed_reuse import (
    AssumedReuse,
    Prices,
    at_prices,
    most_reused,
    shown_prices,
)
from jax_hremat._solve.backend import Outcome, Status
from jax_hremat._solve.chain import Chain, Schedule, Selection
from jax_hremat._solve.output_reuse import Result
from jax_hremat._solve.prediction import Prediction

# The most prices that are tried halfway between two others.
_MAX_HALVINGS = 3
# The most corrections of assumptions, and of those that a schedule which fits shows.
_MAX_CORRECTIONS = 22
_MAX_IMPROVEMENTS = 6
# A schedule is accepted if its peak exceeds the bound by at most this part of what the bound leaves
# for it, arguments and outputs not counted, which is less than the error of predictions.
_CLOSE = 0.001
# Memory is tight at a moment at which less than this part of the limit is free.
_TIGHT = 0.03
# A faster schedule is looked for only if it may take less by at least this part.
_FASTER = 0.0003
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
    least_peak: Callable[[], Schedule],
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
        least_peak: Finds the schedule of least peak, nothing reused.
    """
    question = _Question(chain, peak_bytes, results, solve, predict)
    first = question.answer(most_reused(results, chain), 0.0)
    if first.fits or first.promise is None:
        return first.schedule
    priced = question.at_prices(first)
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
            break
        waiting.remove(fastest)
        if num_corrections < _MAX_CORRECTIONS:
            num_corrections += 1
            corrected = question.corrected(answer, promise)
            if corrected.promise is not None:
                waiting.append((corrected, corrected.promise))
    else:
        answer = question.without_reuse(least_peak, bound_s)
    return replace(question.improved(answer, bound_s).schedule, bound_s=bound_s)


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
        """The answer under assumptions, given a guess of its time and how many corrections in a row
        led to them."""
        schedule = self.solve(reused, guess_s)
        if schedule.selection is None:
            return _Answer(reused, num_corrections, schedule, None, fits=False)
        promise = self.predict(self.chain, schedule.selection)
        return _Answer(reused, num_corrections, schedule, promise, self._fits(promise))

    def at_prices(self, first: _Answer) -> list[_Answer]:
        """Answers at prices, up to one that fits or one that has no schedule: at those that the
        first answer shows, then at those that the answer with the highest bound shows. Where they
        lower the bound, they go too far: the next are halfway between the two."""
        answers: list[_Answer] = []
        best, num_halvings = first, 0
        prices = self._shown_by(first)
        while prices is not None and all(prices != a.reused.prices for a in answers):
            reused = at_prices(self.results, prices, len(self.chain))
            answer = self.answer(reused, 0.0 if best.promise is None else best.promise.time_s)
            answers.append(answer)
            if answer.schedule.bound_s > best.schedule.bound_s:
                best, prices = answer, self._shown_by(answer)
            elif answer.fits or best is first or num_halvings == _MAX_HALVINGS:
                break
            else:
                num_halvings += 1
                prices = best.reused.prices.halfway_to(prices)
        return answers

    def _shown_by(self, answer: _Answer) -> Prices | None:
        """The prices that an answer shows; None if it fits or has no schedule."""
        if answer.promise is None or answer.fits:
            return None
        return shown_prices(self.results, answer.promise)

    def corrected(self, answer: _Answer, promise: Prediction) -> _Answer:
        """The answer with less reuse where this one, which is predicted to cost so much, shows that
        too much is assumed."""
        seen = _seen(answer.schedule, promise)

        def less(num_spares: int) -> _Answer:
            spare_bytes = int(num_spares * _SPARE * self.limit_bytes)
            reused = self._less(answer.reused, seen, spare_bytes)
            return self.answer(reused, promise.time_s, num_spares + 1)

        # The next schedule has other buffers, which may reuse less.
        with_spare = less(answer.num_corrections)
        if with_spare.promise is None and answer.num_corrections:
            return less(0)
        return with_spare

    def improved(self, answer: _Answer, bound_s: float) -> _Answer:
        """The fastest of an answer and of others that fit, found from what is reused in it, given a
        bound on time. Assumptions are corrected as above, but as far as they admit the answer."""
        if answer.promise is None:
            return answer
        best_s, seen = answer.promise.time_s, _seen(answer.schedule, answer.promise)
        reused = self._enough(seen.assumed(answer.reused), seen)
        for _ in range(_MAX_IMPROVEMENTS):
            if best_s <= (1 + _FASTER) * bound_s:
                break
            other = self.answer(reused, best_s)
            if other.promise is None or other.promise.time_s >= (1 - _FASTER) * best_s:
                break
            seen_other = _seen(other.schedule, other.promise)
            if other.fits:
                answer, best_s, seen = other, other.promise.time_s, seen_other
                reused = self._enough(seen.assumed(answer.reused), seen)
            else:
                reused = self._enough(self._less(reused, seen_other, 0), seen)
        return answer

    def without_reuse(self, least_peak: Callable[[], Schedule], bound_s: float) -> _Answer:
        """The answer if nothing is reused. If no schedule fits so, that of least peak, if it fits
        with what it reuses."""
        nothing = (0,) * len(self.chain)
        answer = self.answer(AssumedReuse(nothing, nothing), 0.0)
        if answer.promise is not None:
            return answer
        lowest = least_peak()
        assert lowest.selection is not None, "without a peak bound a selection exists"
        promise = self.predict(self.chain, lowest.selection)
        if not self._fits(promise):
            return answer
        added_ms = 1e3 * promise.time_s - self.chain.fastest_ms
        # Its peak may exceed the bound a little, so that it may be faster than what bounds others.
        gap = max(1 - bound_s / promise.time_s, 0.0)
        outcome = Outcome(Status.LIMIT, added_ms, gap, lowest.outcome.solve_s)
        schedule = replace(lowest, outcome=outcome)
        return _Answer(answer.reused, 0, schedule, promise, fits=True)

    def _fits(self, promise: Prediction) -> bool:
        return promise.peak_bytes <= self.peak_bytes + _CLOSE * self.limit_bytes

    def _less(self, reused: AssumedReuse, seen: _Seen, spare_bytes: int) -> AssumedReuse:
        """The same assumptions, but for where a schedule leaves little memory or none: there no
        more is saved than the schedule takes less than the program counts, less `spare_bytes`."""

        def lowered(saved_bytes: int, moment: _Moment) -> int:
            if moment.live_bytes <= (1 - _TIGHT) * self.limit_bytes:
                return saved_bytes
            return min(saved_bytes, moment.saved_bytes - spare_bytes)

        return seen.changed(reused, lowered)

    def _enough(self, reused: AssumedReuse, seen: _Seen) -> AssumedReuse:
        """The same assumptions, but for where a schedule needs more to be admitted."""
        return seen.changed(
            reused, lambda b, moment: max(b, moment.counted_bytes - self.limit_bytes)
        )


class _Moment(NamedTuple):
    """The forward or the backward of a block.

    Attributes:
        counted_bytes: What the program counts.
        live_bytes: What is predicted.
    """

    counted_bytes: int
    live_bytes: int

    @property
    def saved_bytes(self) -> int:
        """What output-buffer reuse saves of what the program counts."""
        return self.counted_bytes - self.live_bytes


# What assumed bytes are at a moment instead.
_Change: TypeAlias = Callable[[int, _Moment], int]


class _Seen(NamedTuple):
    """What a schedule shows, for each block."""

    forward: Sequence[_Moment]
    backward: Sequence[_Moment]

    def changed(self, reused: AssumedReuse, change: _Change) -> AssumedReuse:
        """Strict assumptions with other bytes."""
        forward, backward = (
            tuple(change(saved, moment) for saved, moment in zip(*pair, strict=True))
            for pair in ((reused.forward, self.forward), (reused.backward, self.backward))
        )
        return AssumedReuse(forward, backward, reused.prices, is_strict=True)

    def assumed(self, reused: AssumedReuse) -> AssumedReuse:
        """Assumptions, at each moment what it shows."""
        return self.changed(reused, lambda _, moment: moment.saved_bytes)


def _seen(schedule: Schedule, promise: Prediction) -> _Seen:
    count = len(schedule.forward_bytes)
    # All forwards, then all backwards, the last first.
    live = [m.live_bytes for m in promise.moments]
    return _Seen(
        [*map(_Moment, schedule.forward_bytes, live[:count])],
        [*map(_Moment, schedule.backward_bytes, reversed(live[count:]))],
    )
