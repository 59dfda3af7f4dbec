"""Flax linen modules whose methods are planned."""

from __future__ import annotations

import copyreg
import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flax import linen as nn
from flax.core import lift
from flax.linen import transforms

from jax_hremat._calls.planned import MadePlans, planned_class, reduce_class, run_planned
from jax_hremat._planner.config import Effort, PlannerConfig
from jax_hremat._planner.request import PlanRequest
from jax_hremat._shared.errors import UnsupportedProgramError
from jax_hremat._shared.methods import CALL, methods_of
from jax_hremat._shared.progress import Progress
from jax_hremat._shared.units import parse_goal
from jax_hremat._trace.call import Arguments, trace_arguments
from jax_hremat._xla.target import Target

M = TypeVar("M", bound=nn.Module)

# A call is traced as a function of (params, other variables, rngs, (args, kwargs)).
_DIFFERENTIATED = (0, 3)


def remat(
    module_class: type[M],
    *,
    budget: int | float | str | None = None,
    max_slowdown: float | None = None,
    target: str | os.PathLike[str] | Target | None = None,
    headroom_bytes: int | str = 0,
    config: PlannerConfig | None = None,
    effort: Effort | None = None,
    progress: Progress | None = None,
    methods: str | Sequence[str] = CALL,
) -> type[M]:
    """A linen module class whose `__call__` is rematerialized under a byte budget.

    It is a subclass with the same name, fields, variables, rngs and mutable collections:
    checkpoints of either class load in the other. Each program that its call traces to is planned
    once, whichever instance it comes from; initialization is not planned. The step that the budget
    bounds is the call with its pullback with respect to all floating parameters and inputs,
    compiled alone. `hremat(module_class, budget=…)` is the same function.

    Arrays in the arguments are traced; anything else (flags, numbers, strings) is static, so a
    Python number of another value gives another program.

    Args:
        module_class: A `flax.linen.Module` class.
        budget, max_slowdown, target, headroom_bytes, config, effort, progress: As in
            `jax_hremat.plan_remat`.
        methods: Names of the methods that are planned, each separately under the budget.

    Returns:
        The class. Its class method `hremat_plans()` returns the plans in use, in order of first
        call.

    Raises:
        UnsupportedProgramError: Not a linen module class, or one without such a method; when
            called, no floating parameter or input, or an ordered effect.
        BudgetFormatError, UnknownTargetError, TargetUnavailableError: At once.
        InfeasibleBudgetError, UnsupportedConfigError: When called.

    Unchecked: what surrounds the call in the step (other layers, the loss, an optimizer), the
    batch dimension that `jax.vmap` adds, and whether the call is differentiated at all. Calls for
    evaluation are planned too; to avoid that, call `module_class` itself, which takes the same
    variables.
    """
    _check_module_class(module_class)
    originals = methods_of(module_class, methods)
    goal = parse_goal(budget, max_slowdown)
    request = PlanRequest.make(target, headroom_bytes, config, effort, progress)
    made = MadePlans(request, goal, _DIFFERENTIATED)

    def planned(scopes_fun: Callable[..., Any]) -> Callable[..., Any]:
        return _lift_planned(scopes_fun, made)

    remake = functools.partial(
        remat,
        module_class,
        budget=budget,
        max_slowdown=max_slowdown,
        target=target,
        headroom_bytes=headroom_bytes,
        config=config,
        effort=effort,
        progress=progress,
        methods=methods,
    )
    lifted = {name: transforms.lift_transform(planned, fun) for name, fun in originals.items()}
    return planned_class(module_class, PlannedMeta, lifted, lambda: made.plans, remake)


class PlannedMeta(type(nn.Module)):
    """The metaclass of planned classes, through which they are pickled."""


copyreg.pickle(PlannedMeta, reduce_class)


def _check_module_class(module_class: Any) -> None:
    is_class = inspect.isclass(module_class)
    if not (is_class and issubclass(module_class, nn.Module)):
        given = module_class if is_class else type(module_class)
        raise UnsupportedProgramError(
            f"only loss functions and `flax.linen.Module` classes can be planned, and this is "
            f"{'the class' if is_class else 'an instance of'} `{given.__module__}."
            f"{given.__qualname__}`. Of any other model, plan the loss function that calls it"
        )


def _lift_planned(scopes_fun: Callable[..., Any], made: MadePlans) -> Callable[..., Any]:
    """`flax.core.lift.checkpoint`, with the regions of a plan in place of `jax.checkpoint`.

    The call is traced each time, so that its side effects in Python (counters of random keys, names
    of submodules) happen as usual; only plans, which hold no JAX object, are kept between calls.
    """

    def inner(
        scope_fn: Callable[..., Any],
        repack_fn: Callable[..., Any],
        variable_groups: Any,
        rng_groups: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        def call(params: Any, others: Any, rngs: Any, inputs: Any) -> Any:
            scopes = scope_fn((params, others), rngs)
            outputs = scopes_fun(scopes, *inputs[0], **inputs[1])
            return outputs, repack_fn(scopes)

        params, others = variable_groups
        operands = (params, others, rng_groups, (args, kwargs))
        if scope_fn(variable_groups, rng_groups)[-1].get_flag("initializing", False):
            return call(*operands)
        arguments = Arguments.of(
            operands, {}, is_differentiated=lambda leaf: leaf.path[1].idx in _DIFFERENTIATED
        )
        return run_planned(lambda: trace_arguments(call, arguments, is_loss=False), made)

    filters = ("params", True)
    packed = lift.pack(inner, filters, filters, (True,), name="hremat", enable_kwargs=True)

    def lifted(scopes: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        # The module's own scope is the last. A module without one is unbound; Flax reports that.
        call = packed if scopes[-1] is not None else scopes_fun
        return call(scopes, *args, **kwargs)

    return lifted
