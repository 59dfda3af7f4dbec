"""Traces functions of flat values under the names of the functions that they call.

Where Python needs the value of a traced array, as in `if x > 0`, JAX's error names the function and
the arguments that the array depends on. It knows the function by `__wrapped__`, an argument by the
signature, and a value in the argument by its place in a pytree.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jax_hremat._flax.objects import Leaf


class _Place(NamedTuple):
    """Where a value is in an argument, as JAX writes it."""

    text: str

    def __str__(self) -> str:
        return self.text


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, slots=True)
class _Argument:
    """The traced values in one argument, by their places."""

    values: dict[_Place, Any]

    def tree_flatten_with_keys(self) -> tuple[Sequence[tuple[_Place, Any]], tuple[_Place, ...]]:
        return tuple(self.values.items()), tuple(self.values)

    @classmethod
    def tree_unflatten(cls, places: tuple[_Place, ...], values: Sequence[Any]) -> _Argument:
        return cls(dict(zip(places, values, strict=True)))


def make_jaxpr(
    fun: Callable[..., Any],
    flat: Callable[..., Any],
    leaves: Sequence[Leaf],
    structs: Sequence[jax.ShapeDtypeStruct],
) -> Any:
    """`jax.make_jaxpr(flat)(*structs)`, whose errors speak of `fun` and its arguments.

    Args:
        fun: A function.
        flat: Calls it with some leaves of its arguments.
        leaves: These leaves, of `(args, kwargs)`.
        structs: Their types.
    """
    parameters = _parameters(fun, leaves)
    places: dict[str, dict[_Place, int]] = {}
    for i, leaf in enumerate(leaves):
        argument = _argument(leaf)
        parameter, inside = parameters[argument]
        place = _Place(inside + leaf.name.removeprefix(argument))
        places.setdefault(parameter, {})[place] = i
    order = [i for inside in places.values() for i in inside.values()]

    def named(*arguments: _Argument) -> Any:
        given = (value for argument in arguments for value in argument.values.values())
        values = dict(zip(order, given, strict=True))
        return flat(*(values[i] for i in range(len(leaves))))

    by_position = inspect.Parameter.POSITIONAL_ONLY
    named.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
        [inspect.Parameter(name, by_position) for name in places]
    )
    named.__wrapped__ = _in_python(fun)  # pyright: ignore[reportFunctionMemberAccess]
    return jax.make_jaxpr(named)(
        *(
            _Argument({place: structs[i] for place, i in inside.items()})
            for inside in places.values()
        )
    )


def _argument(leaf: Leaf) -> str:
    """The part of a leaf's name that says in which argument it is."""
    return jax.tree_util.keystr(leaf.path[:2])


def _parameters(fun: Callable[..., Any], leaves: Sequence[Leaf]) -> dict[str, tuple[str, str]]:
    """For each argument of `(args, kwargs)`, the parameter that takes it; and where in that, if the
    parameter takes several."""
    args = [leaf.path[1].idx for leaf in leaves if leaf.path[0].idx == 0]
    keywords = {leaf.path[1].key: _argument(leaf) for leaf in leaves if leaf.path[0].idx == 1}
    positional = [f"[0][{i}]" for i in range(max(args, default=-1) + 1)]
    try:
        signature = inspect.signature(fun)
        bound = signature.bind_partial(*positional, **keywords).arguments
    except (TypeError, ValueError):
        # One without a signature, or that is called in another way than it says.
        return {name: ("args", name.removeprefix("[0]")) for name in positional} | {
            name: ("kwargs", name.removeprefix("[1]")) for name in keywords.values()
        }
    found: dict[str, tuple[str, str]] = {}
    for parameter, given in bound.items():
        kind = signature.parameters[parameter].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            found |= {name: (parameter, f"[{k}]") for k, name in enumerate(given)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            found |= {name: (parameter, f"[{key!r}]") for key, name in given.items()}
        else:
            found[given] = parameter, ""
    return found


def _in_python(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, or the method that is called where it is no function."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return fun if hasattr(inspect.unwrap(fun), "__code__") else type(fun).__call__
