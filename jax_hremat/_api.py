"""The public functions: make a plan, apply it, or do both in one decorator."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import time
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

from jax_hremat._calls.planned import GivenPlan, Loss, MadePlans, planned_function
from jax_hremat._emit.step import Step, own_step
from jax_hremat._flax.deferred import is_linen_instance, is_nnx_class
from jax_hremat._jax.trace_context import even_without_jit
from jax_hremat._plan.comparison import Comparison, StrategyPlan
from jax_hremat._plan.frontier import Frontier
from jax_hremat._plan.infeasible import InfeasibleBudgetError
from jax_hremat._plan.plan import RematPlan
from jax_hremat._planner.config import Effort, PlannerConfig, config_of
from jax_hremat._planner.request import PlanRequest, positions_of, warn_beyond_device
from jax_hremat._planner.transfer import certified_again
from jax_hremat._shared.methods import CALL
from jax_hremat._shared.progress import Progress
from jax_hremat._shared.units import parse_budget, parse_goal, parse_headroom
from jax_hremat._strategies.registry import ALL_STRATEGIES
from jax_hremat._strategies.strategy import Strategy
from jax_hremat._trace.call import refuse_closed_over
from jax_hremat._xla.target import Target, get_target


def plan_remat(
    fun: Callable[..., Any],
    *,
    budget: int | float | str | None = None,
    max_slowdown: float | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    target: str | os.PathLike[str] | Target | None = None,
    headroom_bytes: int | str = 0,
    config: PlannerConfig | None = None,
    effort: Effort | None = None,
    progress: Progress | None = None,
) -> Callable[..., RematPlan]:
    """Plan the rematerialization of a loss function's training step under a byte budget.

    The step is `jax.jit(jax.value_and_grad(fun, argnums, has_aux))`. Of the plans found whose
    compiled peak (arguments + outputs + temporaries − aliases) plus `headroom_bytes` is within the
    budget, the result is the fastest, as estimated by a roofline over the optimised program; the
    compiler's figures are in `RematPlan.certificate`. With `max_slowdown` in place of a budget, it
    is the plan of lowest peak found whose estimated step time is at most `max_slowdown` times the
    one without rematerialization.

    Args:
        fun: The loss: returns a scalar, or `(scalar, aux)` if `has_aux`.
        budget: Bytes; a string such as `"70GiB"` or `"70GB"`; or a float in (0, 1] or a string
            such as `"90%"`, a share of the compiled peak without rematerialization.
        max_slowdown: In place of a budget: a ratio of step times, at least 1.
        argnums: Positional arguments that are differentiated, as in `jax.grad`.
        has_aux: As in `jax.grad`.
        target: What to compile for: None for JAX's default backend, `"cpu"`, a GPU's name (see
            `list_targets`; compiling for a GPU needs no GPU), or the path of a target file.
        headroom_bytes: Subtracted from the budget first, for memory the compiler does not see:
            library workspaces and the allocator. A number of bytes, or a text such as "512MiB".
        config: How much effort planning takes, in detail.
        effort: In place of a configuration: "low" compiles about half as much as "normal", the
            default, and "high" up to twice as much; see `PlannerConfig.of_effort`.
        progress: Called as `progress(stage, done, total)` while planning; `total` is 0 while it is
            unknown. If None, progress is shown on standard error; see `jax_hremat.progress`.

    Returns:
        A function of the loss's arguments (arrays or `jax.ShapeDtypeStruct`s in any pytrees, NNX
        objects) that returns the plan. The loss is not run. Python numbers are inputs, as
        in `jax.jit`, unless the loss needs their values, or computes something else of them than of
        arrays (`isinstance(rate, float)`): then whole numbers, or all, are static, like flags,
        members of enumerations, strings and everything else that is not an array: part of the
        program the plan is for.

    Raises:
        InfeasibleBudgetError: No plan fits; the error gives the smallest budget that a plan was
            found for, and that plan.
        BudgetFormatError: The budget has none of the forms above, or not exactly one of a
            budget and a slowdown was given.
        UnknownTargetError, TargetUnavailableError: The target, or its compiler.
        UnsupportedProgramError: Ordered effects, no scalar loss, nothing to differentiate,
            symbolic shapes, mutable arrays made outside the function, arguments on several meshes,
            a function that is planned already.
        UnsupportedConfigError: `jax_remat3` is on; costs that are not compiled, on a mesh.

    Where an argument (an array, or a struct with a `jax.sharding.NamedSharding`) is sharded over a
    mesh of several devices, all bytes are those of one device, and each gradient is sharded like
    its argument. Shardings of arguments that are being traced, inside a `jit`, are not known.

    A budget larger than the memory of one device of the target gives an `HRematWarning`; the
    memory of a CPU is not known.

    Unchecked: that the step is jitted with `compiler_options(target)`, where the target has any,
    and that it is alone in memory.

    >>> import jax, jax.numpy as jnp, jax_hremat
    >>> loss = lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)
    >>> w, x = jnp.ones((64, 64)), jnp.ones((256, 64))
    >>> plan = jax_hremat.plan_remat(loss, budget=1.0, target="cpu")(w, x)
    >>> plan.certificate.holds
    True
    """
    goal = parse_goal(budget, max_slowdown)
    request = PlanRequest.make(target, headroom_bytes, config, effort, progress)
    positions = positions_of(argnums)

    @even_without_jit
    def plan(*args: Any, **kwargs: Any) -> RematPlan:
        start_s = time.perf_counter()
        step = _step_of(fun, positions, has_aux, args, kwargs)
        return request.plan(step, time.perf_counter() - start_s, goal, positions, has_aux)

    return plan


def pareto(
    fun: Callable[..., Any],
    *,
    num_points: int = 8,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    target: str | os.PathLike[str] | Target | None = None,
    headroom_bytes: int | str = 0,
    config: PlannerConfig | None = None,
    effort: Effort | None = None,
    progress: Progress | None = None,
) -> Callable[..., Frontier]:
    """The whole trade-off between memory and time of a loss function's training step.

    Plans for budgets from the least peak found to that of no rematerialization. Each budget in
    between is placed where the lower hull of the plans before it spans the most bytes times
    seconds, or at the peak of a plan that seems slow for it, since it was made for another budget.
    Block costs are determined once for all of them; each plan is compiled and certified.

    Args:
        fun, argnums, has_aux, target, headroom_bytes, config, effort, progress: As in
            `plan_remat`.
        num_points: How many budgets, at least 2.

    Returns:
        A function of the loss's arguments that returns the `Frontier`: the plans, a table, a
        plot.

    Raises:
        What `plan_remat` raises, except for errors about its budget.
        ValueError: Fewer than two points.
    """
    if num_points < 2:
        raise ValueError(f"num_points={num_points}: give 2 or more, since a curve has two ends")
    request = PlanRequest.make(target, headroom_bytes, config, effort, progress)
    positions = positions_of(argnums)

    @even_without_jit
    def frontier(*args: Any, **kwargs: Any) -> Frontier:
        start_s = time.perf_counter()
        step = _step_of(fun, positions, has_aux, args, kwargs)
        trace_s = time.perf_counter() - start_s
        return Frontier(request.frontier(step, trace_s, num_points, positions, has_aux))

    return frontier


def compare(
    fun: Callable[..., Any],
    *,
    budgets: Sequence[int | float | str],
    strategies: Sequence[str | Strategy] = ALL_STRATEGIES,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    target: str | os.PathLike[str] | Target | None = None,
    headroom_bytes: int | str = 0,
    config: PlannerConfig | None = None,
    effort: Effort | None = None,
    progress: Progress | None = None,
) -> Callable[..., Comparison]:
    """Plans by several published methods for the same loss and the same budgets.

    All of them are emitted, compiled and certified alike, so that they can be compared. What a
    strategy implements, and what it leaves out, is in its `source` and `leaves_out`
    (`jax_hremat.strategies.STRATEGIES`).

    Args:
        fun, argnums, has_aux, target, headroom_bytes, config, effort, progress: As in
            `plan_remat`. The configuration's `strategy` is not used.
        budgets: At least one; each as in `plan_remat`.
        strategies: Names, or strategies of your own, each once; all that have names by default.

    Returns:
        A function of the loss's arguments that returns the `Comparison`: the plans, a table, a
        plot. Where no plan of a strategy fits a budget, the plan of its least budget is listed.

    Raises:
        What `plan_remat` raises, except for budgets that no plan fits.
        ValueError: No budget, no strategy, a strategy twice, or one that is not known.
    """
    goals = [parse_budget(budget) for budget in budgets]
    if not goals:
        raise ValueError("budgets=[]: give one budget or more, such as budgets=[0.8, 0.6]")
    chosen = {s.name if isinstance(s, Strategy) else s: s for s in strategies}
    if not chosen or len(chosen) < len(strategies):
        raise ValueError(f"strategies={list(strategies)}: give one strategy or more, each once")
    base = config_of(config, effort)
    requests = {
        name: PlanRequest.make(
            target, headroom_bytes, dataclasses.replace(base, strategy=strategy), None, progress
        )
        for name, strategy in chosen.items()
    }
    positions = positions_of(argnums)

    @even_without_jit
    def compared(*args: Any, **kwargs: Any) -> Comparison:
        step = _step_of(fun, positions, has_aux, args, kwargs)
        found: list[StrategyPlan] = []
        planning_s: dict[str, float] = {}
        for name, request in requests.items():
            start_s = time.perf_counter()
            answers = request.plans(step, 0.0, goals, positions, has_aux)
            planning_s[name] = time.perf_counter() - start_s
            for answer in answers:
                refused = isinstance(answer, InfeasibleBudgetError)
                plan = answer.plan if refused else answer
                assert plan is not None, "a refusal carries the plan of the least budget"
                asked_bytes = answer.budget_bytes if refused else plan.certificate.budget_bytes
                found.append(StrategyPlan(name, asked_bytes, plan))
        return Comparison(tuple(found), MappingProxyType(planning_s))

    return compared


def certify(
    fun: Callable[..., Any],
    plan: RematPlan,
    *,
    budget: int | float | str,
    target: str | os.PathLike[str] | Target | None = None,
    headroom_bytes: int | str = 0,
) -> Callable[..., RematPlan]:
    """Certify a plan for the same function at other shapes, or for another device or version.

    This takes two compilations of the step and no solver: the regions stay, the certificate is
    new. A plan made for another batch size, for example, is usually good, if not the best.

    Args:
        fun: The function the plan was made for, or one with the same operations.
        plan: The plan.
        budget, target, headroom_bytes: As in `plan_remat`.

    Returns:
        A function of the loss's arguments that returns the plan with its certificate for them.

    Raises:
        StalePlanError: The operations differ from those of the plan.
        InfeasibleBudgetError: The regions do not fit; the error gives the memory they take.
        CertificationError: With the regions, and not without them, the compiled step may read what
            it has overwritten, by a fault of XLA before JAX 0.12.
        What `plan_remat` raises about the budget, the target and the program.
    """
    goal = parse_budget(budget)
    chosen = get_target(target)
    headroom = parse_headroom(headroom_bytes)

    @even_without_jit
    def certified(*args: Any, **kwargs: Any) -> RematPlan:
        step = _step_of(fun, plan.argnums, plan.has_aux, args, kwargs)
        made = certified_again(step, plan, chosen, goal, headroom)
        warn_beyond_device(made.certificate)
        return made

    return certified


def apply_plan(fun: Callable[..., Any], plan: RematPlan) -> Callable[..., Any]:
    """The function with a plan applied: same arguments, results and gradients.

    Args:
        fun: The function the plan was made for.
        plan: A plan, made here or loaded from a file.

    Returns:
        A function to differentiate and jit like the original, which it traces at each call. For a
        method it is a method.

    Raises:
        TypeError: `plan` is not a plan.
        UnsupportedProgramError: The function is planned already.

    Raises (when called):
        StalePlanError: The traced program is not the one the plan is for; the first difference
            is named.

    When the function is lowered for another platform than the certificate's, an `HRematWarning`
    says so. The compiler options are not known at that point, and are not checked.
    """
    if not isinstance(plan, RematPlan):
        raise TypeError(
            f"apply_plan takes a function and its plan, and the plan given is of type "
            f"{type(plan).__name__!r}. A plan is what plan_remat(fun, budget=…)(*args) returns, or "
            f"RematPlan.load(path)"
        )
    return planned_function(fun, GivenPlan(plan), plan.argnums, plan.has_aux)


def hremat(
    fun: Any = None,
    *,
    budget: int | float | str | None = None,
    max_slowdown: float | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    target: str | os.PathLike[str] | Target | None = None,
    headroom_bytes: int | str = 0,
    config: PlannerConfig | None = None,
    effort: Effort | None = None,
    progress: Progress | None = None,
    methods: str | Sequence[str] = CALL,
) -> Any:
    """Plan a loss function, or a Flax module, when it is first traced.

    On a function: `hremat(loss_fn, budget="70GiB")` or `@hremat(budget="70GiB")`. The function is
    traced at each call, as inside `jax.grad`; each program that it traces to is planned once, with
    `plan_remat`, and the plan is kept for the life of the function that is returned; see its
    `plans` attribute. Arrays are traced. Everything else is static: flags, strings, functions, and
    also Python numbers, unless `jax.grad` or `jax.jit` has traced them already, or there is nothing
    else to differentiate. A Python number of another value gives another program, which is planned
    separately.

    Flax NNX objects among the arguments are changed as the function changes them, and their
    `nnx.Param`s are differentiated; `jax_hremat.nnx.remat` takes a filter to choose other state.

    In the body of a class, or given a bound method, the result is a method. Its `argnums` leaves
    out the object, as in `jax.grad(obj.method)`. NNX parameters of the object are differentiated
    too.

    On a linen module class it is `jax_hremat.linen.remat`: a class with the same variables, rngs
    and mutable collections whose `__call__`, or other methods, are planned. The budget then bounds
    the compiled call together with its pullback, with respect to all floating parameters and
    inputs. On an NNX module class it is `jax_hremat.nnx.remat`.

    Planned functions, modules and plans can be pickled and copied if the functions and modules they
    are made from can.

    Args:
        fun: A loss function or method, or a `flax.linen.Module` or `flax.nnx.Module` class;
            omitted when used as a decorator with options.
        budget, max_slowdown, argnums, has_aux, target, headroom_bytes, config, effort, progress:
            As in `plan_remat`; `argnums` and `has_aux` are for functions only.
        methods: Names of the methods that are planned; for modules only.

    Raises:
        What `plan_remat` raises: errors about the budget, the target and a function that is planned
        already at once, the others when the function is first called.
    """
    options: dict[str, Any] = dict(
        budget=budget,
        max_slowdown=max_slowdown,
        target=target,
        headroom_bytes=headroom_bytes,
        config=config,
        effort=effort,
        progress=progress,
    )
    if fun is None:
        return functools.partial(
            hremat, argnums=argnums, has_aux=has_aux, methods=methods, **options
        )
    if is_nnx_class(fun):
        from jax_hremat import nnx

        return nnx.remat(fun, methods=methods, **options)
    if inspect.isclass(fun) or is_linen_instance(fun):
        from jax_hremat import linen

        module: Any = fun
        return linen.remat(module, methods=methods, **options)
    goal = parse_goal(budget, max_slowdown)
    request = PlanRequest.make(target, headroom_bytes, config, effort, progress)
    positions = positions_of(argnums)
    made = MadePlans(request, goal, positions, has_aux)
    return planned_function(fun, made, positions, has_aux)


def _step_of(
    fun: Callable[..., Any],
    argnums: tuple[int, ...],
    has_aux: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Step:
    """The step of a loss, traced as `jax.jit` would trace it."""
    loss, bound_to = Loss.of(fun, argnums, has_aux)
    call = loss.trace_as_jit((*bound_to, *args), kwargs)
    refuse_closed_over(call)
    return own_step(call.program)
