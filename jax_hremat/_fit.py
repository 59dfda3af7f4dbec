"""A whole training step that fits its budget, and its plan."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jax_hremat._api import apply_plan
from jax_hremat._calls.planned import Loss, check_plan_is_for
from jax_hremat._emit.step import JittedStep, LossFunction, MakeStep, training_step
from jax_hremat._flax.objects import Leaf, holds_objects, is_object
from jax_hremat._jax.trace_context import even_without_jit
from jax_hremat._plan.plan import RematPlan
from jax_hremat._planner.config import Effort, PlannerConfig
from jax_hremat._planner.request import PlanRequest, positions_of
from jax_hremat._planner.transfer import certified_again
from jax_hremat._shared.errors import BudgetFormatError
from jax_hremat._shared.progress import Progress
from jax_hremat._shared.units import Budget, parse_goal
from jax_hremat._trace.call import Arguments, is_array, is_number, name_of
from jax_hremat._xla.target import Target, get_target, memory_bytes_of

# Fraction of a device's memory that is left for library workspaces and the allocator.
_DEVICE_HEADROOM = 0.05


class FittedStep(NamedTuple):
    """A training step within its budget.

    Attributes:
        step: The step, jitted with the donated arguments and the compiler options that the
            certificate is for.
        plan: Its plan; the certificate is for the whole step.
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
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    plan: RematPlan | str | os.PathLike[str] | None = None,
    target: str | os.PathLike[str] | Target | None = None,
    headroom_bytes: int | str | None = None,
    config: PlannerConfig | None = None,
    effort: Effort | None = None,
    progress: Progress | None = None,
) -> Callable[..., FittedStep]:
    """Plan a loss so that the whole training step around it fits.

    The budget bounds the compiled `jax.jit(make_step(loss_fn), donate_argnums)`: it includes the
    optimizer and its state, accumulation over microbatches, clipping, loss scaling and everything
    else that the step does.

    A step may take NNX modules, optimizers, metrics and random keys as they are, and change them;
    `nnx.jit` is not needed. Of donated objects, the state is donated: the objects get new arrays.

    Args:
        make_step: Takes a loss function and returns the training step that differentiates it.
        loss_fn: The loss, as for `plan_remat`.
        budget: As in `plan_remat`, for the whole step; or `"device"`: the memory that JAX may use
            on the attached GPU (by default about three quarters of it), or that of the target if
            one is named.
        max_slowdown: In place of a budget, as in `plan_remat`, for the whole step.
        argnums, has_aux: As in `jax.grad`, for the loss.
        donate_argnums: Arguments of the step that are donated: usually the state.
        static_argnums, static_argnames: As in `jax.jit`, for the step. Flags, strings and functions
            need not be named, also inside other arguments (the `inference` of an Equinox module).
        plan: A plan, or the path of its file, to certify again in place of planning: the step is
            compiled with it, and compiled without it only if the result differs from the plan's
            figures. If no budget is given, the plan's own is used.
        target, config, effort, progress: As in `plan_remat`.
        headroom_bytes: As in `plan_remat`. If None, 0, or with `budget="device"` a twentieth of the
            device's memory.

    Returns:
        A function of the step's arguments, arrays or `jax.ShapeDtypeStruct`s, that returns the
        jitted step and its plan. The step is not run.

    Raises:
        UnsupportedProgramError: The step does not call the loss, or calls it with differing
            structures, shapes or static arguments.
        StalePlanError: The given plan is for another loss, shapes or static arguments.
        InfeasibleBudgetError: The given plan takes more than the budget.
        TypeError: `make_step` cannot be called with the loss alone.
        What `plan_remat` raises, and for a file what `RematPlan.load` raises.

    Unchecked: that the step is called with the shapes it was planned for.

    >>> import jax, jax.numpy as jnp, jax_hremat
    >>> loss = lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)
    >>> def make_step(loss_fn):
    ...     return lambda w, x: w - 0.1 * jax.grad(loss_fn)(w, x)
    >>> fit = jax_hremat.fit_step(make_step, loss, budget=1.0, target="cpu")
    >>> step, plan = fit(jnp.ones((64, 64)), jnp.ones((256, 64)))
    >>> step(jnp.ones((64, 64)), jnp.ones((256, 64))).shape
    (64, 64)
    """
    _check_maker(make_step, loss_fn)
    chosen = get_target(target)
    if budget == "device":
        budget = memory_bytes_of(chosen)
        if headroom_bytes is None:
            headroom_bytes = int(_DEVICE_HEADROOM * budget)
    given = plan if isinstance(plan, RematPlan) or plan is None else RematPlan.load(plan)
    if given is not None and budget is None and max_slowdown is None:
        budget = given.certificate.budget_bytes
    goal = parse_goal(budget, max_slowdown)
    if given is not None and not isinstance(goal, Budget):
        raise BudgetFormatError(
            f"max_slowdown={max_slowdown!r} was given with a plan, which is only certified again; "
            f"give a budget, or neither for the plan's own"
        )
    request = PlanRequest.make(chosen, headroom_bytes or 0, config, effort, progress)
    positions, donated = positions_of(argnums), positions_of(donate_argnums)
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    declared = _Declared(positions_of(static_argnums), names)

    @even_without_jit
    def fit(*args: Any, **kwargs: Any) -> FittedStep:
        start_s = time.perf_counter()
        static = declared.among(args, kwargs)
        loss, bound_to = Loss.of(loss_fn, positions, has_aux)
        step = training_step(
            make_step,
            loss_fn,
            # In the step, a number that is not traced is one that the step gives: it stays one,
            # unless it differs from call to call.
            [
                lambda args, kwargs: loss.trace((*bound_to, *args), kwargs),
                lambda args, kwargs: loss.trace_as_jit((*bound_to, *args), kwargs),
            ],
            Arguments.of(args, kwargs, traces_scalar=lambda leaf: not static.has(leaf)),
            has_aux=has_aux,
            donate_argnums=donated,
        )
        if given is None:
            trace_s = time.perf_counter() - start_s
            made = request.plan(step, trace_s, goal, positions, has_aux)
        else:
            assert isinstance(goal, Budget), "a slowdown is refused above"
            check_plan_is_for(step.program.with_opened(given.opened), given, name_of(loss_fn))
            made = certified_again(step, given, chosen, goal, request.headroom_bytes)
        planned = make_step(apply_plan(loss_fn, made))
        return FittedStep(_jitted(planned, args, kwargs, static, donated, chosen), made)

    return fit


def _check_maker(make_step: MakeStep, loss_fn: LossFunction) -> None:
    """Refuse a training step where a function that makes one is expected."""
    try:
        signature = inspect.signature(make_step)
    except ValueError:  # Some callables do not tell their parameters.
        return
    try:
        signature.bind(loss_fn)
    except TypeError as error:
        raise TypeError(
            f"`make_step` takes a loss and returns the training step that differentiates it; "
            f"`{name_of(make_step)}{signature}` cannot be called with a loss alone ({error}). Give "
            f"the function that makes the step, then the loss: `fit_step(make_step, loss_fn)`"
        ) from None


@dataclass(frozen=True, slots=True)
class _Declared:
    """Static arguments of the step, by position or name.

    Attributes:
        argnums, argnames: Those that are static as a whole.
        beside: Those with leaves inside that `jax.jit` does not take, or takes for numbers: flags
            and functions. Numbers beside these are static, as in `equinox.filter_jit`.
    """

    argnums: tuple[int, ...]
    argnames: tuple[str, ...]
    beside: frozenset[int | str] = frozenset()

    def among(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Declared:
        """The declared arguments, and all others that are flags, strings or functions."""
        argnums = {p % len(args) for p in self.argnums if -len(args) <= p < len(args)}
        argnums |= {i for i, arg in enumerate(args) if _is_static(arg)}
        argnames = {*self.argnames, *(k for k, arg in kwargs.items() if _is_static(arg))}
        beside = (k for k, arg in (*enumerate(args), *kwargs.items()) if _holds_static(arg))
        return _Declared(tuple(sorted(argnums)), tuple(sorted(argnames)), frozenset(beside))

    def has(self, leaf: Leaf) -> bool:
        """Whether a leaf of `(args, kwargs)` is a flag, belongs to one of these arguments, or is a
        number beside static leaves."""
        kind, key, *_ = leaf.path
        which = key.idx if kind.idx == 0 else key.key
        if which in (*self.argnums, *self.argnames) or isinstance(leaf.value, bool):
            return True
        return which in self.beside and is_number(leaf.value)


def _is_static(arg: Any) -> bool:
    is_leaf = jax.tree.all(jax.tree.map(lambda x: x is arg, arg))
    return is_leaf and not (arg is None or is_array(arg) or is_number(arg) or is_object(arg))


def _holds_static(arg: Any) -> bool:
    """Whether an argument has leaves inside that are static: neither arrays nor numbers."""
    leaves = jax.tree.leaves(arg, is_leaf=is_object)
    return not all(is_array(x) or is_number(x) or is_object(x) for x in leaves)


def _jitted(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static: _Declared,
    donated: tuple[int, ...],
    target: Target,
) -> Callable[..., Any]:
    """The step, jitted; by `jax.jit` itself if `jax.jit` accepts the arguments."""
    options = dict(target.compiler_options)
    others = [
        *(arg for i, arg in enumerate(args) if i not in static.argnums),
        *(arg for name, arg in kwargs.items() if name not in static.argnames),
    ]
    if not any(map(_holds_static, others)) and not holds_objects(others):
        return jax.jit(
            step,
            donate_argnums=donated,
            static_argnums=static.argnums,
            static_argnames=static.argnames,
            compiler_options=options,
        )
    return JittedStep(step, is_static=static.has, donate_argnums=donated, compiler_options=options)
