"""Jaxprs: their parts, the bodies inside their equations, and what is live in them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax._src import core
from jax.extend import core as jex_core
from jax.interpreters import partial_eval

Jaxpr = jex_core.Jaxpr


JaxprEqn = jex_core.JaxprEqn


Literal = jex_core.Literal


Var = jex_core.Var


DropVar = jex_core.DropVar


def open_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr without its constants (JAX < 0.11 has `ClosedJaxpr`, later versions do not)."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def jaxpr_consts(jaxpr: Any) -> Sequence[Any]:
    """The constants a closed jaxpr carries."""
    return getattr(jaxpr, "consts", ())


def variables(atoms: Iterable[Any]) -> list[Any]:
    """The atoms that are not literals."""
    return [v for v in atoms if not isinstance(v, Literal)]


def read(env: Mapping[Any, Any], atoms: Iterable[Any]) -> list[Any]:
    """The values of atoms, of which `env` has those of the variables."""
    return [v.val if isinstance(v, Literal) else env[v] for v in atoms]


def with_equations(jaxpr: Any, eqns: Sequence[Any]) -> Any:
    """The jaxpr, closed or open, with these equations."""
    return _closed_like(jaxpr, open_jaxpr(jaxpr).replace(eqns=list(eqns)))


def _closed_like(jaxpr: Any, inner: Any) -> Any:
    """An open jaxpr with the constants of another, if that is closed."""
    return inner if jaxpr is open_jaxpr(jaxpr) else jaxpr.replace(jaxpr=inner)


def is_jaxpr(value: Any) -> bool:
    """Whether an equation's parameter is a jaxpr, open or closed."""
    return isinstance(value, (jex_core.Jaxpr, jex_core.ClosedJaxpr))


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs among an equation's parameters: bodies of loops, branches, custom rules."""
    for param in eqn.params.values():
        items = param if isinstance(param, (tuple, list)) else (param,)
        yield from (item for item in items if is_jaxpr(item))


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of all bodies inside it."""
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for body in inner_jaxprs(eqn):
            yield from all_equations(body)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many constants and how many carried values a scan has; JAX 0.11 changed the parameters
    that hold them."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def is_symbolic(size: Any) -> bool:
    """Whether the size of a dimension is an expression (`jax.export`), not a number."""
    return core.is_symbolic_dim(size)


def inner_equations(eqn: Any) -> Iterator[Any]:
    return (e for body in inner_jaxprs(eqn) for e in open_jaxpr(body).eqns)


def without_dead_code(jaxpr: Any) -> Any:
    """The jaxpr without dead code, loop bodies included; all inputs stay."""
    return open_jaxpr(without_outputs(jaxpr, ()))


def without_outputs(jaxpr: Any, positions: Collection[int]) -> Any:
    """The jaxpr, closed or open, without some outputs and what only they need; all inputs stay."""
    inner = open_jaxpr(jaxpr)
    used = [position not in positions for position in range(len(inner.outvars))]
    live, _ = partial_eval.dce_jaxpr(inner, used, instantiate=True)
    return _closed_like(jaxpr, live)


def inputs_read(jaxpr: Any, num_outputs: int) -> Sequence[bool]:
    """Which inputs of a jaxpr its first `num_outputs` outputs depend on."""
    outputs = range(len(jaxpr.outvars))
    return partial_eval.dce_jaxpr(jaxpr, [i < num_outputs for i in outputs])[1]


# Primitives that lowering replaces by their body; `remat2` is `jax.checkpoint`.
_WRAPPERS = frozenset("jit closed_call eval_jaxpr remat2 custom_jvp_call custom_vjp_call".split())


def wrapped_body(eqn: Any) -> Any | None:
    """The body of an equation that lowering inlines, whatever its shardings, or None."""
    if eqn.primitive.name not in _WRAPPERS:
        return None
    return eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
