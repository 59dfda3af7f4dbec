"""Hypothesis strategies: small programs, and any tree of regions over a program."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from jax_hremat import _compat
from jax_hremat._region import Region
from jax_hremat._trace import Program

WIDTH = 4

_UNARY = {
    "sin": jnp.sin,
    "exp": lambda v: jnp.exp(-v * v),
    "tanh": jnp.tanh,
    "norm": lambda v: (v - v.mean(-1, keepdims=True)) * jax.lax.rsqrt(v.var(-1, keepdims=True) + 1),
    "relu": jax.nn.relu,
    "softmax": jax.nn.softmax,
    "transpose": jnp.transpose,
}
_BINARY = {"mul": jnp.multiply, "add": jnp.add, "matmul": jnp.matmul}


@st.composite
def losses(draw: st.DrawFn) -> Any:
    """A scalar function of two matrices: a chain with skips, fan-out and shared weights."""
    steps = []
    for count in range(2, 2 + draw(st.integers(1, 7))):
        kind = draw(st.sampled_from([*_UNARY, *_BINARY]))
        # Mostly the newest value, so that the program is a chain with skips.
        newest = st.just(count - 1)
        operand = newest | st.integers(0, count - 1)
        steps.append((kind, draw(newest if kind in _UNARY else operand), draw(operand)))

    def loss(w: Any, x: Any) -> Any:
        values = [w, x]
        for kind, a, b in steps:
            if kind in _UNARY:
                values.append(_UNARY[kind](values[a]))
            else:
                values.append(_BINARY[kind](values[a], values[b]) * 0.5)
        return (values[-1] * w).sum()

    return loss


@st.composite
def region_trees(draw: st.DrawFn, program: Program, max_depth: int = 3) -> Region:
    """Any nest of bare and wrapped regions, each wrapped one saving any values made in it."""
    equations = _compat.open_jaxpr(program.jaxpr).eqns

    def region(start: int, stop: int, depth: int) -> Region:
        wrapped = draw(st.booleans())
        made = [(op, k) for op in range(start, stop) for k in range(len(equations[op].outvars))]
        saved = draw(st.sets(st.sampled_from(made), max_size=3)) if wrapped and made else ()
        children: list[Region] = []
        if depth < max_depth and stop > start:
            edges = sorted(draw(st.sets(st.integers(start, stop), max_size=5)))
            children = [
                region(a, b, depth + 1)
                for a, b in itertools.pairwise(edges)
                if draw(st.integers(0, 3))
            ]
        return Region(start, stop, wrapped, tuple(sorted(saved)), tuple(children))

    return region(0, len(equations), 0)


# The same examples in every run, few enough for programs that are traced one by one.
QUICK = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)
