"""Short scans written out: the same function, each of whose steps is planned by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import jit_peak_bytes, normal
from tracing import trace_loss

import jax_hremat
from jax_hremat import PlannerConfig, RematPlan, SearchConfig
from jax_hremat._emit.step import own_step
from jax_hremat._jax.checkpoints import is_checkpoint
from jax_hremat._jax.equations import evaluate_inlined
from jax_hremat._jax.jaxprs import inner_jaxprs, jaxpr_consts, open_jaxpr
from jax_hremat._plan.openings import NOTHING_OPENED, Openings
from jax_hremat._planner.forms import forms_of
from jax_hremat._report.page import page
from jax_hremat._trace.trace import Program

STEPS, WIDTH, ROWS = 3, 16, 64
CONFIG = PlannerConfig(
    search=SearchConfig(max_packings=1, max_saved_sets=1),
    cost="analytic",
    max_rounds=0,
    floor_rounds=0,
    unroll_scans=STEPS,
)
QUICK_COMPILE = {"xla_backend_optimization_level": 0}
W = 0.3 * normal(0, STEPS, WIDTH, WIDTH)
X = normal(1, ROWS, WIDTH)

Loss = Callable[[jax.Array, jax.Array], jax.Array]


def scanned(body: Callable[..., Any], **options: Any) -> Loss:
    """The loss of what a scan over the weights carries and makes."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        carry, made = jax.lax.scan(body, x, w, **options)
        return sum(jnp.sum(v.astype(float) ** 2) for v in jax.tree.leaves((carry, made)))

    return loss


def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    return jnp.sin(jnp.tanh(x @ w) @ w), None


def with_results(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    made = jnp.tanh(x @ w)
    return made, {"sum": made.sum(0), "largest": made.argmax(), "constant": jnp.ones(2)}


def with_a_rule(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    return jax.nn.relu(optax.safe_norm(x @ w, 1e-3, axis=-1)[:, None] * x), None


def with_branches(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    return jax.lax.cond(x.sum() > 0, jnp.sin, jnp.tanh, x @ w), None


def of_a_scan(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), x.sum()), x, length=2)


def with_keys(w: jax.Array, x: jax.Array) -> jax.Array:
    def step(x: jax.Array, given: Any) -> tuple[jax.Array, Any]:
        w, key = given
        return jnp.tanh(x @ w) * jax.random.bernoulli(key, 0.9, x.shape), key

    x, keys = jax.lax.scan(step, x, (w, jax.random.split(jax.random.key(2), STEPS)))
    return (x**2).mean() + jax.random.uniform(keys[1])


LOSSES: Mapping[str, Loss] = {
    "layers": scanned(layer),
    "backward": scanned(with_results, reverse=True),
    "results": scanned(with_results),
    "rules": scanned(with_a_rule),
    "branches": scanned(with_branches),
    "scans": scanned(of_a_scan),
    "keys": with_keys,
    "own unroll": scanned(layer, unroll=2),
}


def of_two(loss: Loss) -> Loss:
    return lambda w, x: jax.vmap(loss, (0, None))(jnp.stack([w, -w]), x)


TRANSFORMS = {"results": (jax.jacfwd, of_two)}


def num_scans(jaxpr: Any) -> int:
    eqns = open_jaxpr(jaxpr).eqns
    inside = (num_scans(body) for eqn in eqns for body in inner_jaxprs(eqn))
    return sum(eqn.primitive.name == "scan" for eqn in eqns) + sum(inside)


def unrolled(loss: Loss, steps: int = STEPS) -> Program:
    return trace_loss(loss, (W, X)).with_opened(Openings(scan_steps=steps))


@pytest.mark.parametrize("name", LOSSES)
def test_it_computes_the_same(name: str) -> None:
    loss = LOSSES[name]
    program = unrolled(loss)
    assert num_scans(program.jaxpr) == 0
    assert program.moving == (0,)

    def written_out(w: jax.Array, x: jax.Array) -> jax.Array:
        return evaluate_inlined(program.jaxpr, jaxpr_consts(program.jaxpr), (w, x))[0]

    for transform in (jax.value_and_grad, *TRANSFORMS.get(name, ())):
        expected, actual = (
            jax.jit(transform(f), compiler_options=QUICK_COMPILE)(W, X) for f in (loss, written_out)
        )
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), actual, expected
        )


def test_longer_scans_and_those_in_them_stay() -> None:
    assert num_scans(unrolled(scanned(layer), STEPS - 1).jaxpr) == 1
    # The inner one has two steps.
    assert num_scans(unrolled(scanned(of_a_scan), 2).jaxpr) == 2


@functools.cache
def plan_of(budget: float | int, steps: int = STEPS) -> RematPlan:
    config = replace(CONFIG, unroll_scans=steps)
    loss = LOSSES["layers"]
    return jax_hremat.plan_remat(loss, budget=budget, target="cpu", config=config)(W, X)


def test_each_step_is_planned_by_itself(tmp_path: Path) -> None:
    plan = plan_of(0.6)
    assert plan.opened == Openings(scan_steps=STEPS)
    # Some of the equal steps are checkpointed, and some are not.
    assert {block.recomputed > 0 for block in plan.blocks} == {True, False}
    assert f"those of up to {STEPS} steps are unrolled" in str(plan)
    assert f"those of up to {STEPS} steps are unrolled" in page(plan)

    plan.save(tmp_path / "plan.json")
    loaded = RematPlan.load(tmp_path / "plan.json")
    assert loaded == plan
    step = jax.jit(jax.value_and_grad(jax_hremat.apply_plan(scanned(layer), loaded)))
    expected = jax.jit(jax.value_and_grad(scanned(layer)))(W, X)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), step(W, X), expected
    )
    assert jit_peak_bytes(step, W, X) <= plan.certificate.budget_bytes


@pytest.mark.parametrize("budget", [1.0, 0.6])
def test_the_better_of_both_forms_is_returned(budget: float) -> None:
    """Budgets and baselines are those of the function as it is written."""
    as_is, either = plan_of(budget, steps=0), plan_of(budget)
    assert either.certificate.budget_bytes == as_is.certificate.budget_bytes
    assert either.baseline_peak_bytes == as_is.baseline_peak_bytes
    assert either.baseline_step_s == as_is.baseline_step_s
    assert either.estimated_step_s <= as_is.estimated_step_s
    if either.opened == NOTHING_OPENED:
        assert either.root == as_is.root


@pytest.mark.slow
def test_a_refusal_names_the_smaller_budget_of_both_forms() -> None:
    least = []
    for steps in (0, STEPS):
        with pytest.raises(jax_hremat.InfeasibleBudgetError) as refused:
            plan_of(1_000, steps)
        least.append(refused.value.min_budget_bytes)
        assert refused.value.plan is not None
        assert refused.value.plan.certificate.budget_bytes == least[-1]
    assert least[1] <= least[0]
    assert plan_of(least[1]).certificate.holds


@pytest.mark.slow
def test_a_slowdown_is_relative_to_the_function_as_it_is() -> None:
    plans = [
        jax_hremat.plan_remat(
            LOSSES["layers"],
            max_slowdown=1.2,
            target="cpu",
            config=replace(CONFIG, unroll_scans=steps),
        )(W, X)
        for steps in (0, STEPS)
    ]
    assert plans[1].baseline_step_s == plans[0].baseline_step_s
    assert plans[1].slowdown <= 1.2
    assert plans[1].certificate.peak_bytes <= plans[0].certificate.peak_bytes


@pytest.mark.slow
def test_a_frontier_is_of_both_forms() -> None:
    frontier = jax_hremat.pareto(LOSSES["layers"], num_points=3, target="cpu", config=CONFIG)(W, X)
    assert {plan.baseline_step_s for plan in frontier} == {frontier.no_remat[1]}
    peaks = [plan.certificate.peak_bytes for plan in frontier]
    times = [plan.estimated_step_s for plan in frontier]
    assert peaks == sorted(set(peaks))
    assert times == sorted(set(times), reverse=True)
    assert any(plan.opened == Openings(scan_steps=STEPS) for plan in frontier)


def test_without_short_scans_there_is_one_form() -> None:
    step = own_step(trace_loss(LOSSES["layers"], (W, X)))
    assert len(forms_of(step, CONFIG)) == 2
    assert len(forms_of(step, replace(CONFIG, unroll_scans=STEPS - 1))) == 1
    assert len(forms_of(step, replace(CONFIG, unroll_scans=0))) == 1


def test_a_whole_step_runs_the_form_that_was_planned() -> None:
    loss = LOSSES["layers"]

    def make_step(loss: Any) -> Any:
        return lambda w, x: w - 0.1 * jax.grad(loss)(w, x)

    kept: dict[str, Any] = dict(target="cpu", config=CONFIG, donate_argnums=())
    step, plan = jax_hremat.fit_step(make_step, loss, budget=0.6, **kept)(W, X)
    assert plan.opened == Openings(scan_steps=STEPS)
    np.testing.assert_allclose(step(W, X), jax.jit(make_step(loss))(W, X), rtol=1e-4, atol=1e-4)
    again, given = jax_hremat.fit_step(make_step, loss, plan=plan, **kept)(W, X)
    assert given == plan
    np.testing.assert_array_equal(again(W, X), step(W, X))


@pytest.mark.slow
def test_a_decorated_loss_runs_the_form_that_was_planned() -> None:
    loss = LOSSES["layers"]
    planned = jax_hremat.hremat(loss, budget=0.6, target="cpu", config=CONFIG)
    actual = jax.jit(jax.grad(planned))(W, X)
    assert planned.plans[0].opened == Openings(scan_steps=STEPS)
    np.testing.assert_allclose(actual, jax.grad(loss)(W, X), rtol=1e-4, atol=1e-4)


def test_checkpoints_written_in_a_scan_hold_outside_of_it() -> None:
    """Without barriers the compiler merges their recompute with their first run."""
    step = jax.checkpoint(lambda x, w: layer(x, w), prevent_cse=False)
    program = unrolled(scanned(step))
    checkpoints = [e for e in open_jaxpr(program.jaxpr).eqns if is_checkpoint(e)]
    assert len(checkpoints) == STEPS
    assert all(eqn.params["prevent_cse"] is True for eqn in checkpoints)


def test_a_number_of_steps_is_not_negative() -> None:
    with pytest.raises(ValueError, match="unroll_scans=-1"):
        replace(CONFIG, unroll_scans=-1)
