"""A call of any function as a program of arrays: traced and static arguments, and results."""

from __future__ import annotations

import bisect
import enum
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_hremat._flax.objects import (
    Changes,
    Leaf,
    Structure,
    Watch,
    flatten,
    is_object,
    trace_context_errors,
)
from jax_hremat._jax.jaxprs import open_jaxpr
from jax_hremat._plan.openings import Openings
from jax_hremat._shared.errors import UnsupportedProgramError
from jax_hremat._trace.flat import flatten as flatten_jaxpr
from jax_hremat._trace.named import make_jaxpr
from jax_hremat._trace.trace import Input, Program, trace_flat

# Whether a leaf is differentiated; or whether a leaf that could be static is traced.
Choice = Callable[[Leaf], bool]
# The length of the path of a whole argument: whether it is positional, and its position or name.
_WHOLE_ARGUMENT = 2


@dataclass(frozen=True, slots=True, eq=False)
class Arguments:
    """The arguments of a call, flattened.

    Attributes:
        structure: The arguments without their leaves.
        leaves: All leaves; those that are not traced are static.
        objects: NNX objects among the arguments, by number.
        inputs: The leaves that are traced.
        positions: The position of each input in `leaves`.
    """

    structure: Structure
    leaves: tuple[Leaf, ...]
    objects: dict[int, Any]
    inputs: tuple[Input, ...]
    positions: tuple[int, ...]

    @staticmethod
    def of(
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        is_differentiated: Choice = lambda leaf: False,
        traces_scalar: Choice = lambda leaf: False,
    ) -> Arguments:
        """Arrays are traced, Python numbers and flags where `traces_scalar`; the rest is static."""
        structure, leaves, objects = flatten((tuple(args), kwargs))
        positions = tuple(
            i
            for i, leaf in enumerate(leaves)
            if is_array(leaf.value) or (is_scalar(leaf.value) and traces_scalar(leaf))
        )
        chosen = (leaves[i] for i in positions)
        inputs = tuple(Input(input_name(x), x.value, is_differentiated(x)) for x in chosen)
        return Arguments(structure, tuple(leaves), objects, inputs, positions)

    @property
    def values(self) -> tuple[Any, ...]:
        """The traced leaves as JAX arrays."""
        return tuple(_as_jax(x.value) for x in self.inputs)

    @property
    def traced_leaves(self) -> tuple[Leaf, ...]:
        """The leaf that each input is."""
        return tuple(self.leaves[i] for i in self.positions)

    def like(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
        """Other arguments, with the same leaves traced and differentiated."""
        names = {x.name: x.differentiated for x in self.inputs}
        return Arguments.of(
            args,
            kwargs,
            is_differentiated=lambda leaf: names.get(input_name(leaf), False),
            traces_scalar=lambda leaf: input_name(leaf) in names,
        )

    def inputs_of(self, argnums: Sequence[int]) -> tuple[int, ...]:
        """Positions of the inputs that these positional arguments hold."""
        return tuple(k for k, x in enumerate(self.traced_leaves) if _is_of(x.path, argnums))

    def variables_of(self, argnums: Sequence[int]) -> frozenset[int]:
        """Numbers of the variables that these positional arguments hold."""
        held = {id(leaf.variable) for leaf in self.leaves if _is_of(leaf.path, argnums)}
        return frozenset(i for i, node in self.objects.items() if id(node) in held)

    def makes_array_of(self, value: Any) -> bool:
        """Whether a step that returns this leaf returns an array, as under `jax.jit`.

        If there are static flags or numbers inside the arguments, and not as whole arguments, then
        flags stay flags, and so do these numbers, so that a step can take what it returned.
        """
        if is_array(value):
            return True
        traced = frozenset(self.positions)
        inside = [
            leaf.value
            for i, leaf in enumerate(self.leaves)
            if is_scalar(leaf.value) and len(leaf.path) > _WHOLE_ARGUMENT and i not in traced
        ]
        if not inside:
            return is_scalar(value)
        return is_number(value) and all(value is not number for number in inside)

    @property
    def static_part(self) -> Arguments:
        """The arguments without traced values and without the caller's objects."""
        traced = frozenset(self.positions)
        plain = (replace(leaf, variable=None) for leaf in self.leaves)
        leaves = (replace(x, value=None) if i in traced else x for i, x in enumerate(plain))
        return replace(self, leaves=tuple(leaves), objects={}, inputs=())

    def with_values(self, values: Sequence[Any]) -> tuple[Any, dict[int, Any]]:
        """Arguments `(args, kwargs)` with these values as inputs, and the new objects in them."""
        merged = [leaf.value for leaf in self.leaves]
        for i, value in zip(self.positions, values, strict=True):
            merged[i] = value
        objects: dict[int, Any] = {}
        return self.structure.unflatten(merged, objects), objects


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """How a function's results, and the changes it made, are rebuilt from a program's outputs.

    Attributes:
        structure: The structure of the results and the changed values.
        sources: For each leaf, `("output", position)`, `("input", position)` if it is an input
            returned unchanged, or `("static", value)`.
        num_returned: How many leaves are of the results; those of the changed values follow.
        changes: What was changed in the arguments' objects.
    """

    structure: Structure
    sources: tuple[tuple[str, Any], ...]
    num_returned: int
    changes: Changes

    @property
    def changed_outputs(self) -> tuple[int, ...]:
        """The outputs that are changed values."""
        changed = self.sources[self.num_returned :]
        return tuple(position for source, position in changed if source == "output")

    def reading(self, inputs: Mapping[int, int]) -> Results:
        """The same, with some outputs read from inputs instead: for the position of each such
        output, which are outputs no longer, that of the input."""

        gone = sorted(inputs)

        def elsewhere(source: str, which: Any) -> tuple[str, Any]:
            if source != "output":
                return source, which
            if which in inputs:
                return "input", inputs[which]
            return "output", which - bisect.bisect(gone, which)

        return replace(self, sources=tuple(elsewhere(*source) for source in self.sources))

    def put_together(self, arguments: Arguments, outputs: Sequence[Any]) -> Any:
        """The results, with the changes made to the objects of `arguments`."""
        read = {
            "output": lambda j: outputs[j],
            "input": lambda i: arguments.inputs[i].value,
            "static": lambda value: value,
        }
        leaves = [read[source](which) for source, which in self.sources]
        result, changed = self.structure.unflatten(leaves, dict(arguments.objects))
        self.changes.apply(arguments.objects, changed)
        return result


def call_flat(
    fun: Callable[..., Any],
    arguments: Arguments,
    values: Sequence[Any],
    *,
    check: Callable[[Any], None] = lambda result: None,
    num_kept: int = 0,
    hands_on: bool = False,
    as_jit: bool = False,
    returned: frozenset[int] = frozenset(),
) -> tuple[list[Any], Results]:
    """Call a function with traced values for its arguments' inputs.

    Args:
        fun: The function.
        arguments: Its arguments.
        values: Values for the inputs.
        check: Called with what the function returned.
        num_kept: The first `num_kept` leaves of the results are outputs, whatever they are.
        hands_on: Whether inputs that the function returns unchanged, and constants, are outputs
            too: the compiled step has memory for them.
        as_jit: Whether all arrays and numbers are outputs, as they are in `jax.jit`
            (`Arguments.makes_array_of`), and not only those computed from the inputs.
        returned: Numbers of the variables that are outputs whether changed or not.

    Returns:
        The outputs, and how to rebuild the results from them.

    Raises:
        UnsupportedProgramError: The function changes objects that are not among its arguments, or
            puts arrays into containers that are.
    """
    (args, kwargs), objects = arguments.with_values(values)
    name = name_of(fun)
    given = {id(leaf.value) for leaf in flatten((args, kwargs))[1]}
    watch = Watch(objects)
    try:
        result = fun(*args, **kwargs)
    except trace_context_errors() as error:
        raise UnsupportedProgramError(
            f"`{name}` changes Flax NNX state that it was not given: {error}. A change in a "
            f"closure or a global would be lost, as `nnx.grad` and `nnx.jit` say too. Pass the "
            f"object (module, `nnx.Rngs`, metric, variable) as an argument, in any container: "
            f"what is changed in it is then changed in the caller's"
        ) from error
    check(result)
    changes, changed = watch.changes(returned)
    _check_containers(name, args, kwargs, given)
    structure, leaves, _ = flatten((result, changed), objects)
    num_returned = sum(leaf.path[0].idx == 0 for leaf in leaves)
    input_of = {} if as_jit else {id(v): i for i, v in enumerate(values)}
    outputs: list[Any] = []
    sources: list[tuple[str, Any]] = []
    for k, leaf in enumerate(leaves):
        value = leaf.value
        if k >= num_kept and id(value) in input_of:
            sources.append(("input", input_of[id(value)]))
            outputs += [value] if hands_on else []
        elif (
            k < num_kept
            or isinstance(value, Tracer)
            or (as_jit and arguments.makes_array_of(value))
        ):
            sources.append(("output", len(outputs)))
            outputs.append(value)
        else:
            sources.append(("static", value))
            outputs += [value] if hands_on and _is_output(value) else []
    return outputs, Results(structure, tuple(sources), num_returned, changes)


@dataclass(frozen=True, slots=True, eq=False)
class TracedCall:
    """A call, traced.

    Attributes:
        fun: The function.
        program: What it computes.
        arguments: What it was called with.
        closed_over: Values that it uses and that are traced outside it; in the program they are
            inputs, after those of the arguments.
        results: How to rebuild the results from the program's outputs.
    """

    fun: Callable[..., Any]
    program: Program
    arguments: Arguments
    closed_over: tuple[Any, ...]
    results: Results

    def with_opened(self, openings: Openings) -> TracedCall:
        """The call, its program traced as if parts of the function were written differently."""
        return replace(self, program=self.program.with_opened(openings))


def trace_arguments(
    fun: Callable[..., Any], arguments: Arguments, *, is_loss: bool, has_aux: bool = False
) -> TracedCall:
    """Trace a call.

    Args:
        fun: If `is_loss`, a loss: it returns a scalar, or `(scalar, aux)` if `has_aux`. Otherwise
            any function; its step is the call with its pullback.
        arguments: What it is called with, arrays or `ShapeDtypeStruct`s.

    Raises:
        UnsupportedProgramError: What `call_flat`, `check_loss` and `trace_flat` refuse.
        UnsupportedConfigError: `jax_remat3` is on.
    """
    made: list[Results] = []

    def check(result: Any) -> None:
        if is_loss:
            check_loss(fun, result, has_aux)

    def flat(*values: Any) -> list[Any]:
        outputs, results = call_flat(
            fun, arguments, values, check=check, num_kept=int(is_loss), hands_on=is_loss
        )
        made.append(results)
        return outputs

    as_fun = functools.partial(make_jaxpr, fun, flat, arguments.traced_leaves)
    program, closed_over = trace_flat(as_fun, arguments.inputs, is_loss=is_loss)
    (results,) = made
    unchanged = _handed_on(program, results.changed_outputs, len(arguments.inputs))
    if unchanged:
        program, results = program.without_outputs(unchanged), results.reading(unchanged)
    return TracedCall(fun, program, arguments, closed_over, results)


def _handed_on(program: Program, outputs: Sequence[int], num_inputs: int) -> dict[int, int]:
    """Those of some outputs that are inputs, the first `num_inputs` alone, with the inputs: a
    checkpoint or another wrapper hands them on as they are, as `nnx.remat` does with parameters."""
    if not outputs:
        return {}
    jaxpr = open_jaxpr(program.jaxpr)
    flat = flatten_jaxpr(jaxpr)
    inputs = flat.inputs[len(jaxpr.constvars) :][:num_inputs]
    which: dict[int | None, int] = {value: position for position, value in enumerate(inputs)}
    return {j: which[flat.outputs[j]] for j in outputs if flat.outputs[j] in which}


def refuse_closed_over(call: TracedCall) -> None:
    """Refuse closed-over tracers where a program must stand alone.

    Raises:
        UnsupportedProgramError: The function closes over values that are traced outside it.
    """
    if call.closed_over:
        raise UnsupportedProgramError(
            f"`{name_of(call.fun)}` closes over arrays that are being traced outside it, which "
            f"cannot be part of a program of its own. Pass them as arguments"
        )


def positions_among(args: Sequence[Any], argnums: Sequence[int]) -> tuple[int, ...]:
    """The positions that `argnums` names, none of them negative.

    Raises:
        UnsupportedProgramError: There are fewer arguments.
    """
    for position in argnums:
        if not -len(args) <= position < len(args):
            raise UnsupportedProgramError(
                f"`argnums` names argument {position}, but the function was given {len(args)} "
                f"positional arguments; differentiated arguments must be passed by position. "
                f"Where no gradient is taken, call the function without a plan"
            )
    return tuple(p % len(args) for p in argnums)


def check_loss(fun: Callable[..., Any], result: Any, has_aux: bool) -> None:
    """Refuse what is not the result of a loss.

    Raises:
        UnsupportedProgramError: The result is not a real floating scalar or, if `has_aux`, not a
            pair of such a scalar and `aux`.
    """
    name = name_of(fun)
    shown = jax.tree.structure(result)
    if has_aux:
        pair = isinstance(result, (tuple, list)) and len(result) == 2
        if not pair or not _is_one_value(result[0]):
            raise UnsupportedProgramError(
                f"`has_aux=True` needs `{name}` to return a pair `(loss, aux)`; it returned {shown}"
            )
        result = result[0]
    elif not _is_one_value(result):
        raise UnsupportedProgramError(
            f"`{name}` must return one scalar loss; it returned {shown}. Use `has_aux=True` if it "
            f"returns `(loss, aux)`"
        )
    (loss,) = jax.tree.leaves(result)
    shape, dtype = jnp.shape(loss), jnp.result_type(loss)
    if shape != () or not jnp.issubdtype(dtype, np.floating):
        raise UnsupportedProgramError(
            f"`{name}` must return a real floating scalar; it returned {dtype}{list(shape)}. "
            f"Reduce it, for instance with `.mean()`"
        )


def _is_one_value(result: Any) -> bool:
    """Whether it may be a loss: JAX does not differentiate a container of one either."""
    is_container = isinstance(result, (dict, list, tuple))
    return not is_container and jax.tree.structure(result).num_leaves == 1


def name_of(fun: Any) -> str:
    """The name of a function in messages."""
    return getattr(fun, "__name__", type(fun).__name__)


def is_array(value: Any) -> bool:
    """Whether a leaf is an array, which is always traced."""
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        return True
    if not isinstance(value, (np.ndarray, np.generic)):
        return False
    # Strings, dates, objects and the gradients of integers are not JAX arrays.
    return value.dtype.kind not in "OSUMm" and value.dtype != jax.dtypes.float0


def is_number(value: Any) -> bool:
    """Whether it is a Python number other than a flag."""
    return is_scalar(value) and not isinstance(value, bool)


def is_scalar(value: Any) -> bool:
    """Whether it is a Python number or flag, and not a member of an enumeration."""
    return isinstance(value, (bool, int, float, complex)) and not isinstance(value, enum.Enum)


def _is_output(value: Any) -> bool:
    return is_array(value) or is_scalar(value)


def _as_jax(value: Any) -> Any:
    return value if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)) else jnp.asarray(value)


def _check_containers(name: str, args: Any, kwargs: Any, given: set[int]) -> None:
    """Refuse arrays put into containers: the function has copies, so they would be lost."""
    for leaf in _contents((args, kwargs)):
        if isinstance(leaf.value, Tracer) and id(leaf.value) not in given:
            raise UnsupportedProgramError(
                f"`{name}` puts an array into its argument at `{input_name(leaf)}`, a container "
                f"of which it has a copy, so the caller would not see it. Return it, or keep it "
                f"in an `nnx.Variable`"
            )


def _contents(tree: Any) -> Iterator[Leaf]:
    """What is in the containers of a tree; nothing of NNX objects, nor of a node that was used up:
    Equinox's `State` cannot be flattened once there is a newer one."""

    def is_container(node: Any) -> bool:
        return isinstance(node, (dict, list, tuple))

    flatten_with_path = jax.tree_util.tree_flatten_with_path
    for path, node in flatten_with_path(tree, is_leaf=lambda node: not is_container(node))[0]:
        if is_object(node):
            continue
        try:
            leaves, _ = flatten_with_path(node, is_leaf=is_object)
        except ValueError:
            continue
        for within, value in leaves:
            yield Leaf((*path, *within), (), value, None)


def _is_of(path: tuple[Any, ...], argnums: Sequence[int]) -> bool:
    return path[0].idx == 0 and path[1].idx in argnums


def input_name(leaf: Leaf) -> str:
    """A readable path of a leaf of `(args, kwargs)`; it starts with 0 for args, 1 for kwargs."""
    kind = "args" if leaf.path[0].idx == 0 else "kwargs"
    return kind + leaf.name[len("[0]") :]
