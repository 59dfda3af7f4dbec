"""Jaxpr -> its equations as lowering sees them: every wrapper inlined, no dead code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jax_hremat._jax.checkpoints import lowers_to_barrier
from jax_hremat._jax.custom_rules import DETACH
from jax_hremat._jax.jaxprs import (
    Literal,
    inner_jaxprs,
    open_jaxpr,
    without_dead_code,
    wrapped_body,
)
from jax_hremat._jax.scopes import scope_name
from jax_hremat._jax.sizes import size_bytes_of


@dataclass(frozen=True, slots=True)
class Equation:
    """One equation of the flat step, the values it reads (None: a literal) and makes, its scope."""

    eqn: Any
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    path: str


@dataclass(frozen=True, slots=True)
class Flat:
    """A jaxpr with all wrappers inlined and no dead code; values are numbered, literals None."""

    equations: tuple[Equation, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    output_bytes: int
    sizes_bytes: Mapping[int, int]
    num_barriers: int


def flatten(jaxpr: Any) -> Flat:
    """Inline every wrapper; equations that only rename a value (a barrier, a name) are dropped."""
    jaxpr = without_dead_code(jaxpr)
    sizes_bytes: dict[int, int] = {}
    found: list[Equation] = []
    num_barriers = 0

    def new(var: Any) -> int:
        sizes_bytes[len(sizes_bytes)] = size_bytes_of(var.aval)
        return len(sizes_bytes) - 1

    inputs = tuple(new(v) for v in (*jaxpr.constvars, *jaxpr.invars))

    def walk(jaxpr: Any, inputs: Iterable[int | None], prefix: str) -> list[int | None]:
        nonlocal num_barriers
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

        def read(atoms: Sequence[Any]) -> list[int | None]:
            return [None if isinstance(v, Literal) else env[v] for v in atoms]

        for eqn in jaxpr.eqns:
            read_here = read(eqn.invars)
            path = f"{prefix}{scope_name(eqn)}/"
            num_barriers += lowers_to_barrier(eqn)
            body = wrapped_body(eqn)
            if body is not None:
                consts = [new(v) for v in open_jaxpr(body).constvars]
                made = walk(open_jaxpr(body), [*consts, *read_here], path)
            elif _renames(eqn):
                made = read_here
            else:
                fresh = tuple(new(v) for v in eqn.outvars)
                found.append(Equation(eqn, tuple(read_here), fresh, path))
                made = list(fresh)
            env.update(zip(eqn.outvars, made, strict=True))
        return read(jaxpr.outvars)

    outputs = tuple(walk(jaxpr, inputs, ""))
    return Flat(
        equations=tuple(_live(found, outputs)),
        inputs=inputs,
        outputs=outputs,
        output_bytes=sum(size_bytes_of(v.aval) for v in jaxpr.outvars),
        sizes_bytes=sizes_bytes,
        num_barriers=num_barriers,
    )


def _renames(eqn: Any) -> bool:
    """Whether the equation's results are its inputs under another name."""
    if eqn.primitive.name == "reduce_precision":
        info = jnp.finfo(eqn.invars[0].aval.dtype)
        return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (info.nexp, info.nmant)
    return eqn.primitive.name in ("optimization_barrier", "hremat_barrier", "name", DETACH)


def _live(equations: Sequence[Equation], outputs: Iterable[int | None]) -> list[Equation]:
    needed: set[int | None] = set(outputs)
    kept = []
    for equation in reversed(equations):
        if equation.eqn.effects or not needed.isdisjoint(equation.outputs):
            needed.update(equation.inputs)
            kept.append(equation)
    return kept[::-1]


def live_bytes(
    equations: Sequence[Equation],
    sizes_bytes: Mapping[int, int],
    uncounted: Set[int | None],
    kept_to_the_end: Iterable[int | None] = (),
) -> list[int]:
    """Live bytes at each equation; a value lives from its producer to its last reader.

    Args:
        equations: In order.
        sizes_bytes: Size of each value.
        uncounted: Values that are not counted.
        kept_to_the_end: Values that live to the last equation.
    """
    last = {v: i for i, e in enumerate(equations) for v in (*e.inputs, *e.outputs)}
    last.update(dict.fromkeys(kept_to_the_end, len(equations) - 1))
    dying: list[int] = [0] * len(equations)
    live, sizes = 0, []
    for index, equation in enumerate(equations):
        for value in equation.outputs:
            if value not in uncounted:
                live += sizes_bytes[value]
                dying[last[value]] += sizes_bytes[value]
        sizes.append(live + _body_bytes(equation.eqn))
        live -= dying[index]
    return sizes


def _body_bytes(eqn: Any) -> int:
    """Peak bytes of the values that the body of a loop or branch computes."""
    if eqn.primitive.name not in ("scan", "while", "cond"):
        return 0
    peaks = []
    for body in inner_jaxprs(eqn):
        flat = flatten(open_jaxpr(body))
        kept = set(flat.outputs).difference(flat.inputs)
        peaks += live_bytes(flat.equations, flat.sizes_bytes, set(flat.inputs), kept)
    return max(peaks, default=0)
