"""A whole training step that fits, and its plan."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jax_hremat._api import apply_plan
from jax_hremat._compiler.target import Target, attached_bytes
from jax_hremat._planner.bench import PlannerConfig
from jax_hremat._planner.request import PlanRequest, positions_of
from jax_hremat._plans.plan import RematPlan
from jax_hremat._program.step import LossFunction, MakeStep, training_step
from jax_hremat._shared.progress import Progress
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
            make_step,
            loss_fn,
            args,
            argnums=positions,
            has_aux=has_aux,
            donate_argnums=donated,
            opens_checkpoints=request.config.open_checkpoints,
        )
        plan = request.plan(step, time.perf_counter() - start_s, goal, positions, has_aux)
        jitted = jax.jit(
            make_step(apply_plan(loss_fn, plan)),
            donate_argnums=donated,
            compiler_options=dict(request.target.compiler_options),
        )
        return FittedStep(jitted, plan)

    return fit
