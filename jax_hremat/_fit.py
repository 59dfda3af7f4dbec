"""A whole training step that fits: its plan, and the largest batch that it can take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from rich.text import Text

from jax_hremat._api import apply_plan
from jax_hremat._compiler.target import Target, attached_bytes
from jax_hremat._planner.bench import PlannerConfig
from jax_hremat._planner.request import PlanRequest, positions_of
from jax_hremat._plans.plan import RematPlan
from jax_hremat._program.step import LossFunction, MakeStep, training_step
from jax_hremat._shared.errors import InfeasibleBudgetError
from jax_hremat._shared.format import format_bytes, format_seconds
from jax_hremat._shared.progress import Progress
from jax_hremat._shared.text import plain_table, plain_text
from jax_hremat._shared.units import parse_goal

# Of an attached device's memory, what is left for library workspaces and the allocator.
_DEVICE_HEADROOM = 0.05


class FittedStep(NamedTuple):
    """A training step within its budget.

    Attributes:
        step: The step, jitted with the donated arguments and the compiler options that the
            certificate is for.
        plan: Its plan; the certificate is of the whole step.
    """

    step: Callable[..., Any]
    plan: RematPlan


def fit_step(
    make_step: MakeStep,
    loss_fn: LossFunction,
    *,
    budget: int | float | str | None = None,
    max_slowdown: float | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    donate_argnums: int | Sequence[int] = 0,
    target: str | os.PathLike[str] | Target | None = None,
    headroom_bytes: int | None = None,
    config: PlannerConfig | None = None,
    progress: Progress | None = None,
) -> Callable[..., FittedStep]:
    """Plan a loss so that the whole training step around it fits.

    What is compiled and bounded is `jax.jit(make_step(loss_fn), donate_argnums)`: the optimizer
    and its state, accumulation over microbatches, clipping and loss scaling are in it, as is all
    else that the step does.

    Args:
        make_step: Takes a loss function and returns the training step that differentiates it.
        loss_fn: The loss, as for `plan_remat`.
        budget: As in `plan_remat`, of the whole step; or `"device"`: what the attached GPU has.
        max_slowdown: In place of a budget, as in `plan_remat`, of the whole step.
        argnums, has_aux: As in `jax.grad`, of the loss.
        donate_argnums: Arguments of the step that are donated: the state, as a rule.
        target, config, progress: As in `plan_remat`.
        headroom_bytes: As in `plan_remat`; None for none, or a twentieth of the device.

    Returns:
        A function of the step's arguments, arrays or `jax.ShapeDtypeStruct`s, that returns the
        step, jitted, and its plan. Nothing is allocated or run.

    Raises:
        UnsupportedProgramError: The step does not call the loss, or with differing shapes.
        What `plan_remat` raises.

    Unchecked: that the step is called with the shapes it was planned at.

    >>> import jax, jax.numpy as jnp, jax_hremat
    >>> loss = lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)
    >>> def make_step(loss_fn):
    ...     return lambda w, x: w - 0.1 * jax.grad(loss_fn)(w, x)
    >>> fit = jax_hremat.fit_step(make_step, loss, budget=1.0, target="cpu")
    >>> step, plan = fit(jnp.ones((64, 64)), jnp.ones((256, 64)))
    >>> step(jnp.ones((64, 64)), jnp.ones((256, 64))).shape
    (64, 64)
    """
    if budget == "device":
        budget = attached_bytes()
        if headroom_bytes is None:
            headroom_bytes = int(_DEVICE_HEADROOM * budget)
    goal = parse_goal(budget, max_slowdown)
    request = PlanRequest.make(target, headroom_bytes or 0, config, progress)
    positions, donated = positions_of(argnums), positions_of(donate_argnums)

    def fit(*args: Any) -> FittedStep:
        start_s = time.perf_counter()
        step = training_step(
            make_step, loss_fn, args, argnums=positions, has_aux=has_aux, donate_argnums=donated
        )
        plan = request.plan(step, time.perf_counter() - start_s, goal, positions, has_aux)
        jitted = jax.jit(
            make_step(apply_plan(loss_fn, plan)),
            donate_argnums=donated,
            compiler_options=dict(request.target.compiler_options),
        )
        return FittedStep(jitted, plan)

    return fit


@dataclass(frozen=True)
class BatchTrial:
    """One batch size that was tried.

    Attributes:
        size: The batch size.
        fitted: The step and its plan; None if no plan fits.
        min_budget_bytes: What it takes at least, where no plan fits.
    """

    size: int
    fitted: FittedStep | None
    min_budget_bytes: int | None = None

    @property
    def per_s(self) -> float:
        """Examples a second, by the estimated step time; 0 where no plan fits."""
        return 0.0 if self.fitted is None else self.size / self.fitted.plan.estimated_step_s


@dataclass(frozen=True)
class BatchSearch:
    """What `max_batch` found.

    Attributes:
        trials: What was tried, smallest batch first; the first of them fits.
    """

    trials: tuple[BatchTrial, ...]

    @property
    def budget_bytes(self) -> int:
        """What each had to fit in."""
        fitted = self.trials[0].fitted
        assert fitted is not None, "if the smallest batch does not fit there is no search"
        return fitted.plan.certificate.budget_bytes

    @property
    def best(self) -> BatchTrial:
        """The trial of highest throughput."""
        return max(self.trials, key=lambda trial: trial.per_s)

    @property
    def largest(self) -> BatchTrial:
        """The largest batch that fits."""
        return max((t for t in self.trials if t.fitted is not None), key=lambda t: t.size)

    def __str__(self) -> str:
        table = plain_table()
        for column in ("batch", "certified peak", "est. step", "over no remat", "examples/s"):
            table.add_column(column, justify="right")
        table.add_column("")
        for trial in self.trials:
            if trial.fitted is None:
                assert trial.min_budget_bytes is not None
                needs = f"needs {format_bytes(trial.min_budget_bytes)}"
                table.add_row(str(trial.size), "", "", "", "", Text(needs))
                continue
            plan = trial.fitted.plan
            table.add_row(
                str(trial.size),
                format_bytes(plan.certificate.peak_bytes),
                format_seconds(plan.estimated_step_s),
                f"{100 * (plan.slowdown - 1):+.1f} %",
                f"{trial.per_s:.4g}",
                "best" if trial == self.best else "",
            )
        return plain_text(Text(f"budget: {format_bytes(self.budget_bytes)}"), Text(), table)

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
    """The batch size, with its plan, of the highest throughput within a budget.

    The largest size that fits is found by halving; then sizes around the best one are tried,
    since the largest batch may recompute so much that a smaller one is faster. Of a size that does
    not fit, what it needs is only looked for roughly (`PlannerConfig.floor_rounds` is 0).

    Args:
        make_step, loss_fn: As in `fit_step`; the step takes a state and a batch.
        budget: As in `fit_step`, in bytes.
        sizes: The batch sizes to choose from.
        max_trials: How many are planned at most; each takes as long as a `fit_step`.
        **options: As in `fit_step`.

    Returns:
        A function of the state and of a function from a batch size to the batch, arrays or
        `jax.ShapeDtypeStruct`s; it returns what was tried and what was best.

    Raises:
        InfeasibleBudgetError: Not even the smallest size fits.
        ValueError: No sizes, or one that is not positive.
        What `fit_step` raises.
    """
    ordered = sorted(set(sizes))
    if not ordered or ordered[0] < 1:
        raise ValueError(f"sizes={sizes!r}: give the batch sizes to choose from, all positive")
    if isinstance(budget, float):
        raise ValueError(
            f"budget={budget!r}: a fraction would be another budget for each batch; give bytes"
        )
    config = replace(options.pop("config", None) or PlannerConfig(), floor_rounds=0)
    fit = fit_step(make_step, loss_fn, budget=budget, config=config, **options)

    def search(state: Any, batch_of: Callable[[int], Any]) -> BatchSearch:
        trials: dict[int, BatchTrial] = {}

        def fits(index: int) -> bool:
            size = ordered[index]
            if index not in trials:
                try:
                    trials[index] = BatchTrial(size, fit(state, batch_of(size)))
                except InfeasibleBudgetError as error:
                    if index == 0:
                        raise
                    trials[index] = BatchTrial(size, None, error.min_budget_bytes)
            return trials[index].fitted is not None

        fits(0)
        low, high = 0, len(ordered)
        while high - low > 1 and len(trials) < max_trials:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        while len(trials) < max_trials:
            around = _untried_around(trials)
            if not around:
                break
            for index in around[: max_trials - len(trials)]:
                fits(index)
        return BatchSearch(tuple(trials[i] for i in sorted(trials)))

    return search


def _untried_around(trials: dict[int, BatchTrial]) -> list[int]:
    """Halfway from the best trial to its nearest neighbours that fit, where there is room."""
    fitting = sorted(i for i, trial in trials.items() if trial.fitted is not None)
    at = fitting.index(max(fitting, key=lambda i: trials[i].per_s))
    neighbours = [fitting[i] for i in (at - 1, at + 1) if 0 <= i < len(fitting)]
    halfway = [(fitting[at] + neighbour) // 2 for neighbour in neighbours]
    return [index for index in halfway if index not in trials]
