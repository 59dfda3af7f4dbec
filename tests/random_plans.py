"""Hypothesis strategies: small programs, and any tree of regions over a program."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from drawing import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from jax_hremat._jax.jaxprs import open_jaxpr
from jax_hremat._plan.region import Loop, Region
from jax_hremat._trace.bodies import branch_bodies, scan_body
from jax_hremat._trace.rules import active_variables, are_in
from jax_hremat._trace.trace import Program

WIDTH = 4

# Operations that can be run in other modes.
BODIES = ("scan", "cond")

_UNARY = {
    "sin": jnp.sin,
    "exp": lambda v: jnp.exp(-v * v),
    "tanh": jnp.tanh,
    "norm": lambda v: (v - v.mean(-1, keepdims=True)) * jax.lax.rsqrt(v.var(-1, keepdims=True) + 1),
    "relu": jax.nn.relu,
    "softmax": jax.nn.softmax,
    "transpose": jnp.transpose,
    "pool": lambda v: jax.lax.reduce_window(v, -jnp.inf, jax.lax.max, (2, 2), (1, 1), "SAME"),
    "turn": lambda v: jnp.real(jnp.exp(1j * v) * (v + 1j)),
}
# Not emitted in a checkpointed region as they are, so that more operations come of them.
_REWRITTEN = ("pool", "turn")
_BINARY = {"mul": jnp.multiply, "add": jnp.add, "matmul": jnp.matmul}


@st.composite
def losses(draw: st.DrawFn, *, rewritten: bool = True, sizes: tuple[int, int] = (1, 7)) -> Any:
    """A scalar function of two matrices: a chain with skips, fan-out and shared weights, of so many
    steps."""
    steps = []
    kinds = [k for k in (*_UNARY, *_BINARY) if rewritten or k not in _REWRITTEN]
    for count in range(2, 2 + draw(st.integers(*sizes))):
        kind = draw(st.sampled_from(kinds))
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
def loop_losses(draw: st.DrawFn) -> Any:
    """A scalar function of two matrices with scans, branches and skips between plain steps."""
    kinds = ["scan", "nested", "cond", "tanh", "matmul"]
    steps = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3))
    steps.insert(draw(st.integers(0, len(steps))), "scan")
    length, reverse = draw(st.integers(2, 7)), draw(st.booleans())

    def loss(w: Any, x: Any) -> Any:
        def step(h: Any, scale: Any) -> Any:
            h = jnp.tanh(h @ w) * scale + 0.1 * h
            return h, jnp.sin(h).sum()

        def outer(h: Any, scale: Any) -> Any:
            h, sums = jax.lax.scan(step, h, scale * jnp.arange(1.0, 4.0))
            return h * 0.5, sums.sum()

        scales = jnp.linspace(0.5, 1.0, length)
        first = skip = x
        total = 0.0
        for kind in steps:
            if kind in ("scan", "nested"):
                body = step if kind == "scan" else outer
                x, sums = jax.lax.scan(body, x, scales, reverse=reverse)
                total = total + (sums * scales).sum()
            elif kind == "cond":
                x = jax.lax.cond(x.sum() > 0, lambda v: jnp.cos(v @ w) @ w, lambda v: v * v, x)
            elif kind == "tanh":
                x = jnp.tanh(x) + skip
            else:
                x = x @ w * 0.3 + first
            skip = x
        return (x * w).sum() + total

    return loss


@st.composite
def loops(draw: st.DrawFn, eqn: Any, moving: list[bool], depth: int) -> Loop:
    """Any way to run a scan."""
    lengths = st.integers(1, eqn.params["length"] + 1)
    segments = sorted(draw(st.sets(lengths, max_size=2)), reverse=True)
    return Loop(draw(region_trees(scan_body(eqn, moving), depth)), tuple(segments))


@st.composite
def region_trees(
    draw: st.DrawFn, program: Program, max_depth: int = 3, *, in_loops: bool = True
) -> Region:
    """Any nest of plain and checkpointed regions, each of which saves any values made in it; any
    scan or cond with regions of its own, if `in_loops`."""
    jaxpr = open_jaxpr(program.jaxpr)
    equations = jaxpr.eqns
    moved = active_variables(jaxpr, program.moving)

    def region(start: int, stop: int, depth: int) -> Region:
        checkpointed = draw(st.booleans())
        made = [(op, k) for op in range(start, stop) for k in range(len(equations[op].outvars))]
        saved = draw(st.sets(st.sampled_from(made), max_size=3)) if checkpointed and made else ()
        children: list[Region] = []
        alone = equations[start].primitive.name if stop - start == 1 else ""
        if in_loops and alone in BODIES and not checkpointed and draw(st.booleans()):
            eqn = equations[start]
            moving = are_in(moved, eqn.invars)
            if alone == "scan":
                return Region(start, stop, loop=draw(loops(eqn, moving, max_depth - 1)))
            bodies = branch_bodies(eqn, moving)
            trees = [draw(region_trees(body, max_depth - 1)) for body in bodies]
            return Region(start, stop, branches=tuple(trees))
        if depth < max_depth and stop > start:
            edges = draw(st.sets(st.integers(start, stop), max_size=5))
            for i in range(start, stop):
                if equations[i].primitive.name in BODIES and draw(st.booleans()):
                    edges |= {i, i + 1}
            edges = sorted(edges)
            children = [
                region(a, b, depth + 1)
                for a, b in itertools.pairwise(edges)
                if draw(st.integers(0, 3))
            ]
        barrier = depth > 0 and draw(st.booleans())
        late = depth > 0 and draw(st.booleans())
        return Region(
            start,
            stop,
            checkpointed,
            tuple(sorted(saved)),
            tuple(children),
            barrier=barrier,
            late_arguments=late,
        )

    return region(0, len(equations), 0)


# The same examples in every run, few enough for programs that are traced one by one.
QUICK = settings(
    max_examples=examples(25),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)
