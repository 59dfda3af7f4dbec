"""Whole training steps, through `jax_hremat.fit_step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import dynamic_scale, train_state

from differential.program import Fitted, adam_state, layers, normal, program, rows, weights


def gelu_layer(x: Any, w: Any) -> Any:
    return jax.nn.gelu(x @ w[0]) @ w[1]


LOSS = layers(gelu_layer)


def params() -> Any:
    return [(normal(8, 32, seed=i), normal(32, 8, seed=i)) for i in range(3)]


def simple(optimizer: Any) -> Callable[[Any], Any]:
    """What everyone writes."""

    def make_step(loss: Any) -> Any:
        def step(state: Any, batch: Any) -> Any:
            params, opt_state = state
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), value

        return step

    return make_step


def with_optimizer(optimizer: Any, **options: Any) -> Fitted:
    return Fitted(
        simple(optimizer), LOSS, lambda: adam_state(params(), optimizer), rows(128), **options
    )


@program(quick=True)
def adamw() -> Fitted:
    return with_optimizer(optax.adamw(1e-3))


@program()
def momentum_clipped_and_scheduled() -> Fitted:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
    return with_optimizer(
        optax.chain(
            optax.clip_by_global_norm(0.5),
            optax.add_decayed_weights(1e-3),
            optax.sgd(schedule, momentum=0.9, nesterov=True),
        )
    )


@program()
def several_small_steps_to_a_large_one() -> Fitted:
    return with_optimizer(optax.MultiSteps(optax.adam(1e-3), 2))


@program()
def skipped_where_not_finite() -> Fitted:
    return with_optimizer(optax.apply_if_finite(optax.adam(1e-3), 3))


@program()
def some_parameters_frozen() -> Fitted:
    labels = [("train", "frozen")] * 3
    optimizers = {"train": optax.adafactor(1e-3), "frozen": optax.set_to_zero()}
    return with_optimizer(optax.multi_transform(optimizers, labels))


@program()
def lion_without_donation() -> Fitted:
    return with_optimizer(optax.lion(1e-4), donate_argnums=())


@program()
def sharpness_aware() -> Fitted:
    """The loss is differentiated twice, at two points."""

    def make_step(loss: Any) -> Any:
        def step(params: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, batch)
            size = optax.tree.norm(grads)
            there = jax.tree.map(lambda p, g: p + 0.05 * g / size, params, grads)
            grads = jax.grad(loss)(there, batch)
            return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

        return step

    return Fitted(make_step, LOSS, lambda: jax.tree.map(jnp.array, params()), rows(128))


@program()
def microbatches_and_averages() -> Fitted:
    """Accumulated in a scan, with an average of the parameters beside them."""
    optimizer = optax.adamw(1e-3)

    def make_step(loss: Any) -> Any:
        def step(state: Any, batch: Any) -> Any:
            (params, opt_state), average = state
            grad = jax.value_and_grad(loss, has_aux=True)

            def add(total: Any, x: Any) -> Any:
                (value, most), grads = grad(params, x)
                return jax.tree.map(jnp.add, total, grads), (value, most)

            zeros = jax.tree.map(jnp.zeros_like, params)
            grads, seen = jax.lax.scan(add, zeros, batch.reshape(4, -1, 8))
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            average = optax.incremental_update(params, average, 0.1)
            return ((params, opt_state), average), seen

        return step

    def loss(params: Any, x: Any) -> Any:
        return LOSS(params, x), x.max()

    def state() -> Any:
        return adam_state(params(), optimizer), jax.tree.map(jnp.array, params())

    return Fitted(make_step, loss, state, rows(256), has_aux=True)


@program()
def linen_train_state_with_dropout() -> Fitted:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool = True) -> Any:
            for _ in range(2):
                h = nn.BatchNorm(use_running_average=not train)(nn.Dense(32)(x))
                h = nn.Dropout(0.2, deterministic=not train)(nn.gelu(h))
                x = x + nn.Dense(8)(h)
            return x

    class State(train_state.TrainState):
        batch_stats: Any
        key: Any

    model = Model()

    def loss(params: Any, batch_stats: Any, key: Any, x: Any) -> Any:
        out, changed = model.apply(
            {"params": params, "batch_stats": batch_stats},
            x,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        return (out**2).mean(), changed["batch_stats"]

    def make_step(loss: Any) -> Any:
        def step(state: State, x: Any) -> Any:
            key, one = jax.random.split(state.key)
            grad = jax.value_and_grad(loss, has_aux=True)
            (value, stats), grads = grad(state.params, state.batch_stats, one, x)
            state = state.apply_gradients(grads=grads, batch_stats=stats, key=key)
            return state, value

        return step

    optimizer = optax.adamw(1e-3)

    def state() -> State:
        variables = model.init(jax.random.key(0), rows(128), train=False)
        return State.create(
            apply_fn=model.apply,
            params=variables["params"],
            tx=optimizer,
            batch_stats=variables["batch_stats"],
            key=jax.random.key(1),
        )

    return Fitted(make_step, loss, state, rows(128), has_aux=True, tolerance=2e-3)


@program()
def scaled_losses_in_half_precision() -> Fitted:
    def loss(params: Any, x: Any) -> Any:
        low = jax.tree.map(lambda p: p.astype(jnp.float16), params)
        return LOSS(low, x.astype(jnp.float16)).astype(jnp.float32)

    def make_step(loss: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            params, scale = state
            scale, finite, value, grads = scale.value_and_grad(loss)(params, x)
            moved = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
            params = jax.tree.map(lambda a, b: jnp.where(finite, a, b), moved, params)
            return (params, scale), (value, finite)

        return step

    def state() -> Any:
        scale = dynamic_scale.DynamicScale(scale=jnp.float32(1024.0))
        return jax.tree.map(jnp.array, params()), scale

    return Fitted(make_step, loss, state, rows(128), tolerance=2e-2)


@program()
def two_networks_against_each_other() -> Fitted:
    """One loss, differentiated by both players."""

    def loss(both: Any, x: Any) -> Any:
        maker, critic = both
        return LOSS([critic[0]], x + LOSS([maker[0]], x)) + LOSS(critic[1:], x) * 0.1

    def make_step(loss: Any) -> Any:
        def step(both: Any, x: Any) -> Any:
            value, (one, other) = jax.value_and_grad(loss)(both, x)
            maker = jax.tree.map(lambda p, g: p + 0.01 * g, both[0], one)
            critic = jax.tree.map(lambda p, g: p - 0.01 * g, both[1], other)
            return (maker, critic), value

        return step

    def state() -> Any:
        return jax.tree.map(jnp.array, (params()[:1], params()))

    return Fitted(make_step, loss, state, rows(128))


@program()
def scanned_layers_unrolled_optimizer() -> Fitted:
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)

    def loss(ws: Any, x: Any) -> Any:
        def body(h: Any, w: Any) -> Any:
            return h + jnp.tanh(h @ w), None

        return (jax.lax.scan(body, x, ws)[0] ** 2).mean()

    return Fitted(simple(optimizer), loss, lambda: adam_state(weights(6), optimizer), rows(128))


@program()
def quasi_newton() -> Fitted:
    """The state starts as the parameters."""
    return with_optimizer(optax.lbfgs(1e-2, linesearch=None), tolerance=1e-3)
