"""Planned functions: each call is traced, its plan looked up by the program, and emitted."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax.numpy as jnp

from jax_hremat._emit.run import run_call
from jax_hremat._emit.step import own_step
from jax_hremat._flax.objects import Leaf, holds_objects, is_parameter, variables_of
from jax_hremat._jax.keys import is_inexact
from jax_hremat._jax.lowered_for import lowered_for
from jax_hremat._jax.trace_context import even_without_jit
from jax_hremat._plan.plan import RematPlan
from jax_hremat._planner.request import PlanRequest
from jax_hremat._shared.errors import StalePlanError, UnsupportedProgramError
from jax_hremat._shared.units import Budget, Slowdown
from jax_hremat._trace.call import (
    Arguments,
    Choice,
    TracedCall,
    input_name,
    is_number,
    name_of,
    positions_among,
    trace_arguments,
)
from jax_hremat._trace.fingerprint import fingerprint
from jax_hremat._trace.graph import build_graph
from jax_hremat._trace.numbers import computes_the_same
from jax_hremat._trace.trace import Program

_REMAKE = "_hremat_remake"


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss function, and which of its arguments are differentiated.

    Attributes:
        fun: Returns a scalar, or `(scalar, aux)` if `has_aux`.
        argnums: Positional arguments that are differentiated.
        has_aux: As in `jax.grad`.
        wrt: Filter for the state of NNX objects that is differentiated.
        is_bound: Whether the first argument is the object a method is bound to: `argnums` does not
            count it, and only its NNX state is differentiated.
    """

    fun: Callable[..., Any]
    argnums: tuple[int, ...]
    has_aux: bool
    wrt: Any = is_parameter
    is_bound: bool = False

    @staticmethod
    def of(
        fun: Callable[..., Any], argnums: tuple[int, ...], has_aux: bool, wrt: Any = is_parameter
    ) -> tuple[Loss, tuple[Any, ...]]:
        """The loss, and the arguments that precede those of a call: `self` for a bound method.

        Raises:
            UnsupportedProgramError: It is planned already.
        """
        if isinstance(fun, (PlannedFunction, BoundFunction)):
            name = name_of(fun)
            raise UnsupportedProgramError(
                f"`{name}` is planned already, by `hremat` or `apply_plan`, and a plan within a "
                f"plan would keep the checkpoints of both. Give the function it was made from: "
                f"`{name}.__wrapped__`"
            )
        if inspect.ismethod(fun):
            return Loss(fun.__func__, argnums, has_aux, wrt, is_bound=True), (fun.__self__,)
        return Loss(fun, argnums, has_aux, wrt), ()

    def differentiated(self, args: Sequence[Any]) -> Choice:
        """Which leaves of positional arguments are differentiated."""
        own = args[self.is_bound :]
        receiver = args[: self.is_bound]
        argnums = self.argnums
        if holds_objects(receiver):
            argnums = tuple(p for p in argnums if -len(own) <= p < len(own))
        positions = [p + self.is_bound for p in positions_among(own, argnums)]
        variables = variables_of([args[p] for p in positions] + list(receiver), self.wrt)

        def is_differentiated(leaf: Leaf) -> bool:
            if leaf.variable is not None:
                return id(leaf.variable) in variables
            plain = leaf.path[0].idx == 0 and not leaf.within
            return plain and leaf.path[1].idx in positions

        return is_differentiated

    def trace(self, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedCall:
        """Trace a call as inside `jax.grad`: Python numbers are static, unless there is nothing
        else to differentiate."""
        chosen = self.differentiated(args)

        def is_differentiated_number(leaf: Leaf) -> bool:
            return is_number(leaf.value) and chosen(leaf)

        arguments = Arguments.of(args, kwargs, is_differentiated=chosen)
        if not any(x.differentiated and _is_floating(x.value) for x in arguments.inputs):
            arguments = Arguments.of(
                args,
                kwargs,
                is_differentiated=chosen,
                traces_scalar=is_differentiated_number,
            )
        return self._trace(arguments)

    def trace_as_jit(self, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedCall:
        """Trace a call as `jax.jit` does: Python numbers are inputs, unless the function needs
        their values, as it needs those of static arguments (those of whole numbers first), or
        computes something else of numbers than of arrays."""
        chosen = self.differentiated(args)
        numbers = [x for x in Arguments.of(args, kwargs).leaves if is_number(x.value)]
        every = frozenset(map(input_name, numbers))
        whole = {input_name(x) for x in numbers if isinstance(x.value, int)}
        differentiated = frozenset(input_name(x) for x in numbers if chosen(x))

        @functools.cache
        def trace(traced: frozenset[str]) -> TracedCall:
            arguments = Arguments.of(
                args,
                kwargs,
                is_differentiated=chosen,
                traces_scalar=lambda leaf: input_name(leaf) in traced,
            )
            return self._trace(arguments)

        choices = (every, (every - whole) | differentiated, differentiated, frozenset[str]())
        *tries, last = dict.fromkeys(choices)
        for traced in tries:
            # What is raised for want of a value depends on who asks for it: JAX, NumPy, a `dict`.
            # Anything else is raised again in the end.
            with contextlib.suppress(Exception):
                call = trace(traced)
                if traced == differentiated or computes_the_same(call, trace(differentiated)):
                    return call
        return trace(last)

    def trace_like(
        self, args: Sequence[Any], kwargs: dict[str, Any], plan: RematPlan
    ) -> TracedCall:
        """Trace a call with the same inputs traced and differentiated as in a plan's program.

        Raises:
            StalePlanError: The function computes something else of a number that it is given than
                of the array that the plan is for.
        """
        inputs = plan.fingerprint.differentiated_inputs
        otherwise = self.differentiated(args)

        def trace(traces_scalar: Choice) -> TracedCall:
            arguments = Arguments.of(
                args,
                kwargs,
                is_differentiated=lambda x: inputs.get(input_name(x), otherwise(x)),
                traces_scalar=traces_scalar,
            )
            return self._trace(arguments)

        call = trace(lambda leaf: input_name(leaf) in inputs)
        given = {x.name for x in call.arguments.inputs if is_number(x.value)}
        same = True
        if given:
            # It is refused if there is nothing else to differentiate.
            with contextlib.suppress(UnsupportedProgramError):
                same = computes_the_same(call, trace(lambda leaf: False))
        if not same:
            names = ", ".join(f"`{name}`" for name in sorted(given))
            raise StalePlanError(
                f"the plan {plan.fingerprint.digest[:8]} is for arrays at {names}, and "
                f"`{name_of(self.fun)}` computes something else of the numbers that it is given "
                f"there. Give it arrays, or plan and apply the function with these numbers bound: "
                f"`functools.partial`"
            )
        return call

    def _trace(self, arguments: Arguments) -> TracedCall:
        return trace_arguments(self.fun, arguments, is_loss=True, has_aux=self.has_aux)


class PlanSource(Protocol):
    """Where a planned function gets its plans from."""

    @property
    def plans(self) -> tuple[RematPlan, ...]:
        """The plans in use, in order of first call."""
        ...

    def trace(self, loss: Loss, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedCall:
        """Trace a call of a loss."""
        ...

    def plan_for(self, call: TracedCall, trace_s: float) -> RematPlan:
        """The plan for the program of a call; tracing took `trace_s` seconds."""
        ...


@dataclass(frozen=True, slots=True)
class MadePlans:
    """Each program is planned once. Only plans, which hold no JAX object, are kept.

    Attributes:
        request: How the plans are made.
        goal: The budget or the bound on the slowdown.
        argnums, has_aux: Recorded in the plans, as facts about their functions.
    """

    request: PlanRequest
    goal: Budget | Slowdown
    argnums: tuple[int, ...] = ()
    has_aux: bool = False
    _made: dict[tuple[Any, ...], RematPlan] = field(default_factory=dict)

    @property
    def plans(self) -> tuple[RematPlan, ...]:
        return tuple(self._made.values())

    def trace(self, loss: Loss, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedCall:
        return loss.trace(args, kwargs)

    def plan_for(self, call: TracedCall, trace_s: float) -> RematPlan:
        key = _plan_key(call.program)
        if key not in self._made:
            self._made[key] = self.request.plan(
                own_step(call.program), trace_s, self.goal, self.argnums, self.has_aux
            )
        return self._made[key]


@dataclass(frozen=True, slots=True)
class GivenPlan:
    """One plan, for one program."""

    plan: RematPlan

    @property
    def plans(self) -> tuple[RematPlan, ...]:
        return (self.plan,)

    def trace(self, loss: Loss, args: Sequence[Any], kwargs: dict[str, Any]) -> TracedCall:
        return loss.trace_like(args, kwargs, self.plan)

    def plan_for(self, call: TracedCall, trace_s: float) -> RematPlan:
        check_plan_is_for(call.program.with_opened(self.plan.opened), self.plan, name_of(call.fun))
        return self.plan


class PlannedFunction:
    """A loss run with the regions of its plans; called, differentiated and jitted as before.

    As an attribute of a class it is a method. `plans` holds the plans in use, in order of first
    call.
    """

    def __init__(self, loss: Loss, source: PlanSource) -> None:
        functools.update_wrapper(self, loss.fun)
        self._loss = loss
        self._source = source

    @property
    def plans(self) -> tuple[RematPlan, ...]:
        """The plans in use, one for each program that calls were traced to."""
        return self._source.plans

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_planned(lambda: self._source.trace(self._loss, args, kwargs), self._source)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundFunction(self, instance)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A function that is decorated at its definition is pickled by name, as functions are.
        return importable_name(self) or super().__reduce_ex__(protocol)


class BoundFunction:
    """A planned function bound to an object, as its method."""

    def __init__(self, planned: PlannedFunction, receiver: Any) -> None:
        functools.update_wrapper(self, planned)
        self.__wrapped__ = types.MethodType(planned._loss.fun, receiver)
        self.__self__ = receiver
        self._planned = planned

    @property
    def plans(self) -> tuple[RematPlan, ...]:
        """The plans in use, those of all objects that the function is bound to."""
        return self._planned.plans

    @property
    def unbound(self) -> PlannedFunction:
        """The same function, taking the object as its first argument."""
        return PlannedFunction(replace(self._planned._loss, is_bound=True), self._planned._source)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.unbound(self.__self__, *args, **kwargs)

    def __reduce__(self) -> Any:
        return BoundFunction, (self._planned, self.__self__)


def planned_function(
    fun: Callable[..., Any],
    source: PlanSource,
    argnums: tuple[int, ...],
    has_aux: bool,
    wrt: Any = is_parameter,
) -> Any:
    """A function, or a bound method, whose plans come from `source`."""
    loss, bound_to = Loss.of(fun, argnums, has_aux, wrt)
    planned = PlannedFunction(replace(loss, is_bound=False), source)
    return BoundFunction(planned, *bound_to) if bound_to else planned


@even_without_jit
def run_planned(trace: Callable[[], TracedCall], source: PlanSource) -> Any:
    """Trace a call, get the plan for its program, and run the call with that plan."""
    start_s = time.perf_counter()
    call = trace()
    plan = source.plan_for(call, time.perf_counter() - start_s)
    platform, target = plan.certificate.platform, plan.certificate.target

    def watched(value: Any) -> Any:
        """The value; warns when it is lowered for another platform than the plan's."""
        return value if platform is None else lowered_for(value, platform, target)

    return run_call(call.with_opened(plan.opened), plan.root, watched)


def check_plan_is_for(program: Program, plan: RematPlan, name: str) -> None:
    """Refuse a plan made for another program.

    Raises:
        StalePlanError: Naming the first difference.
    """
    difference = plan.fingerprint.first_difference(fingerprint(program, build_graph(program)))
    if difference is not None:
        raise StalePlanError(
            f"the plan {plan.fingerprint.digest[:8]} is not for `{name}` as it was traced now: "
            f"{difference}. Shapes, dtypes, static arguments, which arguments are passed by "
            f"keyword, the model's code or a version of JAX or Flax have changed since the plan "
            f"was made. Make it again with `jax_hremat.plan_remat`; if only shapes or a version "
            f"changed, `jax_hremat.certify` may keep its regions"
        )


def planned_class(
    module_class: type,
    metaclass: type,
    methods: dict[str, Any],
    plans: Callable[[], tuple[RematPlan, ...]],
    remake: Callable[[], type],
) -> Any:
    """A subclass that looks like its base, with planned methods.

    Args:
        module_class: The base.
        metaclass: The metaclass of planned classes, which pickles by `reduce_class`. If it is not a
            subclass of the base's metaclass, the base's own is used.
        methods: The planned methods, by name.
        plans: Returns the plans in use.
        remake: Makes an equal class anew.
    """

    def hremat_plans(cls: type) -> tuple[RematPlan, ...]:
        """The plans in use, one for each program that calls were traced to."""
        return plans()

    namespace = {
        **methods,
        "__doc__": module_class.__doc__,
        "__module__": module_class.__module__,
        "__qualname__": module_class.__qualname__,
        "hremat_plans": classmethod(hremat_plans),
        _REMAKE: staticmethod(remake),
    }
    make: Any = metaclass if issubclass(metaclass, type(module_class)) else type(module_class)
    return make(module_class.__name__, (module_class,), namespace)


def reduce_class(cls: type) -> Any:
    """How a class is pickled: by its name, or, if that name refers to the class it was made from,
    as a call that makes it anew."""
    if _REMAKE not in vars(cls) or importable_name(cls):
        return cls.__qualname__
    return vars(cls)[_REMAKE].__func__, ()


def importable_name(value: Any) -> str | None:
    """The name by which its module has this function or class; None if it has none."""
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return value.__qualname__ if found is value else None


def _plan_key(program: Program) -> tuple[Any, ...]:
    """Programs with the same key share a plan: the same operations, results and shardings.

    Flax folds a module's path into its random keys, so instances of one class differ in those
    literals; costs do not depend on them.
    """
    graph = build_graph(program)
    operations = tuple(
        replace(op, literals="") if op.primitive == "random_fold_in" else op
        for op in graph.operations
    )
    shared = fingerprint(program, replace(graph, operations=operations))
    return shared.digest, graph.outputs, tuple(map(str, program.shardings))


def _is_floating(value: Any) -> bool:
    return is_inexact(value.dtype if hasattr(value, "dtype") else jnp.result_type(value))
