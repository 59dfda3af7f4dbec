"""The public functions: make a plan, apply it, or do both in one decorator."""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx as flax_nnx

from jax_hremat import linen, nnx
from jax_hremat._compiler.target import Target, get_target
from jax_hremat._planner.bench import PlannerConfig
from jax_hremat._planner.goals import Terms, frontier_plans
from jax_hremat._planner.request import PlanRequest, positions_of
from jax_hremat._planner.transfer import certified_again
from jax_hremat._plans.frontier import Frontier
from jax_hremat._plans.plan import RematPlan
from jax_hremat._program.emit import emit
from jax_hremat._program.fingerprint import fingerprint
from jax_hremat._program.graph import build_graph
from jax_hremat._program.step import own_step
from jax_hremat._program.trace import Program, abstract_leaf, trace_loss
from jax_hremat._shared.errors import StalePlanError
from jax_hremat._shared.methods import CALL
from jax_hremat._shared.progress import Progress
from jax_hremat._shared.units import parse_budget, parse_goal


def plan_remat(
    fun: Callable[..., Any],
    *,
    budget: int | float | str | None = None,
    max_slowdown: float | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    target: str | os.PathLike[str] | Target | None = None,
    headroom_bytes: int = 0,
    config: PlannerConfig | None = None,
    progress: Progress | None = None,
) -> Callable[..., RematPlan]:
    """Plan the rematerialization of a loss function's training step under a byte budget.

    The step is `jax.jit(jax.value_and_grad(fun, argnums, has_aux))`. The plan is the fastest
    found, by a roofline over the optimised program, whose compiled peak (arguments + outputs +
    temporaries − aliases) and `headroom_bytes` are within the budget; the compiler's figures are
    in `RematPlan.certificate`. With `max_slowdown` in place of a budget, it is the one of least
    peak found whose estimated step is at most so many times that without rematerialization.

    Args:
        fun: The loss: returns a scalar, or `(scalar, aux)` if `has_aux`.
        budget: Bytes; a text such as `"70GiB"` or `"70GB"`; or a float in (0, 1], a fraction of
            the compiled peak without rematerialization.
        max_slowdown: In place of a budget: a ratio of step times, at least 1.
        argnums: Positional arguments that are differentiated, as in `jax.grad`.
        has_aux: As in `jax.grad`.
        target: What to compile for: None for JAX's default backend, `"cpu"`, a GPU's name (see
            `list_targets`; none is needed to compile for it), or the path of a target file.
        headroom_bytes: Taken off the budget first, for what the compiler does not see: library
            workspaces and the allocator.
        config: How hard to try.
        progress: Called as `progress(stage, done, total)` while planning.

    Returns:
        A function of the loss's arguments (arrays or `jax.ShapeDtypeStruct`s in any pytrees)
        that returns the plan. Nothing is allocated or run.

    Raises:
        InfeasibleBudgetError: No plan fits; it says the smallest budget that would do.
        BudgetFormatError: The budget has none of the forms above, or not exactly one of a
            budget and a slowdown was given.
        UnknownTargetError, TargetUnavailableError: The target, or its compiler.
        UnsupportedProgramError: Ordered effects, no scalar loss, nothing to differentiate,
            arguments on several meshes.
        UnsupportedConfigError: `jax_remat3` is on; costs that are not compiled, on a mesh.

    Where an argument lies on a mesh of several devices (an array, or a struct with a
    `jax.sharding.NamedSharding`), all bytes are of one device, and each gradient lies as its
    argument does. Shardings of arguments that are being traced, inside a `jit`, are not known.

    Unchecked: that the step is jitted with `compiler_options(target)` and alone in memory.

    >>> import jax, jax.numpy as jnp, jax_hremat
    >>> loss = lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)
    >>> w, x = jnp.ones((64, 64)), jnp.ones((256, 64))
    >>> plan = jax_hremat.plan_remat(loss, budget=1.0, target="cpu")(w, x)
    >>> plan.certificate.holds
    True
    """
    goal = parse_goal(budget, max_slowdown)
    request = PlanRequest.make(target, headroom_bytes, config, progress)
    positions = positions_of(argnums)

    def plan(*args: Any, **kwargs: Any) -> RematPlan:
        start_s = time.perf_counter()
        program = trace_loss(fun, args, kwargs, argnums=positions, has_aux=has_aux)
        return request.plan(
            own_step(program), time.perf_counter() - start_s, goal, positions, has_aux
        )

    return plan


def pareto(
    fun: Callable[..., Any],
    *,
    num_points: int = 8,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    target: str | os.PathLike[str] | Target | None = None,
    headroom_bytes: int = 0,
    config: PlannerConfig | None = None,
    progress: Progress | None = None,
) -> Callable[..., Frontier]:
    """The whole trade between memory and time of a loss function's training step.

    Plans for budgets evenly spread from the least that is possible to no rematerialization, made
    with the costs of one planning; each is compiled and certified.

    Args:
        fun, argnums, has_aux, target, headroom_bytes, config, progress: As in `plan_remat`.
        num_points: How many budgets, at least 2.

    Returns:
        A function of the loss's arguments that returns the `Frontier`: its plans, a table, a
        plot.

    Raises:
        What `plan_remat` raises, but for what concerns its budget.
        ValueError: Fewer than two points.
    """
    if num_points < 2:
        raise ValueError(f"num_points={num_points}: a curve takes at least its two ends")
    request = PlanRequest.make(target, headroom_bytes, config, progress)
    positions = positions_of(argnums)

    def frontier(*args: Any, **kwargs: Any) -> Frontier:
        start_s = time.perf_counter()
        step = own_step(trace_loss(fun, args, kwargs, argnums=positions, has_aux=has_aux))
        candidates = request.candidates(step, time.perf_counter() - start_s)
        terms = Terms(positions, has_aux, headroom_bytes)
        return Frontier(tuple(frontier_plans(candidates, num_points, terms)))

    return frontier


def certify(
    fun: Callable[..., Any],
    plan: RematPlan,
    *,
    budget: int | float | str,
    target: str | os.PathLike[str] | Target | None = None,
    headroom_bytes: int = 0,
) -> Callable[..., RematPlan]:
    """Offer a plan to the same function at other shapes, for another device or version.

    Two compilations of the step and no solver: the regions stay, the certificate is new. A plan
    for another batch size, say, is a good one as a rule, if not the best.

    Args:
        fun: The function the plan was made for, or one with the same operations.
        plan: The plan.
        budget, target, headroom_bytes: As in `plan_remat`.

    Returns:
        A function of the loss's arguments that returns the plan with its certificate for them.

    Raises:
        StalePlanError: The operations are other ones.
        InfeasibleBudgetError: The regions do not fit; it says what they take.
        What `plan_remat` raises of the budget, the target and the program.
    """
    goal = parse_budget(budget)
    chosen = get_target(target)

    def certified(*args: Any, **kwargs: Any) -> RematPlan:
        program = trace_loss(fun, args, kwargs, argnums=plan.argnums, has_aux=plan.has_aux)
        return certified_again(own_step(program), plan, chosen, goal, headroom_bytes)

    return certified


def apply_plan(fun: Callable[..., Any], plan: RematPlan) -> Callable[..., Any]:
    """The function with a plan in it: same arguments, results and gradients.

    Args:
        fun: The function the plan was made for.
        plan: A plan, made here or loaded from a file.

    Returns:
        A function to differentiate and jit as the original. It traces `fun` once for each input
        structure and shapes.

    Raises (when called):
        StalePlanError: The traced program is not the one the plan is for; the first difference
            is named.
    """
    return _Emitting(fun, lambda program, trace_s: plan, plan.argnums, plan.has_aux)


def hremat(
    fun: Any = None,
    *,
    budget: int | float | str | None = None,
    max_slowdown: float | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    target: str | os.PathLike[str] | Target | None = None,
    headroom_bytes: int = 0,
    config: PlannerConfig | None = None,
    progress: Progress | None = None,
    methods: str | Sequence[str] = CALL,
) -> Any:
    """Plan a loss function, or a Flax module, when it is first traced.

    On a function: `hremat(loss_fn, budget="70GiB")` or `@hremat(budget="70GiB")`. Each new
    structure and shapes of arguments are planned once, with `plan_remat`, and the plan is kept
    for the life of the function that is returned; see its `plans` attribute.

    On a linen module class it is `jax_hremat.linen.remat`: a class with the same variables, rngs
    and mutable collections whose `__call__`, or other methods, are planned. The budget then bounds
    the compiled call together with its pullback, all floating parameters and inputs differentiated.
    On an NNX module class it is `jax_hremat.nnx.remat`, which also takes loss functions of NNX
    modules.

    Args:
        fun: A loss function of arrays, or a `flax.linen.Module` or `flax.nnx.Module` class; left
            out when used as a decorator.
        budget, max_slowdown, argnums, has_aux, target, headroom_bytes, config, progress: As in
            `plan_remat`; `argnums` and `has_aux` are for functions only.
        methods: Names of the methods that are planned; for modules only.

    Raises:
        What `plan_remat` raises; the budget's and the target's errors at once, the others when
        the function is first called.
    """
    options: dict[str, Any] = dict(
        budget=budget,
        max_slowdown=max_slowdown,
        target=target,
        headroom_bytes=headroom_bytes,
        config=config,
        progress=progress,
    )
    if fun is None:
        return functools.partial(
            hremat, argnums=argnums, has_aux=has_aux, methods=methods, **options
        )
    if inspect.isclass(fun) and issubclass(fun, flax_nnx.Module):
        return nnx.remat(fun, methods=methods, **options)
    if linen.is_module(fun):
        module: Any = fun
        return linen.remat(module, methods=methods, **options)
    goal = parse_goal(budget, max_slowdown)
    request = PlanRequest.make(target, headroom_bytes, config, progress)
    positions = positions_of(argnums)
    return _Emitting(
        fun,
        lambda program, trace_s: request.plan(own_step(program), trace_s, goal, positions, has_aux),
        positions,
        has_aux,
    )


class _Emitting:
    """A function that is traced, planned and emitted once for each input signature."""

    def __init__(
        self,
        fun: Callable[..., Any],
        make_plan: Callable[[Program, float], RematPlan],
        argnums: tuple[int, ...],
        has_aux: bool,
    ) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._make_plan = make_plan
        self._argnums = argnums
        self._has_aux = has_aux
        self._emitted: dict[Any, tuple[RematPlan, Callable[..., Any]]] = {}

    @property
    def plans(self) -> tuple[RematPlan, ...]:
        """The plans in use, one for each input signature, in order of first call."""
        return tuple(plan for plan, _ in self._emitted.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, in_tree = jax.tree.flatten((args, kwargs))
        shapes = tuple(abstract_leaf(leaf) for leaf in leaves)
        key = (in_tree, shapes)
        if key not in self._emitted:
            start_s = time.perf_counter()
            abstract_args, abstract_kwargs = jax.tree.unflatten(in_tree, shapes)
            program = trace_loss(
                self._fun,
                abstract_args,
                abstract_kwargs,
                argnums=self._argnums,
                has_aux=self._has_aux,
            )
            plan = self._make_plan(program, time.perf_counter() - start_s)
            check_plan_is_for(program, plan, self._fun)
            self._emitted[key] = (plan, emit(program, plan.root))
        return self._emitted[key][1](*args, **kwargs)


def check_plan_is_for(program: Program, plan: RematPlan, fun: Callable[..., Any]) -> None:
    """Refuse a plan made for another program.

    Raises:
        StalePlanError: Naming the first difference.
    """
    difference = plan.fingerprint.first_difference(fingerprint(program, build_graph(program)))
    if difference is not None:
        name = getattr(fun, "__name__", type(fun).__name__)
        raise StalePlanError(
            f"the plan {plan.fingerprint.digest[:8]} is not for `{name}` as it was traced now: "
            f"{difference}. Shapes, dtypes, the model's code or a version of JAX or Flax have "
            f"changed since the plan was made; make it again with `jax_hremat.plan_remat`"
        )
