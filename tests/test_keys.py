"""Typed PRNG keys under JAX's check that no key is used twice."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import normal
from random_plans import QUICK, region_trees
from test_to_code import OPTIONS, planned_of
from tracing import trace_loss

import jax_hremat
from jax_hremat._emit.emit import emit_flat
from jax_hremat._plan.region import Region

QUICK_COMPILE = {"xla_backend_optimization_level": 0}


def folded(w: jax.Array, x: jax.Array, key: jax.Array) -> jax.Array:
    for i, weight in enumerate(w):
        x = jnp.tanh(x @ weight)
        x = x * jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
    return jnp.sum(x**2)


def split(w: jax.Array, x: jax.Array, key: jax.Array) -> jax.Array:
    for weight, own in zip(w, jax.random.split(key, len(w)), strict=True):
        first, second = jax.random.split(own)
        x = jnp.tanh(x @ weight) * jax.random.bernoulli(first, 0.9, x.shape)
        x = jnp.sin(x + jax.random.normal(second, x.shape))
    return jnp.sum(x**2)


def sliced(w: jax.Array, x: jax.Array, key: jax.Array) -> jax.Array:
    keys = jax.random.split(key, len(w))
    for i, weight in enumerate(w):
        own = jax.lax.index_in_dim(keys, i, keepdims=False)
        x = jnp.tanh(x @ weight) * jax.random.bernoulli(own, 0.9, x.shape)
    return jnp.sum(x**2)


def carried(w: jax.Array, x: jax.Array, key: jax.Array) -> jax.Array:
    def layer(carry: Any, weight: jax.Array) -> Any:
        x, key = carry
        key, own = jax.random.split(key)
        return (jnp.tanh(x @ weight) * jax.random.bernoulli(own, 0.9, x.shape), key), None

    (x, _), _ = jax.lax.scan(layer, (x, key), w)
    return jnp.sum(x**2)


def args_of(width: int, rows: int) -> tuple[Any, ...]:
    return normal(0, 3, width, width) / width**0.5, normal(1, rows, width), jax.random.key(2)


def with_checked_keys(fun: Any, width: int, rows: int) -> Any:
    *others, key = args_of(width, rows)
    with jax.debug_key_reuse(True):
        return jax.jit(fun, compiler_options=QUICK_COMPILE)(*others, jax.random.clone(key))


@functools.cache
def expected(loss: Any, width: int, rows: int) -> Any:
    return with_checked_keys(jax.value_and_grad(loss), width, rows)


def assert_same_with_checked_keys(got: Any, loss: Any, width: int, rows: int) -> None:
    values = with_checked_keys(got, width, rows), expected(loss, width, rows)
    for a, b in zip(*map(jax.tree.leaves, values), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "loss", [split, *(pytest.param(loss, marks=pytest.mark.slow) for loss in (folded, carried))]
)
@settings(QUICK, max_examples=examples(10))
@given(st.data())
def test_no_region_is_a_second_use_of_a_key(loss: Any, data: Any) -> None:
    args = args_of(4, 3)
    program = trace_loss(loss, args)
    step = program.step(emit_flat(program, data.draw(region_trees(program, max_depth=2))))
    assert_same_with_checked_keys(lambda *args: step(*jax.tree.leaves(args)), loss, 4, 3)


def test_some_of_the_keys_that_leave_a_region_were_used_in_it() -> None:
    args = args_of(4, 3)
    program = trace_loss(sliced, args)
    primitives = [eqn.primitive.name for eqn in program.jaxpr.jaxpr.eqns]
    first, last = primitives.index("random_split"), primitives.index("slice")
    region = Region(first, last + 1, checkpointed=True)
    root = Region(0, program.num_operations, children=(region,))
    step = program.step(emit_flat(program, root))
    assert_same_with_checked_keys(lambda *args: step(*jax.tree.leaves(args)), sliced, 4, 3)


@pytest.mark.parametrize("loss", [folded, pytest.param(carried, marks=pytest.mark.slow)])
def test_planning_with_the_check(loss: Any) -> None:
    args = args_of(64, 512)
    plan = jax_hremat.plan_remat(loss, budget=0.9, **OPTIONS)(*args)
    with jax.debug_key_reuse(True):
        assert jax_hremat.plan_remat(loss, budget=0.9, **OPTIONS)(*args).root == plan.root
    assert plan.root.num_checkpointed
    for planned in (jax_hremat.apply_plan(loss, plan), planned_of(plan)(loss)):
        assert_same_with_checked_keys(jax.value_and_grad(planned), loss, 64, 512)
