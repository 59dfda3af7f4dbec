"""Flax NNX: planned loss functions of modules, and module classes with planned methods."""

from __future__ import annotations

import copyreg
import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from jax_hremat._calls.planned import (
    MadePlans,
    planned_class,
    planned_function,
    reduce_class,
    run_planned,
)
from jax_hremat._flax.objects import Leaf, variables_of
from jax_hremat._planner.config import Effort, PlannerConfig
from jax_hremat._planner.request import PlanRequest, positions_of
from jax_hremat._shared.errors import UnsupportedProgramError
from jax_hremat._shared.methods import CALL, methods_of
from jax_hremat._shared.progress import Progress
from jax_hremat._shared.units import Budget, Slowdown, parse_goal
from jax_hremat._trace.call import Arguments, TracedCall, trace_arguments
from jax_hremat._xla.target import Target


def remat(
    fun: Any = None,
    *,
    budget: int | float | str | None = None,
    max_slowdown: float | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    wrt: Any = nnx.Param,
    target: str | os.PathLike[str] | Target | None = None,
    headroom_bytes: int | str = 0,
    config: PlannerConfig | None = None,
    effort: Effort | None = None,
    progress: Progress | None = None,
    methods: str | Sequence[str] = CALL,
) -> Any:
    """Plan a loss function of NNX modules, or a module class, when it is first called.

    On a function, `nnx.value_and_grad(remat(loss_fn, budget="70GiB"))(model, batch)` is the step
    the budget bounds, compiled as `jax.value_and_grad` over the modules' parameters.

    On a class, the result is a subclass with the same state whose `__call__` is planned; the budget
    bounds that call with its pullback with respect to parameters and floating inputs. Checkpoints
    of either class load in the other.

    State is handled as in `nnx.grad`: what the call changes in modules, variables, `nnx.Rngs`,
    metrics and other NNX objects is changed in the caller's objects, wherever they are among the
    arguments: in positions, keywords or containers, or in several of these at once. Arrays are
    traced and anything else is static, including Python numbers: a number of another value gives
    another program. The function is traced at each call.

    Args:
        fun: The function, method or class; omitted when used as a decorator with options.
        argnums: Arguments that are differentiated, as in `nnx.grad`; for functions.
        has_aux: Whether the function returns `(loss, aux)`; for functions.
        wrt: Filter for the state that is differentiated.
        methods: Names of the methods that are planned, each separately under the budget; for
            classes.
        budget, max_slowdown, target, headroom_bytes, config, effort, progress: As in
            `jax_hremat.plan_remat`.

    Returns:
        The function, whose attribute `plans` holds the plans in use; or the class, whose class
        method `hremat_plans()` returns them.

    Raises:
        UnsupportedProgramError: An instance of a module, or a class without such a method; when
            called, what `plan_remat` refuses.
        The errors of `plan_remat`, those about the budget and the target at once.

    State that is not among the arguments (in a closure) is constant: a call that would change it,
    or that puts an array into a container among its arguments, is refused.
    """
    options: dict[str, Any] = dict(
        budget=budget,
        max_slowdown=max_slowdown,
        wrt=wrt,
        target=target,
        headroom_bytes=headroom_bytes,
        config=config,
        effort=effort,
        progress=progress,
        methods=methods,
    )
    if fun is None:
        return functools.partial(remat, argnums=argnums, has_aux=has_aux, **options)
    goal = parse_goal(budget, max_slowdown)
    request = PlanRequest.make(target, headroom_bytes, config, effort, progress)
    if isinstance(fun, nnx.Module):
        raise UnsupportedProgramError(
            f"this is an instance of `{type(fun).__name__}`; plan its class, or the loss function "
            f"that calls it"
        )
    if inspect.isclass(fun):
        remake = functools.partial(remat, fun, **options)
        return _planned_class(fun, goal, request, wrt, methods, remake)
    positions = positions_of(argnums)
    made = MadePlans(request, goal, positions, has_aux)
    return planned_function(fun, made, positions, has_aux, wrt)


class PlannedMeta(type(nnx.Module)):
    """The metaclass of planned classes, through which they are pickled."""


copyreg.pickle(PlannedMeta, reduce_class)


def _planned_class(
    module_class: type,
    goal: Budget | Slowdown,
    request: PlanRequest,
    wrt: Any,
    methods: str | Sequence[str],
    remake: Callable[[], type],
) -> type:
    if not issubclass(module_class, nnx.Module):
        raise UnsupportedProgramError(
            f"`{module_class.__name__}` is no `flax.nnx.Module` class; jax_hremat.linen.remat is "
            f"for linen modules"
        )
    plans_of: dict[str, MadePlans] = {}

    def planned(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        plans_of[name] = made = MadePlans(request, goal)

        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return run_planned(lambda: _trace_method(original, (self, *args), kwargs, wrt), made)

        return call

    originals = methods_of(module_class, methods)
    return planned_class(
        module_class,
        PlannedMeta,
        {name: planned(name, original) for name, original in originals.items()},
        lambda: tuple(plan for made in plans_of.values() for plan in made.plans),
        remake,
    )


def _trace_method(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], wrt: Any
) -> TracedCall:
    """Trace a method's call; state that matches `wrt`, and plain arrays, are differentiated."""
    variables = variables_of((args, kwargs), wrt)

    def is_differentiated(leaf: Leaf) -> bool:
        if leaf.variable is not None:
            return id(leaf.variable) in variables
        return not leaf.within

    arguments = Arguments.of(args, kwargs, is_differentiated=is_differentiated)
    return trace_arguments(method, arguments, is_loss=False)
