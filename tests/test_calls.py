"""A planned function is called as the original: state, contexts, static arguments, methods."""

from __future__ import annotations

import copy
import enum
import functools
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from programs import peak_bytes_of

import jax_hremat
from jax_hremat import PlannerConfig, SearchConfig, StalePlanError, UnsupportedProgramError
from jax_hremat._calls.planned import Loss

CONFIG = PlannerConfig(
    search=SearchConfig(max_packings=1, max_saved_sets=0),
    max_rounds=1,
    cost="analytic",
)
OPTIONS: dict[str, Any] = dict(target="cpu", config=CONFIG)
X = jnp.asarray(np.random.default_rng(0).normal(size=(64, 8)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(8, 8)), jnp.float32)


def original(fun: Any, **options: Any) -> Any:
    return fun


def planned(fun: Any, **options: Any) -> Any:
    return jax_hremat.hremat(fun, budget=1.0, **options, **OPTIONS)


def planned_nnx(fun: Any, **options: Any) -> Any:
    return jax_hremat.nnx.remat(fun, budget=1.0, **options, **OPTIONS)


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# State of NNX objects


class Model(nnx.Module):
    """Batch statistics, and dropout by keys that are given."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.3)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        return self.down(self.drop(jnp.sin(self.norm(self.up(x))), rngs=rngs))


class Growing(nnx.Module):
    """All that a call can do to a module."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(8, 8, rngs=rngs)
        self.scale = nnx.Param(jnp.full((8,), 3.0))
        self.calls = 0
        self.seen = nnx.List([])
        self.cache = nnx.data({"h": jnp.zeros(8)})
        self.old = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.scale[...] = jnp.clip(self.scale[...], 0.0, 1.0)
        h = jnp.sin(self.layer(x) * self.scale)
        self.calls += 1
        self.seen.append(nnx.Variable(h.mean()))
        self.cache["h"] = h.sum(0)
        self.new = nnx.BatchStat(h.sum())
        self.most = nnx.data(h.max())
        self.scale.set_metadata(clipped=True)
        if hasattr(self, "old"):
            del self.old
        return jnp.mean(h**2)


def rngs_argument(wrap: Any) -> Any:
    model, rngs = Model(nnx.Rngs(0)), nnx.Rngs(7)
    loss = wrap(lambda model, x, rngs: jnp.mean(model(x, rngs=rngs) ** 2))
    step = nnx.jit(nnx.value_and_grad(loss))
    values = [step(model, X, rngs) for _ in range(2)]
    return values, rngs.default.count[...], nnx.state(model, nnx.BatchStat)


def rngs_keyword(wrap: Any) -> Any:
    model, rngs = Model(nnx.Rngs(0)), nnx.Rngs(7)
    loss = wrap(lambda model, x, *, rngs: jnp.mean(model(x, rngs=rngs) ** 2))
    call = nnx.jit(loss)
    return [call(model, X, rngs=rngs) for _ in range(2)], rngs.default.count[...]


def metric(wrap: Any) -> Any:
    def loss(model: Model, x: jax.Array, average: nnx.metrics.Average) -> jax.Array:
        value = jnp.mean(model(x, rngs=nnx.Rngs(3)) ** 2)
        average.update(values=value)
        return value

    model, average = Model(nnx.Rngs(0)), nnx.metrics.Average()
    grad = nnx.jit(nnx.value_and_grad(wrap(loss)))
    return [grad(model, X, average) for _ in range(2)], average.compute()


def bare_variables(wrap: Any) -> Any:
    def loss(w: nnx.Param, x: jax.Array, count: nnx.Variable) -> jax.Array:
        count[...] += 1
        return jnp.mean(jnp.sin(x @ w) ** 2)

    count = nnx.Variable(jnp.zeros(()))
    return nnx.value_and_grad(wrap(loss))(nnx.Param(W), X, count), count[...]


def shared(wrap: Any) -> Any:
    """In a container, and again in a keyword."""

    def loss(models: Any, x: jax.Array, extra: Any = None) -> jax.Array:
        h = extra["again"](models[1](x, rngs=nnx.Rngs(1)), rngs=nnx.Rngs(2))
        return jnp.mean(models[0](h, rngs=nnx.Rngs(3)) ** 2)

    models = [Model(nnx.Rngs(0)), Model(nnx.Rngs(1))]
    value = nnx.jit(wrap(loss))(models, X, extra={"again": models[1]})
    return value, [nnx.state(model) for model in models]


def changed_in_every_way(wrap: Any) -> Any:
    model = Growing(nnx.Rngs(0))
    loss = wrap(lambda model, x: model(x))
    values = [loss(model, X), loss(model, X)]
    held = (nnx.state(model), model.cache, model.most, model.calls, len(model.seen))
    return values, held, hasattr(model, "old"), model.scale.get_metadata("clipped")


def tree_mode(wrap: Any) -> Any:
    with nnx.set_graph_mode(False):
        return rngs_argument(wrap)


def results_with_objects(wrap: Any) -> Any:
    def loss(model: Model, x: jax.Array) -> Any:
        value = jnp.mean(model(x, rngs=nnx.Rngs(1)) ** 2)
        return value, (model, nnx.Variable(value), x, "text", 3)

    model = Model(nnx.Rngs(0))
    value, (same, variable, x, text, number) = wrap(loss, has_aux=True)(model, X)
    return value, same is model, variable[...], x is X, text == "text", number


def of_another_level(wrap: Any) -> Any:
    """What is not changed may belong to another trace."""
    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    loss = wrap(lambda layer, x: jnp.mean(layer(x) ** 2), argnums=1)
    return jax.grad(lambda x: loss(layer, x))(X)


STATE = [
    rngs_argument,
    pytest.param(rngs_keyword, marks=pytest.mark.slow),
    metric,
    bare_variables,
    shared,
    changed_in_every_way,
    pytest.param(tree_mode, marks=pytest.mark.slow),
    results_with_objects,
    of_another_level,
]


@functools.cache
def without_plans(case: Any) -> Any:
    """What a case gives without plans, compiled once."""
    return case(original)


@pytest.mark.parametrize("case", STATE, ids=lambda case: case.__name__)
def test_state_flows_through(case: Any) -> None:
    assert_same(case(planned), without_plans(case))


def test_nnx_remat_and_hremat_are_one() -> None:
    assert_same(rngs_argument(planned_nnx), without_plans(rngs_argument))
    assert_same(
        jax.grad(planned_nnx(lambda w, x: jnp.mean(jnp.sin(x @ w))))(W, X),
        jax.grad(lambda w, x: jnp.mean(jnp.sin(x @ w)))(W, X),
    )


def test_state_in_the_keywords_of_a_planned_class() -> None:
    def run(module_class: Any) -> Any:
        model, rngs = module_class(nnx.Rngs(0)), nnx.Rngs(7)
        return [model(X, rngs=rngs) for _ in range(2)], rngs.default.count[...]

    assert_same(run(planned_nnx(Model)), run(Model))


def test_state_in_a_closure_is_refused_by_name() -> None:
    rngs = nnx.Rngs(5)

    def loss(model: Model, x: jax.Array) -> jax.Array:
        return jnp.mean(model(x, rngs=rngs) ** 2)

    with pytest.raises(
        UnsupportedProgramError, match="`loss` changes .* not given.*RngCount.*Pass"
    ):
        planned(loss)(Model(nnx.Rngs(0)), X)


def test_what_would_be_lost_is_refused() -> None:
    def puts(w: jax.Array, box: dict[str, Any]) -> jax.Array:
        box["w"] = jnp.sin(w)
        return jnp.sum(w)

    with pytest.raises(
        UnsupportedProgramError, match=r"`puts` puts an array .* `args\[1\]\['w'\]`"
    ):
        planned(puts)(W, {})
    ref = jax.new_ref(jnp.zeros(()))
    with pytest.raises(UnsupportedProgramError, match=r"closes over a mutable array.*new_ref"):
        planned(lambda w: jnp.sum(w) + ref[...])(W)


def test_plans_of_functions_of_objects() -> None:
    def loss(model: Model, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
        return jnp.mean(model(x, rngs=rngs) ** 2)

    plan = jax_hremat.plan_remat(loss, budget=1.0, **OPTIONS)(Model(nnx.Rngs(0)), X, nnx.Rngs(7))
    assert_same(
        rngs_argument(lambda fun: jax_hremat.apply_plan(fun, plan)), without_plans(rngs_argument)
    )


# Trace contexts and closures


def test_a_changed_context_is_answered() -> None:
    fun = planned(lambda w, x: jnp.sum(jnp.sin(x @ w) ** 2))
    for precision, found in (("float32", True), ("bfloat16", False)):
        with jax.default_matmul_precision(precision):
            assert ("HIGHEST" in str(jax.make_jaxpr(fun)(W, X))) == found
    fun = planned(lambda w: jnp.sum(jnp.sin(w) * jnp.linspace(0, 1, 8)))
    assert fun(W).dtype == np.float32
    with jax.enable_x64(True):
        assert fun(W).dtype == np.float64


def test_a_changed_closure_is_answered() -> None:
    box: dict[str, Any] = {"scale": jnp.float32(1), "seen": 0}

    def loss(w: jax.Array) -> jax.Array:
        box["seen"] += 1
        return box["scale"] * jnp.sum(jnp.sin(w))

    fun = planned(loss)
    first = fun(W)
    box["scale"] = jnp.float32(2)
    np.testing.assert_allclose(fun(W), 2 * first, rtol=1e-6)
    assert box["seen"] == 2
    # What is closed over has a value, but no part in the plan.
    assert len(fun.plans) == 1


def test_constant_results_are_arrays() -> None:
    def loss(w: jax.Array, x: jax.Array) -> Any:
        return jnp.mean(jnp.sin(x @ w) ** 2), (jnp.asarray(3.0), jnp.array(2), jnp.zeros(()))

    def results(wrap: Any) -> Any:
        return jax.grad(wrap(loss, has_aux=True), has_aux=True)(W, X)[1]

    assert_same(results(planned), results(original))
    for actual, expected in zip(results(planned), results(original), strict=True):
        assert isinstance(actual, jax.Array) and jax.typeof(actual) == jax.typeof(expected)


def test_a_plan_is_used_without_jit() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        step = lambda h, _: (jax.nn.relu(h @ w), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(step, x, None, length=3)[0] ** 2)

    plan = jax_hremat.plan_remat(loss, budget=1.0, **OPTIONS)(W, X)
    with jax.disable_jit():
        again = jax_hremat.plan_remat(loss, budget=1.0, **OPTIONS)(W, X)
        actual = jax.value_and_grad(jax_hremat.apply_plan(loss, plan))(W, X)
        assert_same(actual, jax.value_and_grad(loss)(W, X))
    assert again.certificate == plan.certificate and again.fingerprint == plan.fingerprint


def test_values_that_are_traced_outside() -> None:
    def step(wrap: Any) -> Any:
        @jax.jit
        def run(w: jax.Array, x: jax.Array) -> Any:
            return jax.value_and_grad(wrap(lambda w: jnp.mean(jnp.sin(x @ w) ** 2)))(w)

        return run(W, X)

    assert_same(step(planned), step(original))


# Numbers, and what is static


def scaled(w: jax.Array, x: jax.Array, scale: Any) -> jax.Array:
    return scale * jnp.mean(jnp.tanh(x @ w) ** 2)


@pytest.mark.parametrize("scale", [0.5, 2])
def test_python_numbers(scale: Any) -> None:
    actual = jax.value_and_grad(planned(scaled))(W, X, scale)
    expected = jax.value_and_grad(scaled)(W, X, scale)
    assert_same(actual, expected)
    assert actual[0].weak_type == expected[0].weak_type
    # A plan made as for `jax.jit` is for numbers there, and outside.
    plan = jax_hremat.plan_remat(scaled, budget=1.0, **OPTIONS)(W, X, scale)
    applied = jax.value_and_grad(jax_hremat.apply_plan(scaled, plan))
    assert_same(jax.jit(applied)(W, X, 3 * scale), jax.value_and_grad(scaled)(W, X, 3 * scale))
    assert_same(applied(W, X, 3 * scale), jax.value_and_grad(scaled)(W, X, 3 * scale))


def test_python_numbers_where_their_values_are_needed() -> None:
    def loss(w: jax.Array, x: jax.Array, scale: float, rows: int) -> jax.Array:
        def body(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.sin(c @ w) * scale, None

        out, _ = jax.lax.scan(body, x * jnp.ones((rows, 8)), None, length=3)
        return jnp.mean(out) if scale > 0 else jnp.sum(out)

    expected = jax.value_and_grad(loss)(W, X, 0.5, len(X))
    assert_same(jax.value_and_grad(planned(loss))(W, X, 0.5, len(X)), expected)
    # As `jax.jit` does, a plan takes a number as an input, here to a scan.
    plan = jax_hremat.plan_remat(scaled_scan, budget=1.0, **OPTIONS)(W, X, 0.5)
    applied = jax_hremat.apply_plan(scaled_scan, plan)
    assert_same(jax.grad(applied)(W, X, 0.25), jax.grad(scaled_scan)(W, X, 0.25))


def scaled_scan(w: jax.Array, x: jax.Array, scale: float) -> jax.Array:
    out, _ = jax.lax.scan(lambda c, _: (jnp.sin(c @ w) * scale, None), x, None, length=3)
    return jnp.mean(out)


def test_python_numbers_are_differentiated() -> None:
    def fun(a: Any, b: Any) -> jax.Array:
        return jnp.sin(a["x"]) * b

    both = planned(fun)
    expected = jax.value_and_grad(fun)({"x": 2.0}, 3.0)
    assert_same(jax.value_and_grad(both)({"x": 2.0}, 3.0), expected)
    np.testing.assert_allclose(both({"x": 2.0}, 3.0), expected[0])


def flagged(
    w: jax.Array, x: jax.Array, train: bool = False, name: str = "tanh", fun: Any = None
) -> jax.Array:
    y = getattr(jnp, name)(x @ w)
    y = fun(y) if fun else y
    return jnp.mean((2 * y if train else y) ** 2)


def test_static_arguments() -> None:
    loss = planned(flagged)
    for static in ({}, {"train": True, "name": "sin"}, {"fun": jax.nn.relu}, {"train": True}):
        actual = jax.value_and_grad(loss)(W, X, **static)
        assert_same(actual, jax.value_and_grad(flagged)(W, X, **static))
    assert len(loss.plans) == 4
    plan = jax_hremat.plan_remat(flagged, budget=1.0, **OPTIONS)(W, X, train=True)
    applied = jax_hremat.apply_plan(flagged, plan)
    assert_same(applied(W, X, train=True), flagged(W, X, train=True))
    with pytest.raises(StalePlanError, match="static arguments"):
        applied(W, X, train=False)


def test_a_number_whose_value_is_needed_is_static() -> None:
    def loss(w: jax.Array, x: jax.Array, depth: int) -> jax.Array:
        for _ in range(depth):
            x = jnp.sin(x @ w)
        return jnp.mean(x)

    plan = jax_hremat.plan_remat(loss, budget=1.0, **OPTIONS)(W, X, 3)
    assert_same(jax_hremat.apply_plan(loss, plan)(W, X, 3), loss(W, X, 3))

    def by_value(w: jax.Array) -> jax.Array:
        return jnp.sum(w) if w[0, 0] > 0 else jnp.mean(w)

    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax_hremat.plan_remat(by_value, budget=1.0, **OPTIONS)(W)


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x, n, scale: scale * jnp.tanh(x @ w).reshape(n, -1, 8).mean(),
        lambda w, x, n, scale: scale * jnp.tanh(x @ w)[:n].mean(),
        lambda w, x, n, scale: scale * (jnp.tanh(x @ w) / np.sqrt(n)).mean(),
        lambda w, x, n, scale: scale * {2: jnp.tanh(x @ w)}[n].mean(),
    ],
    ids=["size", "slice", "numpy", "key"],
)
def test_whoever_needs_the_value_of_a_number(loss: Any) -> None:
    """A whole number is static, and the other stays an input."""
    plan = jax_hremat.plan_remat(loss, budget=1.0, **OPTIONS)(W, X, 2, 0.5)
    applied = jax.grad(jax_hremat.apply_plan(loss, plan))
    assert_same(jax.jit(applied, static_argnums=2)(W, X, 2, 0.25), jax.grad(loss)(W, X, 2, 0.25))
    assert set(plan.fingerprint.differentiated_inputs) == {"args[0]", "args[1]", "args[3]"}


def tempered(w: jax.Array, x: jax.Array, temperature: Any) -> jax.Array:
    """A constant temperature, or a learned one."""
    if not (isinstance(temperature, float) and temperature > 0):
        temperature = jax.nn.softplus(temperature)
    return jnp.mean(jnp.tanh(x @ w) ** 2 / temperature)


def test_a_function_that_asks_for_the_type_of_a_number() -> None:
    plan = jax_hremat.plan_remat(tempered, budget=1.0, **OPTIONS)(W, X, 2.0)
    applied = jax_hremat.apply_plan(tempered, plan)
    assert_same(applied(W, X, 2.0), tempered(W, X, 2.0))
    with pytest.raises(StalePlanError):
        jax.jit(applied)(W, X, 2.0)
    # Of a negative one it computes what it does of an array.
    plan = jax_hremat.plan_remat(tempered, budget=1.0, **OPTIONS)(W, X, -2.0)
    applied = jax_hremat.apply_plan(tempered, plan)
    assert_same(applied(W, X, -1.0), tempered(W, X, -1.0))
    assert_same(jax.jit(applied)(W, X, 1.0), jax.jit(tempered)(W, X, 1.0))
    with pytest.raises(StalePlanError, match="something else of the numbers"):
        applied(W, X, 1.0)


def test_other_parameters_of_an_operation_are_another_function() -> None:
    def loss(w: jax.Array, x: jax.Array, n: Any) -> jax.Array:
        h = jnp.tanh(x @ w)
        return jnp.mean(n * (h**2 if isinstance(n, float) else h**3))

    trace = Loss(loss, (0,), has_aux=False).trace_as_jit
    assert trace((W, X, 0.1), {}).program.input_names == ("args[0]", "args[1]")


class Mode(enum.IntEnum):
    TRAIN = 0
    EVAL = 1


def test_a_member_of_an_enumeration_is_static() -> None:
    def loss(w: jax.Array, x: jax.Array, mode: Mode) -> jax.Array:
        h = jnp.tanh(x @ w)
        return jnp.mean((2 * h if mode is Mode.TRAIN else h) ** 2)

    plan = jax_hremat.plan_remat(loss, budget=1.0, **OPTIONS)(W, X, Mode.TRAIN)
    applied = jax_hremat.apply_plan(loss, plan)
    assert_same(applied(W, X, Mode.TRAIN), loss(W, X, Mode.TRAIN))
    with pytest.raises(StalePlanError):
        applied(W, X, Mode.EVAL)


NUMBERS: dict[str, Any] = {
    "times": lambda w, x, n: n * jnp.mean(jnp.tanh(n * x @ w)),
    "where": lambda w, x, n: jnp.mean(jnp.where(x > n, x @ w, n)),
    "clip": lambda w, x, n: jnp.mean(jnp.clip(x @ w, -n, n)),
    "smooth": lambda w, x, n: jnp.mean((x @ w) * (jnp.eye(64, 8) * (1 - n) + n / 8)),
    "keep": lambda w, x, n: jnp.mean(
        jnp.where(jax.random.bernoulli(jax.random.key(0), 1 - n, x.shape), x / (1 - n), 0) @ w
    ),
    "branch": lambda w, x, n: jnp.mean(jax.lax.cond(n > 0.3, jnp.sin, jnp.cos, x @ w)),
    "bfloat16": lambda w, x, n: jnp.mean(x @ w * jnp.asarray(n, jnp.bfloat16)),
    "loop": lambda w, x, n: scaled_scan(w, x, n),
}


@pytest.mark.parametrize("loss", NUMBERS.values(), ids=NUMBERS)
def test_what_computes_the_same_of_a_number_takes_it_as_an_input(loss: Any) -> None:
    trace = Loss(loss, (0,), has_aux=False).trace_as_jit
    assert trace((W, X, 0.1), {}).program.input_names == ("args[0]", "args[1]", "args[2]")


def test_a_state_that_can_be_used_once() -> None:
    """Equinox's `State` cannot be flattened any more once there is a newer one."""
    keys = jax.random.split(jax.random.key(0))

    def make() -> eqx.nn.SpectralNorm:
        return eqx.nn.SpectralNorm(eqx.nn.Linear(8, 8, key=keys[0]), "weight", key=keys[1])

    layer, state = eqx.nn.make_with_state(make)()

    def loss(layer: Any, state: Any, x: jax.Array) -> Any:
        y, state = layer(x, state)
        return (y**2).mean(), state

    def run(fun: Any) -> Any:
        return eqx.filter_jit(eqx.filter_value_and_grad(fun, has_aux=True))(layer, state, X[0])

    assert_same(run(planned(loss, has_aux=True)), run(loss))


def test_leaves_that_are_functions() -> None:
    model = eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0))

    def loss(parts: Any, x: jax.Array) -> jax.Array:
        model, number, _ = parts
        return number * jnp.mean(jax.vmap(model)(x) ** 2)

    parts = (model, jnp.int32(2), "text")
    expected = eqx.filter_jit(eqx.filter_value_and_grad(loss))(parts, X)
    assert_same(eqx.filter_value_and_grad(planned(loss))(parts, X), expected)
    in_jit = eqx.filter_jit(eqx.filter_value_and_grad(planned(loss)))
    assert_same(in_jit(parts, X), expected)


# Methods


def test_methods_of_plain_objects() -> None:
    class Trainer:
        scale = 2.0

        @jax_hremat.hremat(budget=1.0, **OPTIONS)
        def loss(self, w: jax.Array, x: jax.Array) -> jax.Array:
            return self.scale * jnp.mean(jnp.sin(x @ w) ** 2)

    trainer = Trainer()
    # `argnums` counts as for `jax.grad`: without the object a method is bound to.
    actual = jax.value_and_grad(trainer.loss)(W, X)
    assert_same(actual, jax.value_and_grad(lambda w: 2 * jnp.mean(jnp.sin(X @ w) ** 2))(W))
    (plan,) = trainer.loss.plans
    assert plan.fingerprint.differentiated_inputs == {"args[1]": True, "args[2]": False}
    assert Trainer.loss.plans == trainer.loss.plans
    trainer.scale = 4.0
    assert_same(trainer.loss(W, X), 2 * actual[0])
    # A bound method is planned likewise, and its plan applied.
    bound = trainer.loss.__wrapped__
    again = jax_hremat.plan_remat(bound, budget=1.0, **OPTIONS)(W, X)
    assert_same(jax_hremat.apply_plan(bound, again)(W, X), 2 * actual[0])


def test_what_is_planned_already_is_refused() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.sin(x @ w) ** 2)

    class Trainer:
        loss = jax_hremat.hremat(lambda self, w, x: loss(w, x), budget=1.0, **OPTIONS)

    planned = jax_hremat.hremat(loss, budget=1.0, **OPTIONS)
    assert planned.__wrapped__ is loss
    plan = jax_hremat.plan_remat(loss, budget=1.0, **OPTIONS)(W, X)
    match = r"`loss` is planned already.*: `loss.__wrapped__`"
    with pytest.raises(jax_hremat.UnsupportedProgramError, match=match):
        jax_hremat.plan_remat(planned, budget=1.0, **OPTIONS)(W, X)
    with pytest.raises(jax_hremat.UnsupportedProgramError, match=match):
        jax_hremat.apply_plan(planned, plan)
    with pytest.raises(jax_hremat.UnsupportedProgramError, match="planned already"):
        jax_hremat.hremat(Trainer().loss, budget=1.0, **OPTIONS)


def test_a_plan_inside_what_is_planned_is_named() -> None:
    @jax_hremat.hremat(max_slowdown=4.0, **OPTIONS)
    def inner(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.sin(jnp.sin(x @ w) @ w) ** 2)

    plan = jax_hremat.plan_remat(lambda w, x: 2 * inner(w, x), budget=1.0, **OPTIONS)(W, X)
    (own,) = plan.own_checkpoints
    assert own.keeps == "a plan of jax_hremat"
    assert own.source.startswith(f"{__file__}:")


def test_methods_of_modules() -> None:
    class WithLoss(Model):
        def loss(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
            return jnp.mean(self(x, rngs=rngs) ** 2)

    class Planned(WithLoss):
        loss = jax_hremat.hremat(WithLoss.loss, budget=1.0, **OPTIONS)

    def run(module_class: Any) -> Any:
        model, rngs = module_class(nnx.Rngs(0)), nnx.Rngs(7)
        grad = nnx.jit(nnx.value_and_grad(lambda model, rngs: model.loss(X, rngs)))
        values = [grad(model, rngs) for _ in range(2)]
        return jax.tree.leaves((values, nnx.state(model, nnx.BatchStat), rngs.default.count[...]))

    assert_same(run(Planned), run(WithLoss))
    (plan,) = Planned.loss.plans
    assert plan.fingerprint.differentiated_inputs["args[0].up.kernel"]


# Pickles and copies


def module_loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.sin(x @ w) ** 2)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8)(jnp.sin(x))


@jax_hremat.hremat(budget=1.0, **OPTIONS)
def decorated(w: jax.Array, x: jax.Array) -> jax.Array:
    return module_loss(w, x)


@jax_hremat.nnx.remat(budget=1.0, **OPTIONS)
class Decorated(Model):
    pass


PLANNED_LOSS = planned(module_loss)
PlannedModel, PlannedBlock = planned(Model), planned(Block)
COPIES = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "deepcopy": copy.deepcopy,
    "cloudpickle": lambda value: pickle.loads(cloudpickle.dumps(value)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_plans_are_pickled_and_copied(copied: Any) -> None:
    frontier = jax_hremat.pareto(module_loss, num_points=2, **OPTIONS)(W, X)
    plan = frontier.plans[0]
    assert copied(frontier) == frontier and copied(plan) == plan
    assert copied(plan).timings_s == plan.timings_s
    assert copied(plan.certificate) == plan.certificate
    with pytest.raises(TypeError):
        copied(plan).num_compiles["steps"] = 0


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_planned_functions_are_pickled_and_copied(copied: Any) -> None:
    expected = module_loss(W, X)
    assert_same(copied(PLANNED_LOSS)(W, X), expected)
    PLANNED_LOSS(W, X)
    used = copied(PLANNED_LOSS)
    assert used.plans == PLANNED_LOSS.plans
    applied = jax_hremat.apply_plan(module_loss, used.plans[0])
    assert_same(jax.jit(copied(applied))(W, X), expected)
    assert_same(copied(decorated)(W, X), expected)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_planned_modules_are_pickled_and_copied(copied: Any) -> None:
    for module_class in (PlannedModel, Decorated):
        model = module_class(nnx.Rngs(0))
        model(X, rngs=nnx.Rngs(1))
        again = copied(model)
        assert_same(again(X, rngs=nnx.Rngs(1)), model(X, rngs=nnx.Rngs(1)))
        assert type(again).hremat_plans()
    assert copied(Decorated) is Decorated
    module = PlannedBlock()
    variables = module.init(jax.random.key(0), X)
    again = copied(module)
    assert_same(again.apply(variables, X), module.apply(variables, X))
    assert type(again).hremat_plans()
    assert issubclass(copied(PlannedBlock), Block)


# Training steps


def nnx_loss(model: Model, x: jax.Array, rngs: nnx.Rngs, train: bool = True) -> jax.Array:
    return jnp.mean(model(x, rngs=rngs) ** 2) * (2 if train else 1)


def make_nnx_step(loss: Any) -> Any:
    def step(model: Any, optimizer: Any, x: jax.Array, rngs: Any, train: bool = True) -> jax.Array:
        value, grads = nnx.value_and_grad(loss)(model, x, rngs, train=train)
        optimizer.update(model, grads)
        return value

    return step


def nnx_arguments() -> Any:
    model = Model(nnx.Rngs(0))
    model.fixed = nnx.BatchStat(jnp.ones(4))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), X, nnx.Rngs(7)


def test_a_step_of_objects() -> None:
    ours, theirs = nnx_arguments(), nnx_arguments()
    fit = jax_hremat.fit_step(make_nnx_step, nnx_loss, budget=1.0, donate_argnums=(0, 1), **OPTIONS)
    step, plan = fit(*ours, train=True)
    plain = nnx.jit(make_nnx_step(nnx_loss), static_argnames="train")
    for _ in range(3):
        assert_same(step(*ours, train=True), plain(*theirs, train=True))
    # What was donated and not changed is still there.
    assert_same(nnx.state(ours[0]), nnx.state(theirs[0]))
    assert_same(jax.tree.leaves(nnx.state(ours[1])), jax.tree.leaves(nnx.state(theirs[1])))
    assert int(ours[3].default.count[...]) == 3
    compiled = step.lower(*ours, train=True).compile()
    assert plan.certificate.peak_bytes == peak_bytes_of(compiled)
    with pytest.raises(StalePlanError):
        step(*ours, train=False)


def make_step(loss: Any) -> Any:
    def step(w: jax.Array, x: jax.Array, train: bool = False, name: str = "tanh") -> Any:
        value, grads = jax.value_and_grad(loss)(w, x, train=train, name=name)
        return w - 0.1 * grads, value

    return step


@pytest.mark.parametrize("declared", [{}, {"static_argnums": 2, "static_argnames": "name"}])
def test_a_step_with_static_arguments(declared: Any) -> None:
    fit = jax_hremat.fit_step(
        make_step, flagged, budget=1.0, donate_argnums=(), **declared, **OPTIONS
    )
    step, _ = fit(W, X, True, name="sin")
    assert_same(step(W, X, True, name="sin"), make_step(flagged)(W, X, True, name="sin"))


def test_a_step_of_leaves_that_are_functions() -> None:
    model = eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0))

    def make(loss: Any) -> Any:
        def step(model: Any, x: jax.Array) -> Any:
            value, grads = eqx.filter_value_and_grad(loss)(model, x)
            return eqx.apply_updates(model, jax.tree.map(lambda g: -g, grads)), value

        return step

    def loss(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(model)(x) ** 2)

    fit = jax_hremat.fit_step(make, loss, budget=1.0, donate_argnums=(), **OPTIONS)
    actual = fit(model, X).step(model, X)
    expected = make(loss)(model, X)
    assert_same(*(eqx.filter(result, eqx.is_array) for result in (actual, expected)))
    assert actual[0].activation is model.activation


def test_a_step_with_a_plan_that_there_is(tmp_path: Path) -> None:
    args = (W, X)
    made = jax_hremat.fit_step(make_step, flagged, budget=1.0, **OPTIONS)(*args).plan
    path = tmp_path / "plan.json"
    made.save(path)
    for given, budget in ((path, None), (made, "1MiB")):
        fit = jax_hremat.fit_step(make_step, flagged, plan=given, target="cpu", budget=budget)
        step, plan = fit(*args)
        assert plan.root == made.root and plan.certificate.holds
        assert plan.certificate.budget_bytes == (2**20 if budget else made.baseline_peak_bytes)
        assert_same(step(jnp.array(W), X), make_step(flagged)(*args))
    # Another step around the same loss has another certificate.
    other = jax_hremat.fit_step(
        lambda loss: lambda w, x: (make_step(loss)(w, x), x @ x.T),
        flagged,
        plan=made,
        budget="1MiB",
        target="cpu",
    )(*args)
    assert other.plan.certificate.output_bytes > made.certificate.output_bytes
    with pytest.raises(StalePlanError, match="is not for `flagged`"):
        jax_hremat.fit_step(make_step, flagged, plan=path, target="cpu")(W, X[:3])
    with pytest.raises(jax_hremat.InfeasibleBudgetError):
        jax_hremat.fit_step(make_step, flagged, plan=path, budget=64, target="cpu")(*args)
    with pytest.raises(jax_hremat.BudgetFormatError, match="with a plan"):
        jax_hremat.fit_step(make_step, flagged, plan=path, max_slowdown=1.1, target="cpu")


def test_the_memory_of_a_named_target() -> None:
    target = jax_hremat.get_target("h200")
    fit = jax_hremat.fit_step(make_step, flagged, budget="device", target=target, config=CONFIG)
    certificate = fit(W, X).plan.certificate
    assert certificate.budget_bytes == target.memory_bytes
    assert certificate.headroom_bytes == int(0.05 * target.memory_bytes)


def test_what_a_loss_hands_on_is_in_its_certificate() -> None:
    """The compiled step has memory for a batch that comes out as it went in."""

    def loss(w: jax.Array, x: jax.Array) -> Any:
        return jnp.sin(x @ w).sum(), {"batch": x, "rate": 0.1}

    w, x = jnp.ones((8, 8)), jnp.ones((64, 8))
    plan = jax_hremat.plan_remat(
        loss, budget=1.0, has_aux=True, target="cpu", config=PlannerConfig(cost="analytic")
    )(w, x)
    planned = jax_hremat.apply_plan(loss, plan)
    step = jax.jit(jax.value_and_grad(planned, has_aux=True))
    memory = step.lower(w, x).compile().memory_analysis()
    assert plan.certificate.output_bytes == memory.output_size_in_bytes > x.nbytes
    aux = jax.grad(planned, has_aux=True)(w, x)[1]
    assert aux["batch"] is x and aux["rate"] == 0.1
