"""The step whose memory a budget bounds: a function around the planned program, compiled as a
whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_hremat._emit.emit import FlatFunction
from jax_hremat._emit.run import run_call
from jax_hremat._flax.objects import Structure
from jax_hremat._jax.cudnn import with_cudnn
from jax_hremat._jax.jaxprs import inner_jaxprs, open_jaxpr
from jax_hremat._plan.device_mesh import DeviceMesh
from jax_hremat._plan.openings import Openings
from jax_hremat._plan.region import Region
from jax_hremat._shared.errors import UnsupportedProgramError
from jax_hremat._trace.call import (
    Arguments,
    Choice,
    Results,
    TracedCall,
    call_flat,
    refuse_closed_over,
)
from jax_hremat._trace.fingerprint import fingerprint
from jax_hremat._trace.graph import build_graph
from jax_hremat._trace.mesh import laid, put, shardings_on_one_mesh
from jax_hremat._trace.trace import Program, abstract, abstract_leaf, devices_of

LossFunction = Callable[..., Any]
MakeStep = Callable[[LossFunction], Callable[..., Any]]
TraceLoss = Callable[[tuple[Any, ...], dict[str, Any]], TracedCall]

_MARK = "hremat_loss"


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The function that is compiled around a body; the body may be any function that computes the
    program.

    Attributes:
        program: The program that is planned.
        around: From a flat body of the program to the flat function that is compiled.
        avals: Abstract arguments of that function.
        input_names: A readable path for each argument.
        donated: Positions of the arguments whose memory the results may take over.
        calls: How often the step runs the program.
        traced: The jaxpr of a step that is more than the program and its backward.
        mesh: The devices that the step runs on, where there are several; the executable is then
            the program of one device. The `sharding` of each aval says how that argument is
            sharded; if it is missing, the compiler chooses.
    """

    program: Program
    around: Callable[[FlatFunction], Callable[..., Any]]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    input_names: tuple[str, ...]
    donated: tuple[int, ...] = ()
    calls: int = 1
    traced: Any = None
    mesh: DeviceMesh | None = None

    def with_opened(self, openings: Openings) -> Step:
        """The same step, its program as if parts of it were written differently."""
        return replace(self, program=self.program.with_opened(openings))


def own_step(program: Program) -> Step:
    """The program with its backward and nothing else: `Program.step`.

    On a mesh, each gradient is sharded as its argument is, which is how an optimizer needs it.
    Where the mesh is not known, the step is for one device.
    """
    on_mesh = program.mesh is not None and bool(program.shardings)
    lies = program.shardings if on_mesh else [None] * len(program.in_avals)

    def around(body: FlatFunction) -> Callable[..., Any]:
        step = program.step(body)

        def placed(*flat: Any) -> Any:
            value, aux, gradients = step(*flat)
            of_gradients = [lies[i] for i in program.differentiated]
            return value, aux, [put(g, s) for g, s in zip(gradients, of_gradients, strict=True)]

        return placed

    return Step(
        program=program,
        around=around,
        avals=(*map(laid, program.in_avals, lies), *program.cotangent_avals),
        input_names=program.input_names,
        mesh=program.mesh,
    )


def training_step(
    make_step: MakeStep,
    loss_fn: LossFunction,
    ways_to_trace: Sequence[TraceLoss],
    arguments: Arguments,
    *,
    has_aux: bool,
    donate_argnums: tuple[int, ...],
) -> Step:
    """A user's whole training step, around the loss that it differentiates.

    The step is traced with a loss that records each of its traced calls.

    Args:
        make_step: From a loss function to the step.
        loss_fn: The loss.
        ways_to_trace: Each from the arguments of a call of the loss to the traced call. The first
            is used under which all calls of the step are of one program.
        arguments: The arguments of the step.
        has_aux: Whether the loss returns `(loss, aux)`.
        donate_argnums: Arguments of the step that are donated.

    Raises:
        UnsupportedProgramError: The step does not call the loss, or calls it with different
            structures, shapes or static arguments; also whatever tracing refuses.
    """
    names = tuple(x.name for x in arguments.inputs)
    avals = tuple(abstract_leaf(x.value) for x in arguments.inputs)
    shardings = shardings_on_one_mesh(names, avals)
    returned = arguments.variables_of(donate_argnums)

    def trace(trace_call: TraceLoss) -> tuple[list[TracedCall], Any, str | None]:
        calls: list[TracedCall] = []

        @functools.wraps(loss_fn)
        def noting_loss(*loss_args: Any, **loss_kwargs: Any) -> Any:
            call = trace_call(loss_args, loss_kwargs)
            refuse_closed_over(call)
            calls.append(call)
            return _marked(run_call(call, Region(0, call.program.num_operations)), has_aux)

        flat = flat_step(make_step(noting_loss), arguments, returned)
        with with_cudnn():
            traced = jax.make_jaxpr(lambda *values: flat(*values)[0])(*map(abstract, avals))
        return calls, traced, _difference(calls)

    trace_call, *others = ways_to_trace
    calls, traced, difference = trace(trace_call)
    while difference is not None and others:
        calls, traced, difference = trace(others.pop(0))
    if difference is not None:
        found = sorted({_shapes(c) for c in calls})
        raise UnsupportedProgramError(
            "the step calls the loss function with arguments of different structures or shapes: "
            f"{'; '.join(found)} ({difference}). One plan is for one of them; make the calls alike"
        )
    first = calls[0]
    context = first.program.context.here()

    def around(body: FlatFunction) -> Callable[..., Any]:
        @functools.wraps(loss_fn)
        def loss(*loss_args: Any, **loss_kwargs: Any) -> Any:
            now = first.arguments.like(loss_args, loss_kwargs)
            return first.results.put_together(now, body(*now.values))

        step = flat_step(make_step(loss), arguments, returned)
        # Reports recognise the step's arguments by the name `flat`.
        return context.inside(lambda *flat: step(*flat)[0])

    return Step(
        program=first.program,
        around=around,
        avals=avals,
        input_names=names,
        donated=arguments.inputs_of(donate_argnums),
        calls=max(1, _count_marks(traced)),
        traced=traced,
        mesh=devices_of(shardings, context, traced),
    )


def flat_step(
    step: Callable[..., Any], arguments: Arguments, returned: frozenset[int]
) -> Callable[..., tuple[list[Any], Results]]:
    """A step as a function from its flat inputs to its outputs, and to the `Results` that put the
    outputs together.

    The state of an NNX object is an output if the step changed it, or if it is in `returned`: the
    state of donated arguments, whose arrays the caller loses.
    """

    def flat(*values: Any) -> tuple[list[Any], Results]:
        return call_flat(step, arguments, values, as_jit=True, returned=returned)

    return flat


class JittedStep:
    """`jax.jit` of a step that takes NNX objects, or pytrees with leaves that are not arrays.

    Changes that the step makes to the objects are applied to the caller's objects. Everything else
    is as in `jax.jit`: the step is traced anew for other shapes, structures and static leaves, and
    static leaves must be hashable.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        is_static: Choice,
        donate_argnums: tuple[int, ...],
        compiler_options: dict[str, Any],
    ) -> None:
        functools.update_wrapper(self, step)
        self._is_static = is_static
        self._donated = donate_argnums

        def run(static: _Static, donated: list[Any], kept: list[Any]) -> _Outcome:
            values = [*donated, *kept]
            ordered = [values[i] for i in static.order]
            flat = flat_step(step, static.arguments, static.returned)
            return _Outcome(*flat(*ordered))

        self._jitted = jax.jit(
            run, static_argnums=0, donate_argnums=1, compiler_options=compiler_options
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self._arguments(args, kwargs)
        outcome = self._jitted(*self._split(arguments))
        return outcome.results.put_together(arguments, outcome.outputs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """As `lower` of a jitted function; among the flat inputs, the donated ones come first."""
        return self._jitted.lower(*self._split(self._arguments(args, kwargs)))

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        return Arguments.of(args, kwargs, traces_scalar=lambda leaf: not self._is_static(leaf))

    def _split(self, arguments: Arguments) -> tuple[_Static, list[Any], list[Any]]:
        donated = arguments.inputs_of(self._donated)
        kept = [i for i in range(len(arguments.inputs)) if i not in donated]
        places = {i: place for place, i in enumerate((*donated, *kept))}
        static = _Static(
            structure=arguments.structure,
            leaves=tuple((type(x.value), x.value) for x in arguments.static_part.leaves),
            order=tuple(places[i] for i in range(len(places))),
            returned=arguments.variables_of(self._donated),
            arguments=arguments.static_part,
        )
        values = [x.value for x in arguments.inputs]
        return static, [values[i] for i in donated], [values[i] for i in kept]


@dataclass(frozen=True, slots=True)
class _Static:
    structure: Structure
    leaves: tuple[Any, ...]
    order: tuple[int, ...]
    returned: frozenset[int]
    arguments: Arguments = field(compare=False)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["outputs"], meta_fields=["results"]
)
@dataclass(frozen=True, slots=True)
class _Outcome:
    outputs: list[Any]
    results: Results


def _difference(calls: Sequence[TracedCall]) -> str | None:
    """How the program of some call differs from that of the first; None if all are the same.

    Raises:
        UnsupportedProgramError: There is none.
    """
    if not calls:
        raise UnsupportedProgramError(
            "the step that `make_step` returned does not call the loss function it was given, so "
            "there is nothing to plan. Differentiate the argument of `make_step`, not the loss "
            "function itself: `lambda loss_fn: lambda state, batch: … jax.grad(loss_fn) …`"
        )
    first, *others = (fingerprint(c.program, build_graph(c.program)) for c in calls)
    return next(filter(None, map(first.first_difference, others)), None)


def _shapes(call: TracedCall) -> str:
    inputs = call.program.in_avals
    return ", ".join(f"{aval.dtype}{list(aval.shape)}" for aval in inputs)


def _marked(out: Any, has_aux: bool) -> Any:
    """The loss plus a named integer zero. The name is an equation that can be counted, since it is
    not differentiated."""
    loss, *aux = out if has_aux else (out,)
    zero = checkpoint_name(jnp.zeros((), jnp.int32), _MARK)
    loss = loss + zero.astype(loss.dtype)
    return (loss, *aux) if has_aux else loss


def _count_marks(jaxpr: Any) -> int:
    """How often the marked equation runs; a run inside a `while` counts once."""
    total = 0
    for eqn in open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name == "name" and eqn.params["name"] == _MARK:
            total += 1
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += times * sum(map(_count_marks, inner_jaxprs(eqn)))
    return total
