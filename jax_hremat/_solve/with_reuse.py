"""Schedules within a peak limit, with output-buffer reuse.

How many bytes are reused depends on the whole schedule, so the root program is solved for
assumptions (`_solve/assumed_reuse.py`). At first they are the most that any schedule reuses, then
prices, which exclude no schedule either and usually lead to one that fits: the fastest there is. If
not, both are corrected: what a schedule that does not fit reuses is assumed next. The next to be
corrected is always the one of the two whose schedule is faster. From the first that fits, faster
ones are looked for: with what it reuses, and by exchanges of columns (`_solve/exchanges.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from jax_hremat._solve.assumed_reuse import (
    AssumedReuse,
    Prices,
    at_prices,
    most_reused,
    reuse_shown_by,
    shown_prices,
)
from jax_hremat._solve.backend import Outcome, SolverConfig, Status
from jax_hremat._solve.chain import Chain, Schedule
from jax_hremat._solve.output_reuse import Result
from jax_hremat._solve.prediction import Prediction, predict
from jax_hremat._solve.schedule import Schedules

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
# With each correction but the first, the reuse assumed there is less by this part of the limit
# once more, as long as that leaves any schedule.
_SPARE = 0.003
# The most blocks of schedules that are predicted to see whether an exchange fits.
_MAX_PREDICTED_BLOCKS = 12_000


def fastest_with_reuse(
    schedules: Schedules,
    peak_bytes: int,
    results: Sequence[Result],
    config: SolverConfig,
    *,
    groups: bool = True,
) -> Schedule:
    """The fastest schedule found within a predicted peak.

    Its predicted peak may exceed the bound by a thousandth of what the bound leaves beyond
    arguments and outputs. Infeasibility and the bound on time, from which the gap is, are those of
    programs that exclude no schedule. After corrections, which exclude some, a schedule may be
    missed: `Status.NOT_FOUND`.

    Args:
        schedules: The schedules to choose from.
        peak_bytes: Bound on the predicted peak.
        results: The gradients that the step returns.
        config: The solver's limits.
        groups: Whether consecutive blocks may be checkpointed together.
    """
    question = _Question(schedules, peak_bytes, results, config, groups)
    first = question.answer(most_reused(results, schedules.chain), 0.0)
    if first.fits or first.promise is None:
        return first.schedule
    priced = question.at_prices(first)
    tightest = max((first, *priced), key=lambda answer: answer.schedule.bound_s)
    bound_s = tightest.schedule.bound_s
    last = priced[-1]
    if last.schedule.outcome.status is Status.INFEASIBLE:
        return replace(last.schedule, bound_s=bound_s)
    found = last if last.fits else question.found_from(first, tightest, bound_s)
    return question.exchanged(found, bound_s).bounded(bound_s, config)


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

    def bounded(self, bound_s: float, config: SolverConfig) -> Schedule:
        """The schedule, with what a bound proves that excludes no schedule."""
        outcome = self.schedule.outcome
        if self.promise is not None:
            # A program may take no time.
            gap = max(1 - bound_s / max(self.promise.time_s, 1e-15), 0.0)
            status = Status.OPTIMAL if gap <= config.relative_gap else Status.LIMIT
            outcome = replace(outcome, status=status, gap=gap)
        elif outcome.status is Status.INFEASIBLE:
            outcome = replace(outcome, status=Status.NOT_FOUND)
        return replace(self.schedule, outcome=outcome, bound_s=bound_s)


class _Question(NamedTuple):
    """The search for a schedule within a peak."""

    schedules: Schedules
    peak_bytes: int
    results: Sequence[Result]
    config: SolverConfig
    groups: bool

    @property
    def chain(self) -> Chain:
        """Blocks and their options."""
        return self.schedules.chain

    @property
    def limit_bytes(self) -> int:
        """The bound, arguments and outputs not counted."""
        return self.peak_bytes - self.chain.fixed_bytes

    def answer(self, reused: AssumedReuse, guess_s: float, num_corrections: int = 0) -> _Answer:
        """The answer under assumptions, given a guess of its time and how many corrections in a row
        led to them."""
        schedule = self.schedules.fastest_within(
            self.peak_bytes, self.config, groups=self.groups, reused=reused, guess_s=guess_s
        )
        return self._answer(reused, schedule, num_corrections)

    def _answer(self, reused: AssumedReuse, schedule: Schedule, num_corrections: int) -> _Answer:
        if schedule.selection is None:
            return _Answer(reused, num_corrections, schedule, None, fits=False)
        promise = predict(self.chain, schedule.selection, self.results)
        fits = promise.peak_bytes <= self._most_bytes
        return _Answer(reused, num_corrections, schedule, promise, fits)

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

    def found_from(self, first: _Answer, tightest: _Answer, bound_s: float) -> _Answer:
        """The answer found from two that do not fit, by corrections of what they assume."""
        answers = (first,) if tightest is first else (first, tightest)
        waiting = [(a, a.promise) for a in answers if a.promise is not None]
        num_corrections = 0
        while waiting:
            fastest = min(waiting, key=lambda pair: pair[1].time_s)
            answer, promise = fastest
            if answer.fits:
                return self.improved(answer, bound_s)
            waiting.remove(fastest)
            if num_corrections < _MAX_CORRECTIONS:
                num_corrections += 1
                corrected = self.corrected(answer, promise)
                if corrected.promise is not None:
                    waiting.append((corrected, corrected.promise))
        return self.improved(self.without_reuse(bound_s), bound_s)

    def corrected(self, answer: _Answer, promise: Prediction) -> _Answer:
        """The answer with as much reuse as this one, which is predicted to cost so much, shows."""
        seen = _seen(answer.schedule, promise)

        def shown(num_spares: int) -> _Answer:
            spare_bytes = int(num_spares * _SPARE * self.limit_bytes)

            def saved_bytes(_: int, moment: _Moment) -> int:
                return moment.saved_bytes - spare_bytes * self._is_tight(moment)

            reused = seen.changed(answer.reused, saved_bytes)
            return self.answer(reused, promise.time_s, num_spares + 1)

        # The next schedule has other buffers, which may reuse less.
        with_spare = shown(answer.num_corrections)
        if with_spare.promise is None and answer.num_corrections:
            return shown(0)
        return with_spare

    def improved(self, answer: _Answer, bound_s: float) -> _Answer:
        """The fastest of an answer and of others that fit, found from what is reused in it, given a
        bound on time. Less is assumed where another shows less, as far as the answer fits."""
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
                reused = self._enough(self._less(reused, seen_other), seen)
        return answer

    def exchanged(self, answer: _Answer, bound_s: float) -> _Answer:
        """An answer, made faster by exchanges of its columns, given a bound on time. Each exchange
        that is made saves no more than the one before: what would save more did not fit."""
        if answer.promise is None or answer.promise.time_s <= (1 + _FASTER) * bound_s:
            return answer
        reused = reuse_shown_by(answer.promise, self.results, len(self.chain))
        most_ms = math.inf
        num_left = _MAX_PREDICTED_BLOCKS // len(self.chain)
        while num_left:
            possible = self.schedules.exchanges(
                answer.schedule, self._most_bytes, groups=self.groups, reused=reused
            )
            for saved_ms, schedule in itertools.islice(
                (pair for pair in possible if pair[0] <= most_ms), num_left
            ):
                num_left -= 1
                other = self._answer(reused, schedule, 0)
                if other.fits:
                    answer, most_ms = other, saved_ms
                    break
            else:
                break
        return answer

    def without_reuse(self, bound_s: float) -> _Answer:
        """The answer if nothing is reused. If no schedule fits so, that of least peak, if it fits
        with what it reuses."""
        nothing = (0,) * len(self.chain)
        answer = self.answer(AssumedReuse(nothing, nothing), 0.0)
        if answer.promise is not None:
            return answer
        lowest = self.schedules.least_peak(self.config, groups=self.groups)
        assert lowest.selection is not None, "without a peak bound a selection exists"
        promise = predict(self.chain, lowest.selection, self.results)
        if promise.peak_bytes > self._most_bytes:
            return answer
        added_ms = 1e3 * promise.time_s - self.chain.fastest_ms
        # Its peak may exceed the bound a little, so that it may be faster than what bounds others.
        gap = max(1 - bound_s / promise.time_s, 0.0)
        outcome = Outcome(Status.LIMIT, added_ms, gap)
        schedule = replace(lowest, outcome=outcome)
        return _Answer(answer.reused, 0, schedule, promise, fits=True)

    @property
    def _most_bytes(self) -> float:
        """The highest predicted peak that is accepted."""
        return self.peak_bytes + _CLOSE * self.limit_bytes

    def _is_tight(self, moment: _Moment) -> bool:
        return moment.live_bytes > (1 - _TIGHT) * self.limit_bytes

    def _less(self, reused: AssumedReuse, seen: _Seen) -> AssumedReuse:
        """The same assumptions, but for where a schedule leaves little memory or none: there no
        more is saved than the schedule takes less than the program counts."""
        return seen.changed(
            reused, lambda b, moment: min(b, moment.saved_bytes) if self._is_tight(moment) else b
        )

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
