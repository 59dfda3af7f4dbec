"""A function of arrays -> `Program`: the flat jaxpr that all other stages work on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding

from jax_hremat._jax.checkpoints import remat3_enabled, without_checkpoints
from jax_hremat._jax.cudnn import with_cudnn
from jax_hremat._jax.effects import named_axes, ordered_effects, unchecked_errors
from jax_hremat._jax.equations import evaluate_inlined
from jax_hremat._jax.jaxprs import is_symbolic, jaxpr_consts, open_jaxpr, without_outputs
from jax_hremat._jax.keys import is_inexact
from jax_hremat._jax.meshes import is_typed, named_mesh, typed_struct
from jax_hremat._jax.refs import is_ref
from jax_hremat._jax.trace_context import TraceContext
from jax_hremat._plan.device_mesh import DeviceMesh
from jax_hremat._plan.openings import NOTHING_OPENED, Openings
from jax_hremat._plan.own_checkpoint import OwnCheckpoint
from jax_hremat._shared.errors import UnsupportedConfigError, UnsupportedProgramError
from jax_hremat._trace.mesh import (
    device_mesh,
    is_known,
    sharding_on_mesh,
    shardings_on_one_mesh,
)
from jax_hremat._trace.own_checkpoints import own_checkpoints
from jax_hremat._trace.rules import open_program


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A function traced before differentiation, with every plain inner `jit` inlined and the rules
    of `custom_vjp` calls taken apart (`rules.py`).

    Attributes:
        jaxpr: The closed, flat jaxpr; equation `i` is operation `i` of the graph.
        input_names: A readable path for each flat input, such as `args[0]['params']['w']`.
        differentiated: Positions of the flat inputs that gradients are taken of.
        moving: Positions of the flat inputs for which rules were taken apart; includes the
            differentiated ones.
        is_loss: Whether flat output 0 is a scalar loss and all others are auxiliary. If not,
            the cotangents of all floating outputs are inputs of the step (a module's call).
        shardings: The sharding of each flat input, where some of them are sharded over a mesh of
            several devices; None for an input without one, unconstrained for an input that was
            being traced. Empty on one device.
        context: The mesh in force where the function was traced.
        mesh: The devices that the program runs on, where they are known to be several: its inputs
            are sharded over them, or the program or its context names them. If the program is what
            one device does in a `shard_map`, some axes are manual.
        own_checkpoints: The user's own `jax.checkpoint`s.
        opened: Which parts of the user's function were opened before planning.
        sources: Of the body of a loop or branch, what its inputs are made of outside, as
            `comparisons.sources_of` tells.
    """

    jaxpr: Any
    input_names: tuple[str, ...]
    differentiated: tuple[int, ...]
    moving: tuple[int, ...]
    is_loss: bool
    shardings: tuple[NamedSharding | None, ...] = ()
    context: TraceContext = field(default_factory=TraceContext.current)
    mesh: DeviceMesh | None = None
    own_checkpoints: tuple[OwnCheckpoint, ...] = ()
    opened: Openings = NOTHING_OPENED
    sources: tuple[frozenset[int], ...] = ()

    def with_opened(self, openings: Openings) -> Program:
        """The same program, as if parts of it were written differently."""
        if openings == self.opened:
            return self
        jaxpr = without_checkpoints(self.jaxpr) if openings.checkpoints else self.jaxpr
        jaxpr = open_program(jaxpr, self.moving, openings.scan_steps)
        return replace(self, jaxpr=jaxpr, opened=openings)

    def without_outputs(self, positions: Collection[int]) -> Program:
        """The same program without some outputs, and without what only they need."""
        return replace(self, jaxpr=without_outputs(self.jaxpr, positions))

    @property
    def num_operations(self) -> int:
        """Equations of the jaxpr."""
        return len(open_jaxpr(self.jaxpr).eqns)

    @property
    def in_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Type of every flat input."""
        return tuple(abstract(v.aval) for v in open_jaxpr(self.jaxpr).invars)

    @property
    def values(self) -> tuple[Any, ...]:
        """The jaxpr's variables: constants, inputs, outputs of the operations."""
        jaxpr = open_jaxpr(self.jaxpr)
        return (*jaxpr.constvars, *jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars))

    @property
    def cotangent_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Types of the cotangents that the step takes after the inputs; empty for a loss."""
        if self.is_loss:
            return ()
        outputs = open_jaxpr(self.jaxpr).outvars
        return tuple(cotangent(v.aval) for v in outputs if is_inexact(v.aval.dtype))

    def step(self, body: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
        """The training step that the budget bounds, around `body(*flat_inputs) -> flat_outputs`.

        For a loss it is `value_and_grad`; for a module's call it is the call with its
        pullback, which takes the cotangents after the inputs.
        """
        num_inputs = len(self.in_avals)

        def forward(active: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, Any]:
            merged = list(inputs)
            for position, value in zip(self.differentiated, active, strict=True):
                merged[position] = value
            outputs = body(*merged)
            if self.is_loss:
                return outputs[0], list(outputs[1:])
            floating = [o for o in outputs if is_inexact(o.dtype)]
            return floating, [o for o in outputs if not is_inexact(o.dtype)]

        def step(*flat: Any) -> Any:
            inputs, cotangents = flat[:num_inputs], flat[num_inputs:]
            active = [inputs[i] for i in self.differentiated]
            value, pullback, aux = jax.vjp(lambda a: forward(a, inputs), active, has_aux=True)
            if self.is_loss:
                seed: Any = jnp.ones_like(value)
            else:
                seed = list(cotangents)
            return value, aux, pullback(seed)[0]

        return self.context.inside(step)


def abstract(aval: Any) -> jax.ShapeDtypeStruct:
    """The aval as a `ShapeDtypeStruct`, with everything that is part of its type."""
    return typed_struct(aval)


def cotangent(aval: Any) -> jax.ShapeDtypeStruct:
    """The type of a value's cotangent."""
    return typed_struct(aval.to_ct_aval())


def abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    """The type of an argument (an array, a tracer, a scalar, or a struct), with its sharding if it
    is sharded over a mesh of several devices (see `sharding_on_mesh`).

    Raises:
        UnsupportedProgramError: The argument is on several devices without a mesh, or is mutable.
    """
    aval: Any = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    if is_ref(aval):
        raise _outer_ref(f"an argument is a mutable array (`jax.new_ref`), {aval.str_short()}")
    aval = abstract(aval)
    sharding = sharding_on_mesh(leaf)
    return aval if sharding is None else aval.update(sharding=sharding)


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """One flat input of a function.

    Attributes:
        name: A readable path.
        value: An array, a number, or a `ShapeDtypeStruct`.
        differentiated: Whether gradients are taken of it, if its dtype has gradients.
    """

    name: str
    value: Any
    differentiated: bool


def trace_flat(
    make_jaxpr: Callable[[Sequence[jax.ShapeDtypeStruct]], Any],
    inputs: Sequence[Input],
    *,
    is_loss: bool,
) -> tuple[Program, tuple[Any, ...]]:
    """Trace a function of flat inputs.

    Args:
        make_jaxpr: Traces the function, which takes arrays and returns a list of arrays, given
            their types.
        inputs: Its inputs.
        is_loss: Whether the first output is a loss.

    Returns:
        The program, and the values that it closes over and that are traced outside it: they are
        inputs of the program after the given ones, differentiated unless it is a loss. (For
        example, a module made inside the function that JAX traces has such values in its fields.)

    Raises:
        UnsupportedProgramError: A symbolic dimension, a mutable array from outside, an ordered
            effect, an unchecked error, an axis of a surrounding `vmap`; nothing to differentiate.
        UnsupportedConfigError: `jax_remat3` is on.
    """
    if remat3_enabled():
        raise UnsupportedConfigError(
            "`jax_remat3` is on; under it nested `jax.checkpoint` regions and name policies have "
            "another, still changing meaning, and a plan would not keep its peak. Switch it off "
            "with `jax.config.update('jax_remat3', False)` (or unset `JAX_REMAT3`)"
        )
    structs = [abstract_leaf(x.value) for x in inputs]
    _check_shapes([x.name for x in inputs], structs)
    with with_cudnn():
        nested = make_jaxpr([*map(abstract, structs)])
    refs = [v.aval for v in open_jaxpr(nested).constvars if is_ref(v.aval)]
    if refs:
        raise _outer_ref(
            f"the function closes over a mutable array, or is given one (`jax.new_ref`; in Flax, a "
            f"variable with `ref=True`), {refs[0].str_short()}"
        )
    errors = unchecked_errors(nested)
    if errors:
        raise UnsupportedProgramError(
            f"the function checks for errors ({', '.join(errors)}) that a `checkify` around it is "
            f"to collect, and without that its step cannot be compiled. Plan the function with its "
            f"errors as a result, `has_aux=True`: `def loss(*args): error, value = "
            f"checkify.checkify(fun)(*args); return value, error`"
        )
    ordered = ordered_effects(nested)
    if ordered:
        raise UnsupportedProgramError(
            f"the function has ordered effects ({', '.join(ordered)}), which `jax.checkpoint` "
            f"cannot recompute. Make them unordered (`ordered=False`) or move them out of the "
            f"function that is planned"
        )
    context = TraceContext.current()
    axes = named_axes(nested).difference(context.mesh.manual_axes)
    if axes:
        raise UnsupportedProgramError(
            f"the function communicates over the axes {', '.join(sorted(map(str, axes)))} of a "
            f"surrounding `vmap`, without which it cannot be compiled on its own. Plan the "
            f"function that contains the mapping"
        )
    closed_over = tuple(c for c in jaxpr_consts(nested) if isinstance(c, Tracer))
    outer = [Input(f"closed_over[{i}]", c, not is_loss) for i, c in enumerate(closed_over)]
    inputs = [*inputs, *outer]
    structs += [abstract_leaf(c) for c in closed_over]
    nested = _hoisted(nested, closed_over)
    invars = open_jaxpr(nested).invars
    chosen = [i for i, x in enumerate(inputs) if x.differentiated]
    differentiated = tuple(i for i in chosen if is_inexact(invars[i].aval.dtype))
    if not differentiated:
        raise _nothing_to_differentiate([x.name for x in inputs], invars, chosen)
    names = tuple(x.name for x in inputs)
    jaxpr = open_program(nested, differentiated)
    shardings = shardings_on_one_mesh(names, structs)
    return (
        Program(
            jaxpr=jaxpr,
            input_names=names,
            differentiated=differentiated,
            moving=differentiated,
            is_loss=is_loss,
            shardings=shardings,
            context=context,
            mesh=devices_of(shardings if is_loss else (), context, jaxpr),
            own_checkpoints=own_checkpoints(nested),
        ),
        closed_over,
    )


def _nothing_to_differentiate(
    names: Sequence[str], invars: Sequence[Any], chosen: Sequence[int]
) -> UnsupportedProgramError:
    """What to say if none of the inputs that are to be differentiated is floating."""
    if chosen:
        dtypes = sorted({str(invars[i].aval.dtype) for i in chosen})
        return UnsupportedProgramError(
            f"nothing to differentiate: the arguments that are differentiated (`argnums`) hold "
            f"only arrays of dtype {', '.join(dtypes)}, and gradients need a floating "
            f"dtype. Cast the parameters, or point `argnums` at them"
        )
    floating = (n for n, v in zip(names, invars, strict=True) if is_inexact(v.aval.dtype))
    # `args[1]['w'][0]` is in `args[1]`.
    where = dict.fromkeys(name.partition("]")[0] + "]" for name in floating)
    found = f"Floating arrays are in {', '.join(where)}" if where else "No other has any"
    return UnsupportedProgramError(
        f"nothing to differentiate: the arguments that are differentiated (`argnums`) hold no "
        f"arrays. {found}; point `argnums` at the parameters. Where the object of a method is "
        f"passed like an argument, as under `jax.jit(static_argnums=0)`, it is argument 0"
    )


def _hoisted(closed: Any, closed_over: Sequence[Any]) -> Any:
    """The closed jaxpr with its `closed_over` constants turned into inputs, after the existing
    ones."""
    if not closed_over:
        return closed
    consts = jaxpr_consts(closed)
    invars = open_jaxpr(closed).invars
    outer = {id(c) for c in closed_over}

    def flat(*inputs: Any) -> list[Any]:
        values = iter(inputs[len(invars) :])
        merged = [next(values) if id(c) in outer else c for c in consts]
        return evaluate_inlined(closed, merged, inputs[: len(invars)])

    avals = (*(v.aval for v in invars), *(abstract(abstract_leaf(c)) for c in closed_over))
    return jax.make_jaxpr(flat)(*avals)


def _outer_ref(what: str) -> UnsupportedProgramError:
    return UnsupportedProgramError(
        f"{what}, and what is written to it would be written again by a recompute. Pass its value, "
        f"return the new one as an auxiliary output, and write it outside; mutable arrays that the "
        f"function makes itself may stay"
    )


def devices_of(
    shardings: Sequence[NamedSharding | None], context: TraceContext, jaxpr: Any
) -> DeviceMesh | None:
    """The mesh of the inputs, if all their shardings are known; else the mesh that is named."""
    placed = [s.mesh for s in shardings if s is not None]
    if placed and context.mesh.empty and all(map(is_known, shardings)):
        return device_mesh(placed[0])
    mesh = named_mesh(jaxpr) if context.mesh.empty else context.mesh
    return None if mesh is None or _is_one_device(mesh) else device_mesh(mesh)


def _is_one_device(mesh: AbstractMesh) -> bool:
    return mesh.size == 1 and not is_typed(mesh)


def _check_shapes(names: Sequence[str], avals: Sequence[jax.ShapeDtypeStruct]) -> None:
    """Refuse shapes with dimensions that are not numbers."""
    for name, aval in zip(names, avals, strict=True):
        for axis, size in enumerate(aval.shape):
            if is_symbolic(size):
                raise UnsupportedProgramError(
                    f"dimension {axis} of `{name}` is symbolic, `{size}` in {aval.dtype}"
                    f"[{', '.join(map(str, aval.shape))}]: a plan is for sizes in numbers, for "
                    f"which its peak was compiled. Export the planned function at each of the "
                    f"shapes that are used, or the function as it is"
                )
