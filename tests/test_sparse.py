"""Parameters of which only some leaves are differentiated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse
from tracing import trace_loss

import jax_hremat
from jax_hremat import PlannerConfig

QUICK = PlannerConfig(cost="analytic", max_rounds=0, floor_rounds=0)
DENSE = jnp.where(jax.random.uniform(jax.random.key(0), (8, 8)) < 0.3, 1.0, 0.0)


def loss(w: sparse.BCOO, x: jax.Array) -> jax.Array:
    for _ in range(3):
        x = jnp.tanh(w @ x)
    return (x**2).sum()


def test_sparse_parameters() -> None:
    w, x = sparse.BCOO.fromdense(DENSE), jnp.ones((8, 32))
    plan = jax_hremat.plan_remat(loss, budget=1.0, target="cpu", config=QUICK)(w, x)
    planned = jax_hremat.apply_plan(loss, plan)
    value, gradient = jax.jit(sparse.value_and_grad(planned))(w, x)
    expected, expected_gradient = sparse.value_and_grad(loss)(w, x)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert isinstance(gradient, sparse.BCOO)
    np.testing.assert_allclose(gradient.data, expected_gradient.data, rtol=1e-5)
    np.testing.assert_array_equal(gradient.indices, w.indices)


def test_only_floating_leaves_are_differentiated() -> None:
    def counted(state: dict[str, jax.Array]) -> jax.Array:
        return (jnp.sin(state["w"]) * state["step"]).sum()

    state = {"step": jnp.int32(2), "w": DENSE}
    program = trace_loss(counted, [state])
    assert [program.input_names[i] for i in program.differentiated] == ["args[0]['w']"]
    plan = jax_hremat.plan_remat(counted, budget=1.0, target="cpu", config=QUICK)(state)
    planned = jax_hremat.apply_plan(counted, plan)
    gradient = jax.grad(planned, allow_int=True)(state)
    np.testing.assert_allclose(gradient["w"], 2 * jnp.cos(DENSE), rtol=1e-6)
    assert gradient["step"].dtype == jax.dtypes.float0
    # JAX refuses integers itself, where they are not allowed.
    with pytest.raises(TypeError, match="int32"):
        jax.grad(planned)(state)
