"""Texts and keys for what equations do, equal where they do the same."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import jax
from jax._src import core, linear_util, source_info_util, tree_util
from jax._src.interpreters import partial_eval as partial_eval_internals
from jax.sharding import AbstractMesh, Mesh

from jax_hremat._jax.jaxprs import Literal, inner_equations, is_jaxpr, open_jaxpr
from jax_hremat._shared.functions import describe_function, is_function

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


# A set in the `str` of another object.
_SET = re.compile(r"\{([^{}:]*)\}")


def _sorted_set(found: re.Match[str]) -> str:
    return "{" + ", ".join(sorted(found[1].split(", "))) + "}"


# Derivative rules and their data. JAX makes new functions of them at every use, so equations are
# described by the result of differentiating them instead.
_RULES = frozenset({"fwd_jaxpr_thunk", "bwd", "out_trees", "jvp_jaxpr_fun"})


def describe_param(value: Any) -> str:
    """A text for an equation's parameter that is the same in every process."""
    if is_jaxpr(value):
        return describe_jaxpr(value)
    if isinstance(value, (core.DebugInfo, source_info_util.SourceInfo)):
        return ""
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(describe_param(v) for v in value) + ")"
    if isinstance(value, (set, frozenset)):
        return "{" + ",".join(sorted(map(describe_param, value))) + "}"
    if isinstance(value, Mapping):
        items = sorted(f"{describe_param(k)}:{describe_param(v)}" for k, v in value.items())
        return "{" + ",".join(items) + "}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, jax.Array):
        return f"{value.dtype}{list(value.shape)}"
    if is_function(value):
        return describe_function(value)
    if dataclasses.is_dataclass(value):
        fields = (getattr(value, f.name) for f in dataclasses.fields(value))
        return f"{type(value).__qualname__}({','.join(map(describe_param, fields))})"
    if callable(value):
        return f"<{type(value).__name__}>"
    return _SET.sub(_sorted_set, _ADDRESS.sub("", str(value)))


def functions_key(eqn: Any) -> tuple[Any, ...]:
    """A key for the functions that, besides its jaxprs, decide what the equation does; empty if
    there are none. Equal keys mean equal behaviour as long as the equations exist."""
    own = tuple(_identity(v) for k, v in eqn.params.items() if k != "out_trees" and _is_code(v))
    if own:
        return own
    inside = any(functions_key(inner) for inner in inner_equations(eqn))
    return (id(eqn),) if inside else ()


def equation_key(eqn: Any) -> tuple[Any, ...]:
    """A key for an equation without its variables. Equations with equal keys do the same, and have
    the same derivatives, as long as they exist."""
    literals = [str(v.val) if isinstance(v, Literal) else None for v in eqn.invars]
    avals = (v.aval for v in (*eqn.invars, *eqn.outvars))
    own = eqn.primitive, describe_params(eqn.params), functions_key(eqn)
    return (*own, *literals, *avals)


def _is_code(value: Any) -> bool:
    return isinstance(value, linear_util.WrappedFun) or (
        callable(value) and not isinstance(value, (type, Mesh, AbstractMesh))
    )


_MEMOIZED = partial_eval_internals._memoize(lambda: None).__code__


_BY_VALUE = (int, float, str, bytes, type(None), type, tree_util.PyTreeDef, core.AbstractValue)


def _identity(value: Any, outer: tuple[int, ...] = ()) -> Any:
    """A key that is equal for functions with the same code and closed-over values. JAX wraps a rule
    in new functions at each use, all with the same code."""

    def inner(part: Any) -> Any:
        return _identity(part, (*outer, id(value)))

    if isinstance(value, _BY_VALUE):
        return value
    if id(value) in outer:
        return ("again", outer.index(id(value)))
    if isinstance(value, (tuple, list)):
        return tuple(map(inner, value))
    if isinstance(value, (linear_util.Store, linear_util.EqualStore, linear_util.DebugInfo)):
        return type(value)  # State left by an earlier run.
    if isinstance(value, linear_util.WrappedFun):
        return ("wrapped", inner(value.f), inner(value.transforms))
    if isinstance(value, FunctionType) and value.__closure__:
        cells = zip(value.__code__.co_freevars, value.__closure__, strict=True)
        if value.__code__ is _MEMOIZED:
            cells = ((name, cell) for name, cell in cells if name == "fn")
        closed_over = (inner(content) for _, cell in cells for content in _contents(cell))
        defaults = inner((value.__defaults__, tuple((value.__kwdefaults__ or {}).items())))
        return (id(value.__code__), id(value.__globals__), defaults, *closed_over)
    return ("id", id(value))


def _contents(cell: Any) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # The cell is still empty.
        return ()


def describe_jaxpr(jaxpr: Any) -> str:
    """A text for a nested jaxpr that does not depend on the names JAX gave its variables."""
    jaxpr = open_jaxpr(jaxpr)
    ids: dict[Any, int] = {}

    def name(atom: Any) -> str:
        if isinstance(atom, Literal):
            return f"{atom.val}:{atom.aval.str_short()}"
        return f"%{ids.setdefault(atom, len(ids))}:{atom.aval.str_short()}"

    head = ",".join(name(v) for v in (*jaxpr.constvars, *jaxpr.invars))
    body = ";".join(
        f"{','.join(name(v) for v in eqn.outvars)}={eqn.primitive.name}"
        f"[{describe_params(eqn.params)}]({','.join(name(v) for v in eqn.invars)})"
        for eqn in jaxpr.eqns
    )
    return f"({head}){{{body}}}->({','.join(name(v) for v in jaxpr.outvars)})"


def describe_params(params: Mapping[str, Any]) -> str:
    """An equation's parameters, except derivative rules, as one stable text in the order of their
    names."""
    named = sorted(set(params) - _RULES)
    return ",".join(f"{k}={describe_param(params[k])}" for k in named)
