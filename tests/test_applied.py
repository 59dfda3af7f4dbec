"""What is said of a plan that is used on another device, or that its device is too small for."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

import jax_hremat
import jax_hremat.nnx
from jax_hremat import HRematWarning, PlannerConfig, RematPlan, SearchConfig

QUICK = PlannerConfig(
    search=SearchConfig(max_packings=1, max_saved_sets=0),
    cost="analytic",
    max_rounds=0,
)
W, X = jnp.ones((8, 8)), jnp.ones((32, 8))


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return (jnp.sin(jnp.tanh(x @ w)) ** 2).mean()


def planned(budget: Any = 1.0, **how: Any) -> RematPlan:
    how = {"target": "cpu", "config": QUICK, **how}
    return jax_hremat.plan_remat(loss, budget=budget, **how)(W, X)


def of_an_h200(plan: RematPlan) -> RematPlan:
    certificate = dataclasses.replace(plan.certificate, target="h200", platform="cuda")
    return dataclasses.replace(plan, certificate=certificate)


@pytest.mark.parametrize("differentiate", [jax.grad, jax.value_and_grad, lambda f: f])
def test_a_plan_for_another_platform_is_pointed_out_when_it_is_lowered(
    differentiate: Callable[..., Any],
) -> None:
    step = jax.jit(differentiate(jax_hremat.apply_plan(loss, of_an_h200(planned()))))
    with pytest.warns(HRematWarning, match="certified for 'h200'.*lowered for cpu") as told:
        found = step(W, X)
    assert len(told) == 1
    for a, b in zip(
        jax.tree.leaves(found), jax.tree.leaves(differentiate(loss)(W, X)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    step(W, X)  # Compiled, so nothing is said again.


def test_a_plan_for_this_platform_is_not_and_nothing_is_left_of_the_question() -> None:
    plan = planned()
    step = jax.jit(jax.value_and_grad(jax_hremat.apply_plan(loss, plan)))
    assert "hremat" not in step.lower(W, X).as_text()
    silent = dataclasses.replace(plan.certificate, target="h200", platform=None)
    old = dataclasses.replace(plan, certificate=silent)
    jax.jit(jax_hremat.apply_plan(loss, old))(W, X)


def test_it_is_the_device_a_step_is_lowered_for_that_counts() -> None:
    for_cpu, for_gpu = (
        jax.jit(jax.grad(jax_hremat.apply_plan(loss, plan))).trace(W, X)
        for plan in (planned(), of_an_h200(planned()))
    )
    for_gpu.lower(lowering_platforms=("cuda",))
    with pytest.warns(HRematWarning, match="lowered for cuda"):
        for_cpu.lower(lowering_platforms=("cuda",))
    both = jax.jit(jax_hremat.apply_plan(loss, planned()))
    export.export(both, platforms=["cpu", "cuda"])(W, X)


def test_transformations_go_through() -> None:
    ours = jax_hremat.apply_plan(loss, planned())
    xs = jnp.stack([X, 2 * X])
    np.testing.assert_allclose(
        jax.vmap(ours, (None, 0))(W, xs), jax.vmap(loss, (None, 0))(W, xs), rtol=1e-6
    )
    tangents = (W, X)
    np.testing.assert_allclose(
        jax.jvp(ours, (W, X), tangents)[1], jax.jvp(loss, (W, X), tangents)[1], rtol=1e-6
    )


def test_a_planned_nnx_loss_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax_hremat._planner import request

    original = request.plan_for
    monkeypatch.setattr(request, "plan_for", lambda *args: of_an_h200(original(*args)))
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    remat = jax_hremat.nnx.remat(
        lambda model, x: (jnp.sin(model(x)) ** 2).mean(), budget=1.0, target="cpu", config=QUICK
    )
    with pytest.warns(HRematWarning, match="'h200'"):
        nnx.jit(nnx.grad(remat))(model, X)


def small_gpu(memory_bytes: int) -> jax_hremat.Target:
    return dataclasses.replace(
        jax_hremat.get_target("h200"), name="tiny", memory_bytes=memory_bytes
    )


def test_a_step_without_buffers_is_refused_too() -> None:
    def nothing(x: jax.Array) -> jax.Array:
        return jnp.sin(jax.lax.iota(jnp.float32, 3)).sum() + 0 * x.sum()

    plan = jax_hremat.plan_remat(nothing, budget="1MiB", target="cpu")(jnp.ones((0,)))
    with pytest.raises(
        jax_hremat.InfeasibleBudgetError, match="its arguments, results and constants"
    ):
        jax_hremat.certify(nothing, plan, budget=1, target="cpu")(jnp.ones((0,)))


@pytest.mark.usefixtures("h200")
def test_a_budget_beyond_the_device_is_pointed_out() -> None:
    with pytest.warns(HRematWarning, match=r"the budget of 1.00 GiB is more than the 4.00 KiB"):
        plan = planned("1GiB", target=small_gpu(4096))
    assert plan.certificate.holds and plan.certificate.exceeds_device
    assert "more than the 4.00 KiB of one tiny" in str(plan)
    with pytest.warns(HRematWarning, match="more than the 4.00 KiB"):
        jax_hremat.certify(loss, plan, budget="1MiB", target=small_gpu(4096))(W, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        within = planned("1GiB", target=small_gpu(2**30))
    assert not within.certificate.exceeds_device and "of one" not in str(within)


def test_the_memory_of_a_cpu_is_nominal() -> None:
    plan = planned("1TiB")
    assert plan.certificate.device_bytes is None and not plan.certificate.exceeds_device


def test_the_device_goes_into_the_file_and_may_be_missing_there() -> None:
    plan = of_an_h200(planned())
    assert RematPlan.from_json(plan.to_json()) == plan
    older = plan.to_json().replace('"platform": "cuda"', '"mesh": null')
    assert RematPlan.from_json(older).certificate.platform is None
