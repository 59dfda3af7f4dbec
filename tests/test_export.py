"""`jax.export` of planned functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jax_hremat
from jax_hremat import PlannerConfig, UnsupportedProgramError

QUICK = PlannerConfig(cost="analytic", max_rounds=0, floor_rounds=0)


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(3):
        x = jnp.tanh(jnp.sin(x) @ w)
    return (x**2).mean()


W, X = jnp.eye(8) / 2, jnp.ones((256, 8))


def test_symbolic_shapes_are_refused_by_name() -> None:
    (batch,) = export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((2 * batch, 8), "float32")
    planned = jax_hremat.hremat(loss, budget=1.0, target="cpu")
    with pytest.raises(UnsupportedProgramError, match=r"dimension 0 of `args\[1\]`.*2\*batch.*8"):
        export.export(jax.jit(planned))(W, x)


def test_a_planned_step_is_exported_at_its_shapes() -> None:
    plan = jax_hremat.plan_remat(loss, max_slowdown=10.0, target="cpu", config=QUICK)(W, X)
    assert plan.root.num_checkpointed
    planned = jax_hremat.apply_plan(loss, plan)
    step = jax.value_and_grad(loss)
    exported = export.export(jax.jit(jax.value_and_grad(planned)))(W, X)
    for a, b in zip(exported.call(W, X), step(W, X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    # Its recompute is in what is exported, with a barrier or what stands in its place on the CPU.
    module = exported.mlir_module()
    assert "optimization_barrier" in module or 'inlineable = "false"' in module
    with_rule = export.export(jax.jit(planned))(W, X)
    assert with_rule.has_vjp()
    np.testing.assert_allclose(jax.grad(with_rule.call)(W, X), step(W, X)[1], rtol=1e-5)
