"""The batch size with the highest throughput that fits, with its plan."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from jax_hremat._emit.step import LossFunction, MakeStep
from jax_hremat._fit import FittedStep, fit_step
from jax_hremat._plan.infeasible import InfeasibleBudgetError
from jax_hremat._planner.config import config_of
from jax_hremat._shared.format import format_bytes, format_seconds, format_signed_percent
from jax_hremat._shared.text import plain_table, plain_text
from jax_hremat._shared.units import parse_budget

_LEGEND = (
    "Peaks are certified, times estimated. Added time: compared with the same batch without "
    "rematerialization."
)


@dataclass(frozen=True)
class BatchTrial:
    """One batch size that was tried.

    Attributes:
        size: The batch size.
        fitted: The step and its plan; None if no plan fits.
        min_budget_bytes: The smallest budget that a plan was found for, where no plan fits.
    """

    size: int
    fitted: FittedStep | None
    min_budget_bytes: int | None = None

    @property
    def per_s(self) -> float:
        """Examples per second, by the estimated step time; 0 where no plan fits."""
        return 0.0 if self.fitted is None else self.size / self.fitted.plan.estimated_step_s


@dataclass(frozen=True)
class BatchSearch:
    """What `max_batch` found.

    Attributes:
        trials: The batch sizes that were tried, smallest first; the first of them fits.
    """

    trials: tuple[BatchTrial, ...]

    @property
    def budget_bytes(self) -> int:
        """The budget that every trial had to fit."""
        fitted = self.trials[0].fitted
        assert fitted is not None, "if the smallest batch does not fit there is no search"
        return fitted.plan.certificate.budget_bytes

    @property
    def best(self) -> BatchTrial:
        """The trial with the highest throughput."""
        return max(self.trials, key=lambda trial: trial.per_s)

    @property
    def largest(self) -> BatchTrial:
        """The largest batch tried that fits."""
        return max((t for t in self.trials if t.fitted is not None), key=lambda t: t.size)

    def __str__(self) -> str:
        table = plain_table()
        for column in ("batch", "peak", "step", "added time", "examples/s"):
            table.add_column(column, justify="right")
        table.add_column("")
        for trial in self.trials:
            if trial.fitted is None:
                assert trial.min_budget_bytes is not None
                needs = f"needs a budget of {format_bytes(trial.min_budget_bytes)}"
                table.add_row(str(trial.size), "", "", "", "", Text(needs))
                continue
            plan = trial.fitted.plan
            table.add_row(
                str(trial.size),
                format_bytes(plan.certificate.peak_bytes),
                format_seconds(plan.estimated_step_s),
                format_signed_percent(plan.slowdown - 1),
                f"{trial.per_s:.4g}",
                "best" if trial == self.best else "",
            )
        title = f"Budget: {format_bytes(self.budget_bytes)}"
        return plain_text(Text(title), Text(), table, Text(), Text(_LEGEND))

    def __repr__(self) -> str:
        sizes = ", ".join(str(trial.size) for trial in self.trials)
        return f"BatchSearch(best {self.best.size} of tried {sizes})"


def max_batch(
    make_step: MakeStep,
    loss_fn: LossFunction,
    *,
    budget: int | str,
    sizes: Sequence[int],
    max_trials: int = 8,
    **options: Any,
) -> Callable[[Any, Callable[[int], Any]], BatchSearch]:
    """The batch size with the highest throughput within a budget, with its plan.

    It is usually near the largest batch that fits without rematerialization. That size is estimated
    from a line through the peaks measured without rematerialization, and is tried first. Then sizes
    halfway between the best one and its neighbours are tried. Half of the trials go to a bisection
    for the largest batch that fits. For a size that does not fit, the budget it needs is found only
    roughly (`PlannerConfig.floor_rounds` is 0).

    Args:
        make_step, loss_fn: As in `fit_step`; the step takes a state and a batch.
        budget: As in `fit_step`, but no share, which would be other bytes for each size.
        sizes: The batch sizes to choose from.
        max_trials: How many sizes are planned at most; each takes as long as one `fit_step`.
        **options: As in `fit_step`.

    Returns:
        A function of the state and of a function from a batch size to the batch (arrays or
        `jax.ShapeDtypeStruct`s); it returns the sizes tried and the best of them.

    Raises:
        InfeasibleBudgetError: Not even the smallest size fits.
        ValueError: No sizes, or a size that is not positive.
        TypeError: A batch is given, and not a function from a size to the batch.
        What `fit_step` raises.

    Unchecked: that throughput has one maximum over the sizes, so that no better size was missed.
    """
    ordered = sorted(set(sizes))
    if not ordered or ordered[0] < 1:
        raise ValueError(f"sizes={sizes!r}: give the batch sizes to choose from, all positive")
    if budget != "device" and parse_budget(budget).fraction is not None:
        raise ValueError(
            f"budget={budget!r}: a share means another number of bytes for each batch size; give "
            'bytes, such as "70GiB", or "device"'
        )
    chosen = config_of(options.pop("config", None), options.pop("effort", None))
    config = replace(chosen, floor_rounds=0)
    fit = fit_step(make_step, loss_fn, budget=budget, config=config, **options)

    def search(state: Any, batch_of: Callable[[int], Any]) -> BatchSearch:
        if not callable(batch_of):
            raise TypeError(
                "`max_batch` tries batches of several sizes: give it a function from a size to the "
                "batch, such as `lambda size: jax.ShapeDtypeStruct((size, 224, 224, 3), "
                "jnp.float32)`, and not a batch"
            )
        try:
            trials = {0: BatchTrial(ordered[0], fit(state, batch_of(ordered[0])))}
        except InfeasibleBudgetError as error:
            error.add_note(f"This is the smallest of the batch sizes, {ordered[0]}.")
            raise
        while len(trials) < max_trials:
            index = next(_untried(trials, ordered, len(trials) <= max_trials // 2), None)
            if index is None:
                break
            size = ordered[index]
            try:
                trials[index] = BatchTrial(size, fit(state, batch_of(size)))
            except InfeasibleBudgetError as error:
                trials[index] = BatchTrial(size, None, error.min_budget_bytes)
        return BatchSearch(tuple(trials[i] for i in sorted(trials)))

    return search


def _untried(
    trials: Mapping[int, BatchTrial], sizes: Sequence[int], for_speed: bool
) -> Iterator[int]:
    """Positions of sizes worth trying, best first: for throughput, or for the largest batch."""
    guesses = [_largest_as_it_is(trials, sizes), *_around_best(trials, len(sizes))]
    larger = _larger(trials, len(sizes))
    for index in [*guesses, larger] if for_speed else [larger, *guesses]:
        if index not in trials:
            yield index


def _largest_as_it_is(trials: Mapping[int, BatchTrial], sizes: Sequence[int]) -> int:
    """The largest size that fits without rematerialization, on a line through the peaks of the two
    sizes whose peaks are nearest to the budget. At size 0, the peak is taken to be what does not
    grow with the batch: roughly the arguments and constants."""
    plans = [(t.size, t.fitted.plan) for t in trials.values() if t.fitted is not None]
    certificate = plans[0][1].certificate
    budget_bytes = certificate.budget_bytes - certificate.headroom_bytes
    seen = [(0, certificate.argument_bytes + certificate.constant_bytes)]
    seen += [(size, plan.baseline_peak_bytes) for size, plan in plans]
    (a, a_bytes), (b, b_bytes) = sorted(seen, key=lambda s: abs(s[1] - budget_bytes))[:2]
    slope = (b_bytes - a_bytes) / (b - a)
    largest = a + (budget_bytes - a_bytes) / slope if slope > 0 else math.inf
    return max(0, bisect_right(sizes, largest) - 1)


def _around_best(trials: Mapping[int, BatchTrial], count: int) -> list[int]:
    """Halfway from the best trial to the next larger one (or the end) and to the next smaller."""
    at = max(trials, key=lambda i: trials[i].per_s)
    above = min((i for i in trials if i > at), default=count)
    below = max((i for i in trials if i < at), default=at)
    return [(at + above) // 2, (at + below) // 2]


def _larger(trials: Mapping[int, BatchTrial], count: int) -> int:
    """Halfway between the largest trial that fits and the smallest that does not (or the end)."""
    fits = max(i for i, trial in trials.items() if trial.fitted is not None)
    too_large = min((i for i, trial in trials.items() if trial.fitted is None), default=count)
    return (fits + too_large) // 2
