"""Named efforts: what they stand for, and that every function that plans takes one."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jax_hremat
from jax_hremat import PlannerConfig, SearchConfig, SolverConfig


def loss_fn(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(2):
        x = jnp.tanh(jax.nn.gelu(x @ w) @ w.T)
    return (x * x).mean()


ARGS = (jnp.ones((16, 64)), jnp.ones((128, 16)))


def make_step(loss: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda w, x: w - 0.1 * jax.grad(loss)(w, x)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(16)(jnp.tanh(nn.Dense(64)(x)))


@pytest.fixture(scope="module")
def plans() -> dict[str, jax_hremat.RematPlan]:
    """The plan of each effort for one budget."""
    return {
        effort: jax_hremat.plan_remat(loss_fn, budget=0.6, target="cpu", effort=effort)(*ARGS)
        for effort in ("low", "normal")
    }


def test_every_effort_certifies(plans: dict[str, jax_hremat.RematPlan]) -> None:
    assert all(plan.certificate.holds for plan in plans.values())
    assert 0 < plans["low"].num_compiles["blocks"] < plans["normal"].num_compiles["blocks"]


def test_more_effort_searches_more() -> None:
    low, normal, high = map(PlannerConfig.of_effort, ("low", "normal", "high"))
    assert low.search.max_packings < normal.search.max_packings < high.search.max_packings
    assert low.max_rounds < normal.max_rounds < high.max_rounds
    assert set(high.forms) > set(normal.forms)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SearchConfig(max_packings=-1),
        lambda: SearchConfig(max_candidates=-1),
        lambda: SearchConfig(fair_share=0.0),
        lambda: SearchConfig(max_workers=0),
        lambda: SolverConfig(max_nodes=-1),
        lambda: PlannerConfig(max_rounds=-1),
        lambda: PlannerConfig(floor_rounds=-1),
    ],
)
def test_limits_are_not_negative(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="negative"):
        make()


def test_normal_is_the_default(plans: dict[str, jax_hremat.RematPlan]) -> None:
    assert PlannerConfig.of_effort("normal") == PlannerConfig()
    plan = jax_hremat.plan_remat(loss_fn, budget=0.6, target="cpu")(*ARGS)
    assert plan.to_json() == plans["normal"].to_json()


def test_the_next_effort() -> None:
    of = PlannerConfig.of_effort
    assert [of(effort).more_effort for effort in ("low", "normal", "high")] == [
        "normal",
        "high",
        None,
    ]
    assert replace(of("low"), cache_dir="", cost="analytic").more_effort == "normal"
    assert replace(of("low"), max_rounds=1).more_effort is None


def test_a_refusal_tells_of_more_effort_and_of_headroom() -> None:
    with pytest.raises(jax_hremat.InfeasibleBudgetError) as refused:
        jax_hremat.plan_remat(
            loss_fn, budget="1MiB", target="cpu", effort="low", headroom_bytes="1020KiB"
        )(*ARGS)
    error = pickle.loads(pickle.dumps(refused.value))
    assert str(error) == str(refused.value)
    assert "budget of 1.00 MiB, 1020.00 KiB of it headroom;" in str(error)
    assert "plan with effort='normal', which may find less, or make" in str(error)
    assert error.min_budget_bytes == error.plan.certificate.peak_bytes + 1020 * 1024


def test_an_effort_and_a_configuration_are_refused() -> None:
    with pytest.raises(ValueError, match=r"effort='low'.*give one of them"):
        jax_hremat.plan_remat(loss_fn, budget=1.0, effort="low", config=PlannerConfig())


def test_an_unknown_effort_is_refused() -> None:
    effort: Any = "lowest"
    with pytest.raises(ValueError, match="'low', 'normal', 'high'"):
        jax_hremat.plan_remat(loss_fn, budget=1.0, effort=effort)


def test_every_function_that_plans_takes_an_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    of_effort = PlannerConfig.of_effort

    def taking(effort: Any) -> PlannerConfig:
        taken.append(effort)
        return of_effort(effort)

    monkeypatch.setattr(PlannerConfig, "of_effort", staticmethod(taking))
    how: dict[str, Any] = dict(budget="1GiB", target="cpu", effort="low")
    jax_hremat.plan_remat(loss_fn, **how)
    jax_hremat.pareto(loss_fn, target="cpu", effort="low")
    jax_hremat.fit_step(make_step, loss_fn, **how)
    jax_hremat.max_batch(make_step, loss_fn, sizes=[1, 2], **how)
    jax_hremat.hremat(loss_fn, **how)
    jax_hremat.hremat(**how)(Net)
    jax_hremat.nnx.remat(loss_fn, **how)
    jax_hremat.nnx.remat(nnx.Linear, **how)
    # `max_batch` changes the configuration, and hands on no effort.
    assert taken == ["low"] * 8
