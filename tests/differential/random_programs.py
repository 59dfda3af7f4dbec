"""Programs drawn at random, under trees of regions drawn at random, and planned.

As a script: `PYTHONPATH=.:tests python -m differential.random_programs --count 1000 --seconds 600`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from random_plans import WIDTH, loop_losses, losses, region_trees
from tracing import emit, loss_call

from differential.check import assert_same, check_case
from differential.operations import OPERATIONS
from differential.program import Loss, Setting, normal
from jax_hremat._emit.step import own_step
from jax_hremat._xla.certify import StepCompiler
from jax_hremat._xla.target import get_target

ROWS = 16
# Programs are drawn in so many at a time, each time from another seed.
_AT_A_TIME = 25
# Of so many programs, one is planned at three budgets; all are run under random regions.
_PLANNED_EVERY = 10


@jax.custom_vjp
def _clipped(v: Any) -> Any:
    return jnp.sin(v)


_clipped.defvjp(
    lambda v: (jnp.sin(v), (jnp.cos(v), v)),
    lambda kept, g: (jnp.clip(g * kept[0], -0.3, 0.3) + 0.0 * kept[1],),
)


@jax.custom_jvp
def _soft(v: Any) -> Any:
    return jnp.log1p(jnp.exp(v))


_soft.defjvp(lambda p, t: (_soft(*p), 0.9 * jax.nn.sigmoid(p[0]) * t[0]))

State = tuple[jax.Array, jax.Array, Any]  # Rows, their key, what is noted.
Layer = Callable[[State, jax.Array], State]


def _apply(function: Callable[[Any, Any], Any]) -> Layer:
    return lambda state, w: (function(state[0], w), *state[1:])


def _dropout(state: State, w: Any) -> State:
    x, key, noted = state
    key, one = jax.random.split(key)
    return jnp.where(jax.random.bernoulli(one, 0.7, x.shape), jnp.tanh(x @ w), x), key, noted


def _noise(state: State, w: Any) -> State:
    x, key, noted = state
    noise = jax.random.normal(jax.random.fold_in(key, 3), x.shape)
    return x + 0.1 * noise @ w, key, noted + noise.sum()


def _count(state: State, w: Any) -> State:
    x, key, noted = state
    high = (x > 0.5).sum()
    return x * (1 + 0.01 * high), key, noted + high.astype(noted.dtype)


def _winners(x: Any, w: Any) -> Any:
    y = x @ w
    return jnp.where(y == y.max(-1, keepdims=True), y * y, x)


def _top(x: Any, w: Any) -> Any:
    y = x @ w
    return jnp.where(y >= lax.top_k(y, 2)[0][:, -1:], jnp.sin(y), x)


def _while(x: Any, w: Any) -> Any:
    size = lax.stop_gradient(jnp.abs(x @ w).sum())
    return jnp.tanh(x) * lax.while_loop(lambda s: s > 1.0, lambda s: s / 2, size)


def _half(x: Any, w: Any) -> Any:
    return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(x.dtype) * 0.5


_SIMPLE: dict[str, Layer] = {
    "dense": _apply(lambda x, w: jnp.tanh(x @ w)),
    "residual": _apply(lambda x, w: x + jax.nn.gelu(x @ w)),
    "softmax": _apply(lambda x, w: jax.nn.softmax(x @ w) * x),
    "norm": _apply(lambda x, w: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var() + 1.0)),
    "vjp": _apply(lambda x, w: _clipped(_clipped(x) @ w)),
    "jvp": _apply(lambda x, w: _soft(x @ w) - 0.7),
    "clip": _apply(lambda x, w: jnp.clip(x @ w, -1, 1) + lax.stop_gradient(x)),
    "max": _apply(lambda x, w: jnp.maximum(x @ w, x) - x.max(0)),
    "winners": _apply(_winners),
    "top": _apply(_top),
    "sums": _apply(lambda x, w: jnp.cumsum(x, 0) * 0.1 @ w),
    "sort": _apply(lambda x, w: jnp.sort(x @ w, axis=0)),
    "gather": _apply(lambda x, w: x[jnp.arange(ROWS) * 5 % ROWS].at[2].add(x[0] @ w)),
    "while": _apply(_while),
    "half": _apply(_half),
    "complex": _apply(lambda x, w: jnp.real(jnp.exp(1j * (x @ w)) * x)),
    "slope": _apply(lambda x, w: jax.grad(lambda v: jnp.cos(v @ w).sum())(x)),
    "own": _apply(jax.checkpoint(lambda x, w: jnp.sin(jnp.tanh(x @ w)))),
    "jit": _apply(jax.jit(lambda x, w: jnp.exp(-((x @ w) ** 2)))),
    "vmap": _apply(lambda x, w: jax.vmap(lambda row: jnp.tanh(w @ row) * row.sum())(x)),
    "dropout": _dropout,
    "noise": _noise,
    "count": _count,
    **{name: _apply(function) for name, function in OPERATIONS.items()},
}


@st.composite
def layers(draw: st.DrawFn, depth: int = 2) -> Layer:
    """One step of a program, or a loop over steps or a choice of them."""
    bodies = ["scan", "cond", "switch", "map", "checkpoint"] if depth else []
    kind = draw(st.sampled_from([*_SIMPLE, *bodies, *bodies]))
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    inner = [draw(layers(depth - 1)) for _ in range(draw(st.integers(1, 3)))]
    if kind == "scan":
        return _scan(draw, inner)
    if kind == "map":
        return _apply(lambda x, w: lax.map(lambda row: jnp.tanh(row @ w) * row, x))
    if kind == "checkpoint":
        return jax.checkpoint(lambda state, w: _run(inner, state, w))
    if kind == "cond":
        other = draw(layers(0))

        def branch(state: State, w: Any) -> State:
            # Not 0, near which a sum of values of mean zero lies: two compilations of the same
            # function would choose different branches.
            return lax.cond(state[0].sum() > 0.37, lambda s: _run(inner, s, w),
                            lambda s: other(s, w), state)  # fmt: skip

        return branch

    def chosen(state: State, w: Any) -> State:
        index = (jnp.abs(state[0][0, 0]) * 10).astype(jnp.int32) % len(inner)
        return lax.switch(index, [lambda s, one=one: one(s, w) for one in inner], state)

    return chosen


def _scan(draw: st.DrawFn, inner: list[Layer]) -> Layer:
    length = draw(st.integers(0, 5))
    flags: dict[str, Any] = {"reverse": draw(st.booleans())}
    if length:
        flags["unroll"] = draw(st.sampled_from([1, 1, 2, 3, True]))
    with_inputs, stacked = draw(st.booleans()), draw(st.booleans())

    def loop(state: State, w: Any) -> State:
        def body(carry: State, scale: Any) -> Any:
            x, key, noted = _run(inner, carry, w)
            x = 0.5 * x * (1 if scale is None else scale) + 0.5 * carry[0]
            return (x, key, noted), (x.mean() if stacked else None)

        scales = jnp.linspace(0.5, 1.0, length) if with_inputs else None
        (x, key, noted), means = lax.scan(body, state, scales, length=length, **flags)
        return (x if means is None else x + means.sum()), key, noted

    return loop


def _run(inner: list[Layer], state: State, w: Any) -> State:
    for layer in inner:
        state = layer(state, w)
    return state


@st.composite
def cases(draw: st.DrawFn) -> Loss:
    """A program and its data."""
    if draw(st.integers(0, 4)) == 0:
        loss = draw(st.one_of(losses(), loop_losses()))
        return Loss(loss, (normal(WIDTH, WIDTH), normal(WIDTH, WIDTH, seed=1)), tolerance=1e-3)
    steps = draw(st.lists(layers(), min_size=1, max_size=5))

    def loss(ws: Any, x: Any, key: Any) -> Any:
        state = (x, key, jnp.float32(0.0))
        for i, step in enumerate(steps):
            state = step(state, ws[i % len(ws)])
        x, key, noted = state
        return (x * jnp.cos(x)).mean(), {"key": key, "noted": noted, "last": x}

    args = (list(normal(2, WIDTH, WIDTH)), normal(ROWS, WIDTH), jax.random.key(5))
    # Of half precision among other operations, a fusion more or less is seen.
    return Loss(loss, args, argnums=draw(st.sampled_from([0, 1, (0, 1)])), has_aux=True,
                tolerance=3e-2)  # fmt: skip


@dataclass
class Tally:
    """How much was tried."""

    programs: int = 0
    plans: int = 0

    def __str__(self) -> str:
        return f"{self.programs} programs, {self.plans} plans"


def check_under_regions(case: Loss, draw: st.DrawFn, count: int = 2) -> int:
    """Any tree of regions leaves value, gradients and auxiliary outputs as they are; where a fault
    of XLA does not, it is found, and barriers keep it away (`_xla/hlo/overwrites.py`)."""
    call = loss_call(
        case.fun, case.args, dict(case.kwargs), argnums=case.argnums, has_aux=case.has_aux
    )
    setting = Setting.make()
    expected = case.run(None, setting).seen
    for _ in range(count):
        root = draw(region_trees(call.program))
        try:
            assert_same(case.run(emit(call, root), setting).seen, expected, case.tolerance)
        except AssertionError:
            compile_whole = StepCompiler(own_step(call.program), get_target("cpu"))
            safe, step = compile_whole.without_overwriting(root)
            if safe == root:
                raise
            assert not step.overwrites
            assert_same(case.run(emit(call, safe), setting).seen, expected, case.tolerance)
    return count


def check_random(
    count: int, seconds: float = float("inf"), seed: int = 0, planned_every: int = _PLANNED_EVERY
) -> Tally:
    """Draw programs until there were so many, or the time is up, which is looked at now and then.

    Raises:
        AssertionError: A program is not the same; the smallest such is printed.
    """
    tally, end_s = Tally(), time.monotonic() + seconds

    def check(data: st.DataObject) -> None:
        case = data.draw(cases())
        tally.programs += 1
        tally.plans += check_under_regions(case, data.draw)
        if planned_every and tally.programs % planned_every == 0:
            tally.plans += check_case(case, Setting.make())

    while tally.programs < count and time.monotonic() < end_s:
        run = given(st.data())(check)
        run = settings(
            max_examples=min(_AT_A_TIME, count - tally.programs),
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        )(run)
        hypothesis.seed(seed + tally.programs)(run)()
        jax.clear_caches()
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="programs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--planned-every", type=int, default=_PLANNED_EVERY)
    options = parser.parse_args()
    start_s = time.monotonic()
    tally = check_random(options.count, options.seconds, options.seed, options.planned_every)
    print(f"{tally}, nothing found, in {time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main()
