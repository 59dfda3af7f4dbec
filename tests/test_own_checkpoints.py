"""A `jax.checkpoint` of the user's own: named in the plan, or planned as if it were not there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from tracing import trace_call, trace_loss

import jax_hremat
from jax_hremat import PlannerConfig, RematPlan, SearchConfig
from jax_hremat._jax.checkpoints import is_checkpoint, policy_name
from jax_hremat._jax.equations import evaluate_inlined
from jax_hremat._jax.jaxprs import all_equations, jaxpr_consts, open_jaxpr
from jax_hremat._jax.scopes import scope_name, source_line
from jax_hremat._plan.openings import Openings
from jax_hremat._trace.own_checkpoints import own_checkpoints

WIDTH, ROWS = 16, 64
CLOSED = PlannerConfig(
    search=SearchConfig(max_packings=1, max_saved_sets=1),
    cost="analytic",
    max_rounds=0,
    floor_rounds=0,
)
OPEN = replace(CLOSED, open_checkpoints=True)
NAMES = jax.checkpoint_policies.save_only_these_names("kept")


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    with jax.named_scope("layer"):
        return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "kept") @ w)


def plain(w: jax.Array, x: jax.Array) -> jax.Array:
    for own in w:
        x = jax.checkpoint(layer)(x, own)
    return (x**2).mean()


def with_policy(w: jax.Array, x: jax.Array) -> jax.Array:
    for own in w:
        x = jax.checkpoint(layer, policy=NAMES)(x, own)
    return (x**2).mean()


def nested(w: jax.Array, x: jax.Array) -> jax.Array:
    both = jax.checkpoint(lambda x, w: jax.checkpoint(layer)(jax.checkpoint(layer)(x, w[0]), w[1]))
    return (both(both(x, w[:2]), w[2:]) ** 2).mean()


def in_scan(w: jax.Array, x: jax.Array) -> jax.Array:
    step = jax.checkpoint(layer, prevent_cse=False, policy=jax.checkpoint_policies.dots_saveable)
    return (jax.lax.scan(lambda x, w: (step(x, w), None), x, w)[0] ** 2).mean()


def in_cond(w: jax.Array, x: jax.Array) -> jax.Array:
    branches = (jax.checkpoint(layer), lambda x, w: x)
    return (jax.lax.cond(x[0, 0] > 0, *branches, x, w[0]) ** 2).mean()


def in_jit(w: jax.Array, x: jax.Array) -> jax.Array:
    return (jax.jit(jax.checkpoint(layer))(x, w[0]) ** 2).mean()


LOSSES = {f.__name__: f for f in (plain, with_policy, nested, in_scan, in_cond, in_jit)}
COUNTS = {"plain": 4, "with_policy": 4, "nested": 6, "in_scan": 4, "in_cond": 1, "in_jit": 1}


def arguments() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(4, WIDTH, WIDTH)) / WIDTH**0.5
    return jnp.asarray(w, jnp.float32), jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32)


def checkpoints_in(jaxpr: Any) -> int:
    return sum(map(is_checkpoint, all_equations(jaxpr)))


@pytest.mark.parametrize("name", LOSSES)
def test_opened_the_program_has_none_and_computes_the_same(name: str) -> None:
    loss, args = LOSSES[name], arguments()
    closed = trace_loss(loss, args)
    opened = closed.with_opened(Openings(checkpoints=True))
    assert checkpoints_in(closed.jaxpr) > 0
    assert checkpoints_in(opened.jaxpr) == 0
    assert sum(c.count for c in opened.own_checkpoints) == COUNTS[name]
    assert opened.own_checkpoints == closed.own_checkpoints
    for program in (closed, opened):
        (found,) = jax.core.eval_jaxpr(
            open_jaxpr(program.jaxpr), jaxpr_consts(program.jaxpr), *args
        )
        np.testing.assert_allclose(found, loss(*args), rtol=1e-6)


@pytest.mark.parametrize("name", ["in_scan", pytest.param("in_cond", marks=pytest.mark.slow)])
def test_a_plan_of_the_opened_function_keeps_values_and_gradients(name: str) -> None:
    loss, args = LOSSES[name], arguments()
    planned = jax_hremat.hremat(loss, budget=1.0, target="cpu", config=OPEN)
    found = jax.jit(jax.value_and_grad(planned))(*args)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        found,
        jax.value_and_grad(loss)(*args),
    )
    (plan,) = planned.plans
    # The plan says so, and a copy of it is for the same program.
    assert plan.opened.checkpoints
    again = RematPlan.from_json(plan.to_json())
    assert again == plan
    jax.eval_shape(jax_hremat.apply_plan(loss, again), *args)


def test_scopes_and_lines_of_what_is_opened_stay() -> None:
    program = trace_loss(
        lambda w, x: jax.named_scope("outer")(nested)(w, x),
        arguments(),
        {},
    ).with_opened(Openings(checkpoints=True))
    products = [e for e in open_jaxpr(program.jaxpr).eqns if e.primitive.name == "dot_general"]
    assert len(products) == 8
    for eqn in products:
        scopes = scope_name(eqn).split("/")
        assert scopes[0] == "outer" and scopes[-1] == "layer"
        assert "(layer)" in source_line(eqn)


def test_the_plan_says_which_there_are_and_what_becomes_of_them() -> None:
    struct = jax.eval_shape(arguments)
    closed, opened = (
        jax_hremat.plan_remat(in_scan, budget=1.0, target="cpu", config=config)(*struct)
        for config in (CLOSED, OPEN)
    )
    ((one,), (same,)) = closed.own_checkpoints, opened.own_checkpoints
    assert one == same
    assert one.count == 4 and one.keeps == policy_name(jax.checkpoint_policies.dots_saveable)
    assert "test_own_checkpoints.py" in one.source
    for plan, said in ((closed, "stay in every plan"), (opened, "opened")):
        text = " ".join(str(plan).split())
        assert f"4 × jax.checkpoint under {one.keeps} at" in text and said in text
    # Without rematerialization of the user's own, more is kept.
    assert opened.baseline_peak_bytes > closed.baseline_peak_bytes


def test_a_refusal_names_them_and_the_option() -> None:
    struct = jax.eval_shape(arguments)
    plan = jax_hremat.plan_remat(in_scan, budget=4096, target="cpu", config=CLOSED)
    said = "4 × jax.checkpoint under .* at .*open_checkpoints=True"
    with pytest.raises(jax_hremat.InfeasibleBudgetError, match=said):
        plan(*struct)
    opened = jax_hremat.plan_remat(in_scan, budget=4096, target="cpu", config=OPEN)
    with pytest.raises(jax_hremat.InfeasibleBudgetError) as refused:
        opened(*struct)
    assert "jax.checkpoint" not in str(refused.value)


def test_custom_rules_stay_as_they_are() -> None:
    @jax.custom_vjp
    def rule(x: jax.Array) -> jax.Array:
        return jax.checkpoint(jnp.sin)(x)

    rule.defvjp(lambda x: (rule(x), x), lambda x, g: (2.0 * g,))
    program = trace_loss(lambda x: rule(x).sum(), (jnp.ones(3),))
    program = program.with_opened(Openings(checkpoints=True))
    # That of the function, and that of the function as its forward rule calls it.
    assert checkpoints_in(program.jaxpr) == 2
    step = program.step(lambda x: evaluate_inlined(program.jaxpr, (), (x,)))
    np.testing.assert_array_equal(step(jnp.ones(3))[2][0], np.full(3, 2.0))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(nn.Dense(WIDTH)(x))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.remat_scan(Layer, lengths=(2, 3))()(nn.remat(Layer)()(x))


def test_flax_remat_and_remat_scan_are_seen_and_opened() -> None:
    model, x = Model(), jnp.ones((4, WIDTH))
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    call = trace_call(lambda v, x: model.apply(v, x), (variables, x), (0,)).with_opened(
        Openings(checkpoints=True)
    )
    # The layer, and each of the two outer steps.
    assert sum(c.count for c in call.own_checkpoints) == 1 + 2
    assert checkpoints_in(call.jaxpr) == 0


def test_what_stands_in_a_derivative_is_no_checkpoint_of_the_user() -> None:
    step = jax.make_jaxpr(jax.grad(lambda x: jax.checkpoint(jnp.sin)(x).sum()))(jnp.ones(3))
    assert own_checkpoints(step) == ()
