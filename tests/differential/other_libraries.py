"""Equinox and Haiku, as their users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from differential.program import Loss, Uses, Wrap, normal, program, rows, weights


def equinox() -> Any:
    return pytest.importorskip("equinox")


def haiku() -> Any:
    return pytest.importorskip("haiku")


def arrays_of(tree: Any) -> Any:
    """The leaves that can be compared."""
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def mean_square(model: Any, x: Any) -> Any:
    return (jax.vmap(model)(x) ** 2).mean()


def filtered(
    model: Any, *args: Any, loss: Callable[..., Any] = mean_square, **options: Any
) -> Uses:
    """`filter_value_and_grad` of a loss of a module whose leaves need not be arrays."""

    def use(wrap: Wrap) -> Any:
        eqx = equinox()
        planned = wrap(loss, **options)
        step = eqx.filter_jit(eqx.filter_value_and_grad(planned, **options))
        return arrays_of(step(model(), *args))

    return Uses(use, tolerance=1e-4)


@program()
def equinox_mlp() -> Uses:
    eqx = equinox()
    return filtered(lambda: eqx.nn.MLP(8, 8, 16, 3, key=jax.random.key(0)), rows())


@program()
def equinox_sequential_with_functions() -> Uses:
    eqx = equinox()

    def model() -> Any:
        keys = jax.random.split(jax.random.key(0), 2)
        return eqx.nn.Sequential(
            [
                eqx.nn.Linear(8, 16, key=keys[0]),
                eqx.nn.Lambda(jax.nn.gelu),
                eqx.nn.LayerNorm(16),
                eqx.nn.Linear(16, 8, key=keys[1]),
                eqx.nn.Lambda(jnp.tanh),
            ]
        )

    return filtered(model, rows())


@program(quick=True)
def equinox_partitioned() -> Uses:
    """What is no array is taken out first, which works with any transformation."""

    def use(wrap: Wrap) -> Any:
        eqx = equinox()
        model = eqx.nn.MLP(8, 8, 16, 3, activation=jax.nn.silu, key=jax.random.key(0))
        params, static = eqx.partition(model, eqx.is_inexact_array)
        loss = wrap(lambda params, x: mean_square(eqx.combine(params, static), x))
        return arrays_of(wrap.jit(jax.value_and_grad(loss))(params, rows()))

    return Uses(use)


@program()
def equinox_dropout_and_inference() -> Uses:
    def use(wrap: Wrap) -> Any:
        eqx = equinox()

        class Block(eqx.Module):
            up: Any
            dropout: Any
            down: Any

            def __init__(self, key: Any) -> None:
                one, two = jax.random.split(key)
                self.up, self.down = eqx.nn.Linear(8, 32, key=one), eqx.nn.Linear(32, 8, key=two)
                self.dropout = eqx.nn.Dropout(0.2)

            def __call__(self, x: Any, key: Any) -> Any:
                return x + self.down(self.dropout(jax.nn.gelu(self.up(x)), key=key))

        def loss(model: Any, x: Any, key: Any) -> Any:
            return (jax.vmap(model)(x, jax.random.split(key, len(x))) ** 2).mean()

        planned, block = wrap(loss), Block(jax.random.key(0))
        step = eqx.filter_jit(eqx.filter_value_and_grad(planned))
        training = step(block, rows(), jax.random.key(1))
        inference = step(eqx.nn.inference_mode(block), rows(), jax.random.key(1))
        return arrays_of((training, inference))

    return Uses(use)


@program()
def equinox_batch_norm_with_state() -> Uses:
    def use(wrap: Wrap) -> Any:
        eqx = equinox()

        class Model(eqx.Module):
            layers: list[Any]
            norms: list[Any]

            def __init__(self, key: Any) -> None:
                self.layers = [eqx.nn.Linear(8, 8, key=k) for k in jax.random.split(key, 3)]
                self.norms = [eqx.nn.BatchNorm(8, "batch", mode="batch") for _ in self.layers]

            def __call__(self, x: Any, state: Any) -> Any:
                for layer, norm in zip(self.layers, self.norms, strict=True):
                    y, state = norm(layer(x), state)
                    x = x + jnp.tanh(y)
                return x, state

        def loss(model: Any, state: Any, x: Any) -> Any:
            batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            y, state = batched(x, state)
            return (y**2).mean(), state

        model, state = eqx.nn.make_with_state(Model)(jax.random.key(0))
        planned = wrap(loss, has_aux=True)
        step = eqx.filter_jit(eqx.filter_value_and_grad(planned, has_aux=True))
        (value, state), grads = step(model, state, rows())
        return arrays_of((value, state, grads))

    return Uses(use, tolerance=1e-4)


@program()
def equinox_scan_over_layers() -> Uses:
    eqx = equinox()

    def model() -> Any:
        def make(key: Any) -> Any:
            return eqx.nn.MLP(8, 8, 16, 1, activation=jax.nn.relu, key=key)

        return eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 4))

    def loss(model: Any, x: Any) -> Any:
        dynamic, static = eqx.partition(model, eqx.is_array)

        def body(x: Any, layer: Any) -> Any:
            return x + jax.vmap(eqx.combine(layer, static))(x), None

        return (jax.lax.scan(body, x, dynamic)[0] ** 2).mean()

    return filtered(model, rows(), loss=loss)


def transformed(forward: Callable[..., Any], x: Any, **options: Any) -> Loss:
    """A Haiku function with its parameters, state and a key."""
    model = haiku().transform_with_state(forward)
    params, state = model.init(jax.random.key(0), x)

    def loss(params: Any, state: Any, key: Any, x: Any) -> Any:
        out, state = model.apply(params, state, key, x)
        return (out**2).mean(), (state, out)

    args = (params, state, jax.random.key(1), x)
    return Loss(loss, args, has_aux=True, tolerance=1e-4)


@program()
def haiku_with_state_and_dropout() -> Loss:
    hk = haiku()

    def forward(x: Any) -> Any:
        for _ in range(3):
            h = hk.BatchNorm(True, True, 0.9)(hk.Linear(32)(x), is_training=True)
            h = hk.dropout(hk.next_rng_key(), 0.2, jax.nn.gelu(h))
            x = x + hk.Linear(8)(h)
        return x

    return transformed(forward, rows())


@program()
def haiku_recurrent() -> Loss:
    hk = haiku()

    def forward(x: Any) -> Any:
        core = hk.DeepRNN([hk.LSTM(8), jnp.tanh, hk.GRU(8)])
        out, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
        return out

    return transformed(forward, normal(12, 4, 8))


@program()
def haiku_layer_stack() -> Loss:
    hk = haiku()

    def forward(x: Any) -> Any:
        def layer(x: Any) -> Any:
            h = jax.nn.gelu(hk.Linear(32)(hk.LayerNorm(-1, True, True)(x)))
            return x + hk.dropout(hk.next_rng_key(), 0.1, hk.Linear(8)(h))

        return hk.layer_stack(4)(layer)(x)

    return transformed(forward, rows())


@program()
def haiku_scan_and_remat() -> Loss:
    hk = haiku()

    def forward(x: Any) -> Any:
        linear = hk.Linear(8)

        def body(h: Any, _: Any) -> Any:
            return h + jnp.tanh(linear(h)), h.mean()

        x, means = hk.scan(body, x, None, length=4)
        return hk.remat(lambda v: jnp.tanh(hk.Linear(8)(v)))(x) + means.sum()

    return transformed(forward, rows())


@program()
def haiku_attention_and_averages() -> Loss:
    hk = haiku()

    def forward(x: Any) -> Any:
        initializer = hk.initializers.VarianceScaling(1.0)
        for _ in range(2):
            x = x + hk.MultiHeadAttention(2, 4, w_init=initializer, model_size=8)(x, x, x)
        hk.ExponentialMovingAverage(0.9, name="ema")(x.mean())
        return hk.nets.VectorQuantizerEMA(8, 4, 0.25, 0.9)(x, is_training=True)["quantize"]

    return transformed(forward, normal(2, 12, 8))


@program()
def haiku_cond_and_shared_modules() -> Loss:
    hk = haiku()

    def forward(x: Any) -> Any:
        shared = hk.nets.MLP([16, 8], activation=jnp.sin)
        x = shared(shared(x))
        return hk.cond(x.sum() > 0, lambda v: shared(v), lambda v: v * 2, x)

    return transformed(forward, rows())


@program()
def optax_losses() -> Loss:
    def loss(params: Any, x: Any, labels: Any) -> Any:
        for w in params[:-1]:
            x = x + jax.nn.gelu(x @ w)
        logits = x @ params[-1]
        total = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        total += optax.huber_loss(logits, jnp.sin(logits)).mean()
        total += optax.sigmoid_focal_loss(logits, jax.nn.one_hot(labels, 8)).mean()
        frames = logits.reshape(4, 16, 8)
        zeros = jnp.zeros((4, 16))
        tokens = labels.reshape(4, 16)[:, :3] % 7 + 1
        total += optax.ctc_loss(frames, zeros, tokens, jnp.zeros((4, 3))).mean() * 1e-2
        return total + optax.tree.norm(params) * 1e-3

    args = (list(weights()), rows(), jnp.arange(64) % 8)
    return Loss(loss, args, tolerance=1e-4)
