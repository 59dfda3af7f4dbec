"""Flax linen modules whose methods are planned."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
from flax import linen as nn
from flax.core import lift
from flax.linen import transforms
from jax.core import Tracer

from jax_hremat._compiler.target import Target
from jax_hremat._planner.bench import PlannerConfig
from jax_hremat._planner.request import PlanRequest
from jax_hremat._plans.applied import emit_plan
from jax_hremat._plans.plan import RematPlan
from jax_hremat._program.fingerprint import fingerprint
from jax_hremat._program.graph import Graph, build_graph
from jax_hremat._program.step import own_step
from jax_hremat._program.trace import Program, abstract_leaf, trace_call
from jax_hremat._shared import compat
from jax_hremat._shared.errors import UnsupportedProgramError
from jax_hremat._shared.methods import CALL, methods_of
from jax_hremat._shared.progress import Progress
from jax_hremat._shared.static import merge_arrays, split_arrays
from jax_hremat._shared.units import parse_goal

M = TypeVar("M", bound=nn.Module)

# A call is traced as a function of (params, other variables, rngs, (args, kwargs)) and, last,
# of the traced values it closes over.
_DIFFERENTIATED = (0, 3)
_CLOSED_OVER = 4


def remat(
    module_class: type[M],
    *,
    budget: int | float | str | None = None,
    max_slowdown: float | None = None,
    target: str | os.PathLike[str] | Target | None = None,
    headroom_bytes: int = 0,
    config: PlannerConfig | None = None,
    progress: Progress | None = None,
    methods: str | Sequence[str] = CALL,
) -> type[M]:
    """A linen module class whose `__call__` is rematerialized under a byte budget.

    It is a subclass with the same name, fields, variables, rngs and mutable collections:
    checkpoints of one load in the other. Each program that its call traces to is planned once,
    whichever instance it comes from; initialization runs as it is. The step that the budget
    bounds is the call with its pullback, all floating parameters and inputs differentiated,
    compiled alone. `hremat(module_class, budget=…)` is the same function.

    In the arguments, arrays are traced; anything else (flags, numbers, strings) is static, so
    that a Python number of another value is another program.

    Args:
        module_class: A `flax.linen.Module` class.
        budget, max_slowdown, target, headroom_bytes, config, progress: As in
            `jax_hremat.plan_remat`.
        methods: Names of the methods that are planned, each by itself under the budget.

    Returns:
        The class. Its class method `hremat_plans()` gives the plans in use, in order of first
        call.

    Raises:
        UnsupportedProgramError: Not a linen module class, or one without such a method; when
            called, no floating parameter or input, or an ordered effect.
        BudgetFormatError, UnknownTargetError, TargetUnavailableError: At once.
        InfeasibleBudgetError, UnsupportedConfigError: When called.

    Unchecked: what surrounds the call in the step (other layers, the loss, an optimizer), the
    batch that `jax.vmap` adds around it, and whether it is differentiated at all. Calls for
    evaluation are planned too; `module_class` itself takes the same variables and is not.
    """
    _check_module_class(module_class)
    originals = methods_of(module_class, methods)
    goal = parse_goal(budget, max_slowdown)
    request = PlanRequest.make(target, headroom_bytes, config, progress)
    plans: dict[tuple[Any, ...], RematPlan] = {}

    def plan_for(program: Program, trace_s: float) -> RematPlan:
        key = _plan_key(program, build_graph(program))
        if key not in plans:
            plans[key] = request.plan(own_step(program), trace_s, goal, _DIFFERENTIATED)
        return plans[key]

    def planned(scopes_fun: Callable[..., Any]) -> Callable[..., Any]:
        return _lift_planned(scopes_fun, plan_for)

    def hremat_plans(cls: type[nn.Module]) -> tuple[RematPlan, ...]:
        """The plans in use, one for each program that calls were traced to."""
        return tuple(plans.values())

    namespace = {
        **{name: transforms.lift_transform(planned, fun) for name, fun in originals.items()},
        "__doc__": module_class.__doc__,
        "__module__": module_class.__module__,
        "__qualname__": module_class.__qualname__,
        "hremat_plans": classmethod(hremat_plans),
    }
    return type(module_class)(module_class.__name__, (module_class,), namespace)


def is_module(value: Any) -> bool:
    """Whether `value` is a class, or an instance of a Flax module class."""
    return inspect.isclass(value) or isinstance(value, nn.Module)


def _check_module_class(module_class: Any) -> None:
    is_class = inspect.isclass(module_class)
    if not (is_class and issubclass(module_class, nn.Module)):
        given = module_class if is_class else type(module_class)
        raise UnsupportedProgramError(
            f"only loss functions and `flax.linen.Module` classes can be planned, and this is "
            f"{'the class' if is_class else 'an instance of'} `{given.__module__}."
            f"{given.__qualname__}`. Of any other model, plan the loss function that calls it"
        )


def _lift_planned(
    scopes_fun: Callable[..., Any], plan_for: Callable[[Program, float], RematPlan]
) -> Callable[..., Any]:
    """`flax.core.lift.checkpoint`, with the regions of a plan for `jax.checkpoint`.

    The call is traced each time, so that what it leaves behind in Python (counters of random
    keys, names of submodules) is as it would be; only plans, which hold no JAX object, last.
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
        arrays, static = split_arrays(operands)
        static_outputs: list[Any] = []

        def call_arrays(*arrays: Any) -> Any:
            outputs, rest = split_arrays(call(*merge_arrays(arrays, static)))
            static_outputs.append(rest)
            return outputs

        start = time.perf_counter()
        program, closed_over = _trace_hoisted(call_arrays, arrays)
        plan = plan_for(program, time.perf_counter() - start)
        outputs = emit_plan(program, plan)(*arrays, *closed_over)
        return merge_arrays(outputs, static_outputs[0])

    filters = ("params", True)
    packed = lift.pack(inner, filters, filters, (True,), name="hremat", enable_kwargs=True)

    def lifted(scopes: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        # The module's own scope is the last. Without one it is unbound, and Flax says so.
        call = packed if scopes[-1] is not None else scopes_fun
        return call(scopes, *args, **kwargs)

    return lifted


def _trace_hoisted(
    fun: Callable[..., Any], arrays: Sequence[Any]
) -> tuple[Program, tuple[Any, ...]]:
    """Trace a call; traced values it closes over become one more, differentiated, argument.

    A module has them in its fields, say, when it is made inside the function that JAX traces.
    They cannot stay constants of a program that is compiled on its own.
    """
    avals = jax.tree.map(abstract_leaf, tuple(arrays))
    program = trace_call(fun, avals, _DIFFERENTIATED)
    consts = compat.jaxpr_consts(program.jaxpr)
    tracers = [c for c in consts if isinstance(c, Tracer)]
    if not tracers:
        return program, ()

    def hoisted(*operands: Any) -> Any:
        *own, closed_over = operands
        values = iter(closed_over)
        merged = [next(values) if isinstance(c, Tracer) else c for c in consts]
        flat = compat.evaluate_inlined(program.jaxpr, merged, jax.tree.leaves(own))
        return jax.tree.unflatten(program.out_tree, flat)

    operands = (*avals, [abstract_leaf(t) for t in tracers])
    return trace_call(hoisted, operands, (*_DIFFERENTIATED, _CLOSED_OVER)), (tracers,)


def _plan_key(program: Program, graph: Graph) -> tuple[Any, ...]:
    """Programs with the same key share a plan: the same operations and results.

    Flax folds a module's path into its random keys, so instances of one class differ in those
    literals, which no cost depends on.
    """
    operations = tuple(
        replace(op, literals="") if op.primitive == "random_fold_in" else op
        for op in graph.operations
    )
    shared = fingerprint(program, replace(graph, operations=operations))
    return shared.digest, graph.outputs
