"""Planned NNX losses and modules are the originals, but for what they keep and recompute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from programs import jit_peak_bytes

import jax_hremat
import jax_hremat.nnx
from jax_hremat import PlannerConfig, SearchConfig, UnsupportedProgramError

COMPILED = PlannerConfig(search=SearchConfig(max_packings=1, max_saved_sets=0), max_rounds=1)
# Where it does not matter which plan it is, only whole steps are compiled.
OPTIONS: dict[str, Any] = dict(target="cpu", config=replace(COMPILED, cost="analytic"))
WIDTH = 8


class Block(nnx.Module):
    """Batch statistics, dropout and a static flag."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(4 * WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, activation: str = "gelu") -> jax.Array:
        h = getattr(jax.nn, activation)(self.norm(self.up(x)))
        return x + self.down(self.dropout(h))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, block: type = Block) -> None:
        self.blocks = nnx.List([block(rngs) for _ in range(3)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def loss_fn(model: Model, x: jax.Array, scale: float = 1.0) -> tuple[jax.Array, jax.Array]:
    y = model(x)
    return scale * jnp.mean(y**2), y.max()


def batch(seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(512, WIDTH)), jnp.float32)


def train(loss: Any, model: nnx.Module, steps: int) -> list[float]:
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: nnx.Module, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        (value, _), grads = nnx.value_and_grad(loss, has_aux=True)(model, x)
        optimizer.update(model, grads)
        return value

    return [float(step(model, optimizer, batch(i))) for i in range(steps)]


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_a_loss_trains_as_the_original() -> None:
    planned = jax_hremat.nnx.remat(loss_fn, budget=0.7, has_aux=True, target="cpu", config=COMPILED)
    ours, theirs = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    losses = train(planned, ours, 50)
    np.testing.assert_allclose(losses, train(loss_fn, theirs, 50), rtol=1e-4)
    assert losses[-1] < losses[0]
    # Batch statistics and the counts of random keys have flowed through.
    assert_same(nnx.state(ours), nnx.state(theirs), 1e-3)
    (plan,) = planned.plans
    assert plan.root.num_checkpointed > 0
    assert plan.certificate.peak_bytes <= 0.7 * plan.baseline_peak_bytes


def test_static_arguments_are_part_of_the_program() -> None:
    def scaled(layer: nnx.Linear, x: jax.Array, scale: float) -> jax.Array:
        return scale * jnp.mean(jax.nn.gelu(layer(x)) ** 2)

    planned = jax_hremat.nnx.remat(scaled, budget=1.0, **OPTIONS)
    layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    values = [float(planned(layer, batch(), scale)) for scale in (1.0, 2.0, 1.0)]
    assert values[1] == pytest.approx(2 * values[0], rel=1e-5)
    assert values[2] == values[0]
    assert len(planned.plans) == 2


def test_a_class_has_the_same_state_and_outputs() -> None:
    planned = jax_hremat.hremat(Block, budget=1.0, **OPTIONS)
    ours, theirs = Model(nnx.Rngs(0), planned), Model(nnx.Rngs(0))
    assert_same(nnx.state(ours), nnx.state(theirs), 0.0)
    np.testing.assert_allclose(train(loss_fn, ours, 5), train(loss_fn, theirs, 5), rtol=1e-4)
    assert_same(nnx.state(ours), nnx.state(theirs), 1e-3)
    # Three equal blocks are one program.
    (plan,) = planned.hremat_plans()
    assert plan.certificate.holds
    # A checkpoint of one loads in the other.
    nnx.update(Model(nnx.Rngs(1)), nnx.state(ours))


class Encoding(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.block = Block(rngs)

    def encode(self, x: jax.Array) -> jax.Array:
        return jnp.sin(self.block(x))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sum(self.encode(x) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "methods", [pytest.param("encode", marks=pytest.mark.slow), ("__call__", "encode")]
)
def test_other_methods(methods: Any) -> None:
    planned = jax_hremat.hremat(budget=1.0, methods=methods, **OPTIONS)(Encoding)
    ours, theirs = planned(nnx.Rngs(0)), Encoding(nnx.Rngs(0))
    actual = nnx.value_and_grad(lambda m: m(batch()))(ours)
    expected = nnx.value_and_grad(lambda m: m(batch()))(theirs)
    assert_same(actual[0], expected[0])
    assert_same(nnx.to_pure_dict(actual[1]), nnx.to_pure_dict(expected[1]))
    assert_same(nnx.state(ours), nnx.state(theirs))
    assert len(planned.hremat_plans()) == (1 if methods == "encode" else 2)


@pytest.mark.slow
def test_without_auxiliary_outputs() -> None:
    def loss(block: Block, x: jax.Array) -> jax.Array:
        return jnp.mean(block(x) ** 2)

    planned = jax_hremat.nnx.remat(budget=1.0, **OPTIONS)(loss)
    ours, theirs = Block(nnx.Rngs(0)), Block(nnx.Rngs(0))
    value, grads = nnx.jit(nnx.value_and_grad(planned))(ours, batch())
    expected = nnx.jit(nnx.value_and_grad(loss))(theirs, batch())
    assert_same((value, grads), expected)


class Wide(nnx.Module):
    """Under `nnx.remat`: its parameters come out of the checkpoint as they were."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 32 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(32 * WIDTH, WIDTH, rngs=rngs)

    def inside(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.gelu(self.up(x)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.remat(type(self).inside)(self, x)


class Counting(Wide):
    """The same with a count that is changed, and two scales that change places."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.count = nnx.BatchStat(jnp.zeros(()))
        self.scales = nnx.List([nnx.BatchStat(jnp.float32(s)) for s in (1.0, 3.0)])

    def inside(self, x: jax.Array) -> jax.Array:
        self.count[...] += 1
        first, second = self.scales
        scale = first[...]
        first[...], second[...] = second[...], scale
        return scale * super().inside(x)


def mean_square(model: Model, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def test_what_a_checkpoint_hands_on_is_not_changed() -> None:
    graph, params = nnx.split(Model(nnx.Rngs(0), Wide))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return mean_square(nnx.merge(graph, params), x)

    plan = jax_hremat.plan_remat(loss, budget=1.0, **OPTIONS)(params, batch())
    planned = jax_hremat.apply_plan(loss, plan)
    steps = [jax.jit(jax.value_and_grad(fun)) for fun in (planned, loss)]
    ours, theirs = (step(params, batch()) for step in steps)
    assert_same(ours, theirs)
    # So the certificate counts no parameters among the results.
    options = jax_hremat.compiler_options("cpu")
    compiled_bytes = jit_peak_bytes(steps[0], params, batch(), compiler_options=options)
    assert plan.certificate.peak_bytes == compiled_bytes


def test_what_else_a_checkpoint_returns_is_changed() -> None:
    planned = jax_hremat.nnx.remat(mean_square, budget=1.0, **OPTIONS)
    ours, theirs = Model(nnx.Rngs(0), Counting), Model(nnx.Rngs(0), Counting)
    for k in range(3):
        found = nnx.value_and_grad(planned)(ours, batch(k))
        assert_same(found, nnx.value_and_grad(mean_square)(theirs, batch(k)))
        assert_same(nnx.state(ours), nnx.state(theirs))
    block = ours.blocks[0]
    assert (block.count[...], *(scale[...] for scale in block.scales)) == (3.0, 3.0, 1.0)


def test_shared_modules() -> None:
    def twice(first: Block, second: Block, x: jax.Array) -> jax.Array:
        return jnp.mean(second(first(x)) ** 2)

    planned = nnx.jit(jax_hremat.nnx.remat(twice, budget=1.0, **OPTIONS))
    ours, theirs = Block(nnx.Rngs(0)), Block(nnx.Rngs(0))
    actual, expected = planned(ours, ours, batch()), nnx.jit(twice)(theirs, theirs, batch())
    assert float(actual) == pytest.approx(float(expected), rel=1e-5)
    assert_same(nnx.state(ours), nnx.state(theirs))


class NoCall(nnx.Module):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Block(nnx.Rngs(0)), "is an instance of `Block`"),
        (lambda: NoCall, "`NoCall` has no `__call__`"),
        (lambda: int, "is no `flax.nnx.Module`"),
    ],
)
def test_what_is_no_function_of_modules(make: Any, message: str) -> None:
    with pytest.raises(UnsupportedProgramError, match=message):
        jax_hremat.nnx.remat(make(), budget=0.5, **OPTIONS)
