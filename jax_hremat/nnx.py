"""Flax NNX: loss functions of modules, and module classes, whose methods are planned."""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from jax_hremat._compiler.target import Target
from jax_hremat._planner.bench import PlannerConfig
from jax_hremat._planner.request import PlanRequest, positions_of
from jax_hremat._plans.applied import emit_plan
from jax_hremat._plans.plan import RematPlan
from jax_hremat._program.step import own_step
from jax_hremat._program.trace import Program, abstract_leaf, trace_call, trace_loss
from jax_hremat._shared.errors import UnsupportedProgramError
from jax_hremat._shared.methods import CALL, methods_of
from jax_hremat._shared.progress import Progress
from jax_hremat._shared.static import merge_arrays, split_arrays
from jax_hremat._shared.units import Budget, Slowdown, parse_goal

# A call is traced as a function of (parameters, other state, (args, kwargs)).
_PARAMETERS, _INPUTS = 0, 2


def remat(
    fun: Any = None,
    *,
    budget: int | float | str | None = None,
    max_slowdown: float | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    wrt: Any = nnx.Param,
    target: str | os.PathLike[str] | Target | None = None,
    headroom_bytes: int = 0,
    config: PlannerConfig | None = None,
    progress: Progress | None = None,
    methods: str | Sequence[str] = CALL,
) -> Any:
    """Plan a loss function of NNX modules, or a module class, when it is first called.

    On a function, `nnx.value_and_grad(remat(loss_fn, budget="70GiB"))(model, batch)` is the step
    the budget bounds, compiled as `jax.value_and_grad` over the modules' parameters. State flows
    through: what the loss changes in its modules (batch statistics, counts of random keys) is
    changed in those of the caller.

    On a class, a subclass with the same state whose `__call__` is planned; the budget bounds that
    call with its pullback, parameters and floating inputs differentiated. Checkpoints of one load
    in the other.

    Modules are positional arguments of the function. Of the others, arrays are traced and
    anything else is static.

    Args:
        fun: The function or class; left out when used as a decorator.
        argnums: Arguments that are differentiated, as in `nnx.grad`; for functions.
        has_aux: Whether the function returns `(loss, aux)`; for functions.
        wrt: Filter of the state that is differentiated.
        methods: Names of the methods that are planned, each by itself under the budget; for
            classes.
        budget, max_slowdown, target, headroom_bytes, config, progress: As in
            `jax_hremat.plan_remat`.

    Returns:
        The function, whose attribute `plans` has the plans in use; or the class, whose class
        method `hremat_plans()` gives them.

    Raises:
        UnsupportedProgramError: An instance of a module, or a class without such a method; what
            `plan_remat` refuses, when called.
        The errors of `plan_remat`, the budget's and the target's at once.

    Unchecked: references to modules from outside the arguments (in a closure), whose state is
    then constant.
    """
    if fun is None:
        return functools.partial(
            remat,
            budget=budget,
            max_slowdown=max_slowdown,
            argnums=argnums,
            has_aux=has_aux,
            wrt=wrt,
            target=target,
            headroom_bytes=headroom_bytes,
            config=config,
            progress=progress,
            methods=methods,
        )
    goal = parse_goal(budget, max_slowdown)
    request = PlanRequest.make(target, headroom_bytes, config, progress)
    if isinstance(fun, nnx.Module):
        raise UnsupportedProgramError(
            f"this is an instance of `{type(fun).__name__}`; plan its class, or the loss function "
            f"that calls it"
        )
    if inspect.isclass(fun):
        return _planned_class(fun, goal, request, wrt, methods)
    return _PlannedLoss(fun, goal, request, positions_of(argnums), has_aux, wrt)


class _PlannedLoss:
    """A loss function, traced, planned and emitted once for each structure and shapes."""

    def __init__(
        self,
        fun: Callable[..., Any],
        goal: Budget | Slowdown,
        request: PlanRequest,
        argnums: tuple[int, ...],
        has_aux: bool,
        wrt: Any,
    ) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._argnums = argnums
        self._has_aux = has_aux
        self._wrt = wrt
        # The state that the loss has changed is one auxiliary output more.
        self._calls = _Calls(
            lambda pure, operands: trace_loss(
                pure, operands, {}, argnums=_PARAMETERS, has_aux=True
            ),
            lambda program, trace_s: request.plan(
                own_step(program), trace_s, goal, (_PARAMETERS,), True
            ),
        )

    @property
    def plans(self) -> tuple[RematPlan, ...]:
        """The plans in use, in order of first call."""
        return self._calls.plans

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        modules = {i: arg for i, arg in enumerate(args) if isinstance(arg, nnx.Module)}
        chosen = [i for i in self._argnums if i in modules]
        if len(chosen) != len(self._argnums):
            raise UnsupportedProgramError(
                f"argnums={self._argnums} must name positional arguments that are nnx modules, "
                f"and the arguments are {', '.join(type(arg).__name__ for arg in args)}; of a "
                f"function of plain arrays use jax_hremat.hremat"
            )
        differentiated = {list(modules).index(i) for i in chosen}

        def call(modules_now: Sequence[Any], others: Any) -> tuple[Any, Any]:
            plain, kwargs = others
            merged = list(plain)
            for i, module in zip(modules, modules_now, strict=True):
                merged[i] = module
            outputs = self._fun(*merged, **kwargs)
            return outputs if self._has_aux else (outputs, None)

        plain = [None if i in modules else arg for i, arg in enumerate(args)]
        wrt = nnx.All(self._wrt, lambda path, _: path[0] in differentiated)
        loss, aux = self._calls.run(call, tuple(modules.values()), (plain, kwargs), wrt)
        return (loss, aux) if self._has_aux else loss


def _planned_class(
    module_class: type,
    goal: Budget | Slowdown,
    request: PlanRequest,
    wrt: Any,
    methods: str | Sequence[str],
) -> type:
    if not issubclass(module_class, nnx.Module):
        raise UnsupportedProgramError(
            f"`{module_class.__name__}` is no `flax.nnx.Module` class; jax_hremat.linen.remat is "
            f"for linen modules"
        )
    calls_of: dict[str, _Calls] = {}

    def planned(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        calls_of[name] = calls = _Calls(
            lambda pure, operands: trace_call(pure, operands, (_PARAMETERS, _INPUTS)),
            lambda program, trace_s: request.plan(
                own_step(program), trace_s, goal, (_PARAMETERS, _INPUTS)
            ),
        )

        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            def call_original(modules: Sequence[Any], others: Any) -> tuple[Any, Any]:
                return original(modules[0], *others[0], **others[1]), None

            return calls.run(call_original, (self,), (args, kwargs), wrt)[0]

        return call

    def hremat_plans(cls: type) -> tuple[RematPlan, ...]:
        """The plans in use, one for each program that calls were traced to."""
        return tuple(plan for calls in calls_of.values() for plan in calls.plans)

    originals = methods_of(module_class, methods)
    namespace = {
        **{name: planned(name, original) for name, original in originals.items()},
        "__doc__": module_class.__doc__,
        "__module__": module_class.__module__,
        "__qualname__": module_class.__qualname__,
        "hremat_plans": classmethod(hremat_plans),
    }
    make_class: Any = type(module_class)
    return make_class(module_class.__name__, (module_class,), namespace)


class _Calls:
    """Calls of modules as pure functions of their state, each planned and emitted once."""

    def __init__(
        self,
        trace: Callable[[Callable[..., Any], tuple[Any, ...]], Program],
        make_plan: Callable[[Program, float], RematPlan],
    ) -> None:
        self._trace = trace
        self._make_plan = make_plan
        self._emitted: dict[Any, tuple[RematPlan, Callable[..., Any], list[Any]]] = {}

    @property
    def plans(self) -> tuple[RematPlan, ...]:
        return tuple(plan for plan, _, _ in self._emitted.values())

    def run(
        self,
        call: Callable[[Sequence[Any], Any], tuple[Any, Any]],
        modules: tuple[Any, ...],
        others: Any,
        wrt: Any,
    ) -> tuple[Any, Any]:
        """Call, and leave the modules in the state that the call left them in.

        Args:
            call: A function of the modules and the other arguments, to the outputs (a loss) and
                auxiliary ones.
            modules: They may share parts.
            others: All else, a pytree.
            wrt: Filter of the state that is differentiated.
        """
        graphdef, params, rest = nnx.split(modules, wrt, ...)
        arrays, static = split_arrays(others)
        operands = (params, rest, arrays)
        leaves, tree = jax.tree.flatten(operands)
        shapes = tuple(abstract_leaf(leaf) for leaf in leaves)
        statics, static_tree = jax.tree.flatten(static)
        key = (graphdef, tree, shapes, static_tree, tuple(statics))
        if key not in self._emitted:
            static_outputs: list[Any] = []

            def pure(params: Any, rest: Any, arrays: Any) -> Any:
                now = nnx.merge(graphdef, params, rest)
                outputs = call(now, merge_arrays(arrays, static))
                changed = nnx.split(now, wrt, ...)[2]
                (first, second), fixed = split_arrays(outputs)
                static_outputs.append(fixed)
                return first, (second, changed)

            start_s = time.perf_counter()
            program = self._trace(pure, jax.tree.unflatten(tree, shapes))
            plan = self._make_plan(program, time.perf_counter() - start_s)
            self._emitted[key] = (plan, emit_plan(program, plan), static_outputs)
        _, emitted, static_outputs = self._emitted[key]
        first, (second, changed) = emitted(*operands)
        nnx.update(modules, changed)
        return merge_arrays((first, second), static_outputs[0])
