"""Planned linen modules are the modules, but for what they keep and recompute."""

from __future__ import annotations

import functools
import pickle
from dataclasses import replace
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.serialization import from_bytes, to_bytes

import jax_hremat
from jax_hremat import PlannerConfig, SearchConfig

# Without the first XLA:CPU merges a recompute with the first forward, and tests less.
QUICK_COMPILE = {"xla_backend_optimization_level": 0}
QUICK = PlannerConfig(search=SearchConfig(max_packings=1, max_saved_sets=1), max_rounds=1)
# Where it does not matter which plan it is, only whole steps are compiled.
OPTIONS: dict[str, Any] = dict(target="cpu", config=replace(QUICK, cost="analytic"))
WIDTH = 8


class Block(nn.Module):
    """Dropout, batch statistics, an intermediate and a static flag."""

    features: int = 4 * WIDTH

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, activation: str = "gelu") -> jax.Array:
        h = getattr(nn, activation)(nn.Dense(self.features)(x))
        h = nn.BatchNorm(use_running_average=not train)(h)
        h = nn.Dropout(0.5, deterministic=not train)(h)
        self.sow("intermediates", "hidden", h)
        return x + nn.Dense(WIDTH)(h)


class Model(nn.Module):
    block: type[nn.Module] = Block
    depth: int = 3

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for _ in range(self.depth):
            x = self.block()(x, train, activation="gelu")
        return x


class Scaled(nn.Module):
    """A dense layer; `factor` may be traced."""

    factor: Any = 1.0

    @nn.compact
    def __call__(self, x: jax.Array, label: Any = None) -> Any:
        return jnp.sin(nn.Dense(WIDTH)(x) * self.factor), label


PlannedBlock = jax_hremat.hremat(Block, budget=0.9, target="cpu", config=QUICK)
PlannedScaled = jax_hremat.hremat(Scaled, budget=1.0, **OPTIONS)


@jax_hremat.hremat(budget="1MiB", **OPTIONS)
class Decorated(nn.Module):
    """Doc."""

    features: int = 3

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.features)(x)


def inputs(*shape: int) -> jax.Array:
    values = np.random.default_rng(sum(shape)).normal(size=shape)
    return jnp.asarray(values, jnp.float32)


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def initial(model: nn.Module, x: jax.Array) -> Any:
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return model.init(keys, x, train=True)


def train_call(model: nn.Module, variables: Any, x: jax.Array) -> Any:
    """Loss, all that the call changes, and the gradients of parameters and inputs."""

    def loss(params: Any, x: jax.Array, key: jax.Array) -> Any:
        outputs, changed = model.apply(
            {**variables, "params": params},
            x,
            train=True,
            rngs={"dropout": key},
            mutable=["batch_stats", "intermediates"],
        )
        return jnp.sum(outputs**2), (outputs, changed)

    step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    quick = jax.jit(step, compiler_options=QUICK_COMPILE)
    return quick(variables["params"], x, jax.random.key(2))


def test_submodule_trains_as_the_original_and_is_planned_once():
    x = inputs(64, WIDTH)
    variables = initial(Model(), x)
    expected = train_call(Model(), variables, x)
    assert_same(train_call(Model(PlannedBlock), variables, x), expected)
    (plan,) = PlannedBlock.hremat_plans()
    assert plan.root.num_checkpointed >= 1
    assert plan.certificate.holds
    assert plan.certificate.peak_bytes <= 0.9 * plan.baseline_peak_bytes
    # Three masks, each of its own: the shared plan has not shared the keys.
    hidden = [h["hidden"][0] == 0 for h in expected[0][1][1]["intermediates"].values()]
    assert not np.array_equal(hidden[0], hidden[1])


@pytest.mark.slow
def test_static_arguments_are_part_of_the_program():
    x = inputs(64, WIDTH)
    variables = Block().init(jax.random.key(0), x, train=False)
    planned = jax_hremat.hremat(Block, budget=1.0, **OPTIONS)
    for activation in ("gelu", "relu", "gelu"):
        expected = Block().apply(variables, x, False, activation=activation)
        actual = planned().apply(variables, x, False, activation=activation)
        assert_same(actual, expected)
    assert len(planned.hremat_plans()) == 2


@pytest.mark.slow
def test_whole_model():
    x = inputs(64, WIDTH)
    planned = jax_hremat.hremat(Model, budget=0.8, **OPTIONS)
    variables = initial(Model(depth=2), x)
    expected = train_call(Model(depth=2), variables, x)
    assert_same(train_call(planned(depth=2), variables, x), expected)
    (plan,) = planned.hremat_plans()
    assert plan.certificate.peak_bytes <= 0.8 * plan.baseline_peak_bytes


def test_variables_and_checkpoints_are_the_originals():
    x = inputs(64, WIDTH)
    original, planned = initial(Model(), x), initial(Model(PlannedBlock), x)
    assert_same(planned, original, tolerance=0)
    for saved, other in ((original, planned), (planned, original)):
        fresh = jax.tree.map(jnp.zeros_like, other)
        loaded = from_bytes(fresh, to_bytes(saved))
        assert_same(jax.tree.map(jnp.asarray, loaded), other, tolerance=0)


@pytest.mark.slow
def test_fifty_steps_of_training_are_the_originals():
    x = inputs(64, WIDTH)
    optimizer = optax.adam(1e-2)

    def trained(model: nn.Module) -> tuple[list[float], Any]:
        variables = initial(model, x)
        params, stats = variables["params"], variables["batch_stats"]

        def loss(params: Any, stats: Any, key: jax.Array) -> Any:
            outputs, changed = model.apply(
                {"params": params, "batch_stats": stats},
                x,
                train=True,
                rngs={"dropout": key},
                mutable=["batch_stats"],
            )
            return jnp.mean((outputs - jnp.roll(x, 1)) ** 2), changed["batch_stats"]

        @functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
        def step(params: Any, stats: Any, state: Any, key: jax.Array) -> Any:
            (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params, stats, key)
            updates, state = optimizer.update(grads, state)
            return optax.apply_updates(params, updates), stats, state, value

        losses, state = [], optimizer.init(params)
        for key in jax.random.split(jax.random.key(3), 50):
            params, stats, state, value = step(params, stats, state, key)
            losses.append(float(value))
        return losses, {"params": params, "batch_stats": stats}

    losses, variables = trained(Model(PlannedBlock))
    expected, others = trained(Model())
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    assert losses[-1] < 0.8 * losses[0]
    assert_same(variables, others, tolerance=2e-2)
    # What one has learnt the other takes over.
    loaded = jax.tree.map(jnp.asarray, from_bytes(others, to_bytes(variables)))
    assert_same(train_call(Model(), loaded, x), train_call(Model(PlannedBlock), variables, x), 1e-4)


def scaled_gradients(module: type[nn.Module], x: jax.Array) -> Any:
    variables = Scaled().init(jax.random.key(0), x)
    return jax.grad(lambda v: module().apply(v, x)[0].sum())(variables)


@pytest.mark.slow
def test_transforms_outside():
    x = inputs(16, WIDTH)
    variables = Scaled().init(jax.random.key(0), x)
    batch = jnp.stack([x, 2 * x])

    def calls(module: type[nn.Module]) -> list[Any]:
        def call(x: Any) -> Any:
            return module().apply(variables, x)[0]

        return [
            call(x),
            call(np.asarray(x, np.float64)),
            jax.jit(call)(x),
            jax.vmap(call)(batch),
            jax.jvp(call, (x,), (x,)),
            jax.vmap(lambda x: scaled_gradients(module, x))(batch),
            jax.jit(jax.grad(lambda x: call(x).sum()))(x),
            jax.eval_shape(call, x),
        ]

    before = len(PlannedScaled.hremat_plans())
    actual, expected = calls(PlannedScaled), calls(Scaled)
    assert actual.pop() == expected.pop()
    assert_same(actual, expected)
    assert len(PlannedScaled.hremat_plans()) <= before + 1


def test_lifted_transforms_around():
    class Scanned(nn.Module):
        layer: type[nn.Module]

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            loop = nn.scan(
                lambda layer, carry, _: (layer(carry)[0], None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            return loop(nn.remat(self.layer)(name="layer"), x, None)[0]

    x = inputs(16, WIDTH)
    variables = Scanned(Scaled).init(jax.random.key(0), x)
    assert_same(Scanned(PlannedScaled).init(jax.random.key(0), x), variables, tolerance=0)

    def gradients(layer: type[nn.Module]) -> Any:
        return jax.jit(jax.grad(lambda v: Scanned(layer).apply(v, x).sum()))(variables)

    assert_same(gradients(PlannedScaled), gradients(Scaled))


def test_hyperparameters_are_part_of_the_program():
    x = inputs(16, WIDTH)
    variables = Scaled().init(jax.random.key(0), x)
    planned = jax_hremat.hremat(Scaled, budget=1.0, **OPTIONS)
    for factor in (2.0, 3.0, 2.0):
        expected = Scaled(factor).apply(variables, x)
        assert_same(planned(factor).apply(variables, x), expected)
    assert len(planned.hremat_plans()) == 2


def test_what_is_returned_is_part_of_the_program():
    class Sown(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Dense(WIDTH)(x)
            self.sow("intermediates", "x", x)
            return jnp.sin(x)

    x = inputs(16, WIDTH)
    planned = jax_hremat.hremat(Sown, budget=1.0, **OPTIONS)
    variables = {"params": planned().init(jax.random.key(0), x)["params"]}
    for mutable in (False, ["intermediates"]):
        expected = Sown().apply(variables, x, mutable=mutable)
        assert_same(planned().apply(variables, x, mutable=mutable), expected)
    fewer, more = (p.certificate.output_bytes for p in planned.hremat_plans())
    assert more >= fewer + x.nbytes


def test_traced_field_is_differentiated():
    x = inputs(16, WIDTH)
    variables = Scaled().init(jax.random.key(0), x)

    def gradient(module: type[nn.Module]) -> Any:
        def loss(factor: jax.Array) -> jax.Array:
            return module(factor).apply(variables, x)[0].sum()

        return jax.jit(jax.grad(loss))(jnp.float32(2.0))

    assert_same(gradient(PlannedScaled), gradient(Scaled))
    assert gradient(PlannedScaled) != 0


def test_static_results_stay_what_they_are():
    x = inputs(16, WIDTH)
    variables = Scaled().init(jax.random.key(0), x)
    for label in ("text", None, 3, (True, 2.5)):
        assert PlannedScaled().apply(variables, x, label=label)[1] == label


def test_shared_module_draws_anew_at_each_call():
    class Twice(nn.Module):
        layer: type[nn.Module]

        def setup(self) -> None:
            self.drop = self.layer(0.5, deterministic=False)

        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.stack([self.drop(x), self.drop(x)])

    x, keys = inputs(16, WIDTH), {"dropout": jax.random.key(7)}
    planned = jax_hremat.hremat(nn.Dropout, budget=1.0, **OPTIONS)
    expected = Twice(nn.Dropout).apply({}, x, rngs=keys)
    assert_same(Twice(planned).apply({}, x, rngs=keys), expected)
    assert not np.array_equal(expected[0], expected[1])
    assert len(planned.hremat_plans()) == 1


def test_class_looks_like_the_original():
    assert PlannedBlock.__name__ == "Block" and PlannedBlock.__module__ == Block.__module__
    assert repr(PlannedBlock(5)) == repr(Block(5))
    assert issubclass(PlannedBlock, Block)
    assert Decorated.__doc__ == "Doc."
    assert Decorated.hremat_plans() == ()
    assert pickle.loads(pickle.dumps(Decorated)) is Decorated
    assert pickle.loads(pickle.dumps(Decorated(4))) == Decorated(4)
    x = inputs(16, WIDTH)
    assert Decorated(4).tabulate(jax.random.key(0), x) is not None
    with pytest.raises(flax.errors.CallCompactUnboundModuleError):
        Decorated()(x)


def test_subclass_of_a_planned_class():
    class Louder(PlannedScaled):
        gain: float = 3.0

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.gain * super().__call__(x)[0]

    x = inputs(16, WIDTH)
    variables = Louder().init(jax.random.key(0), x)
    expected = 3.0 * Scaled().apply(variables, x)[0]
    assert_same(Louder().apply(variables, x), expected)


class Autoencoder(nn.Module):
    """Methods that share submodules, one of them compact in none."""

    def setup(self) -> None:
        self.up = Block()
        self.down = nn.Dense(WIDTH // 2)

    def encode(self, x: jax.Array, train: bool) -> jax.Array:
        return self.down(jnp.sin(self.up(x, train)))

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        return jnp.sum(self.encode(x, train) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "methods", ["encode", pytest.param(("__call__", "encode"), marks=pytest.mark.slow)]
)
def test_other_methods(methods: Any):
    planned = jax_hremat.hremat(Autoencoder, budget=1.0, methods=methods, **OPTIONS)
    x = inputs(64, WIDTH)
    variables = initial(Autoencoder(), x)
    assert_same(initial(planned(), x), variables)
    expected = train_call(Autoencoder(), variables, x)
    assert_same(train_call(planned(), variables, x), expected)
    assert len(planned.hremat_plans()) == (1 if methods == "encode" else 2)
    code = planned().apply(variables, x, False, method="encode")
    assert_same(code, Autoencoder().apply(variables, x, False, method="encode"))
    # For evaluation it is another program.
    assert len(planned.hremat_plans()) == (2 if methods == "encode" else 3)


def test_methods_that_are_none():
    class Odd(nn.Module):
        encode: int = 3

        @property
        def size(self) -> int:
            return 3

    for name, message in [
        ("decode", "`Odd` has no `decode`"),
        ("encode", "`Odd` has no method `encode`"),
        (("size",), "`Odd` has no method `size`"),
        ((), "no method of `Odd` is named"),
    ]:
        with pytest.raises(jax_hremat.UnsupportedProgramError, match=message):
            jax_hremat.linen.remat(Odd, budget=1.0, methods=name)


def test_bad_input_is_refused_when_decorating():
    class Silent(nn.Module):
        features: int = 3

    class Other(nnx.Module):
        def __call__(self) -> None: ...

    with pytest.raises(jax_hremat.UnsupportedProgramError, match="`Silent` has no `__call__`"):
        jax_hremat.hremat(Silent, budget=1.0)
    with pytest.raises(jax_hremat.UnsupportedProgramError, match="linen.*the class `.*Other`"):
        jax_hremat.linen.remat(Other, budget=1.0)
    with pytest.raises(jax_hremat.BudgetFormatError):
        jax_hremat.hremat(Block, budget="70G")
    with pytest.raises(jax_hremat.UnknownTargetError):
        jax_hremat.hremat(Block, budget=1.0, target="h20")


def test_bad_calls_are_refused_when_traced():
    x = inputs(16, WIDTH)
    tight = jax_hremat.hremat(Scaled, budget=100, **OPTIONS)
    variables = tight().init(jax.random.key(0), x)
    with pytest.raises(jax_hremat.InfeasibleBudgetError):
        jax.jit(tight().apply)(variables, x)

    class Positions(nn.Module):
        def __call__(self, tokens: jax.Array) -> jax.Array:
            return jnp.cumsum(tokens != 0, axis=-1)

    planned = jax_hremat.hremat(Positions, budget=1.0, **OPTIONS)
    with pytest.raises(jax_hremat.UnsupportedProgramError, match="nothing to differentiate"):
        planned().apply({}, jnp.ones((2, 8), jnp.int32))
