"""Random numbers: a recomputed draw is the first one, and keys come out as they would."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from differential.program import Loss, Uses, Wrap, normal, program, rows, weights


def dropout(key: Any, x: Any, keep: float = 0.8) -> Any:
    return jnp.where(jax.random.bernoulli(key, keep, x.shape), x / keep, 0)


def split_loss(ws: Any, x: Any, key: Any) -> Any:
    """A key for each layer; what is left comes out."""
    for w in ws:
        key, one = jax.random.split(key)
        x = x + dropout(one, jnp.tanh(x @ w))
    return (x * x).mean(), key


def folded_loss(ws: Any, x: Any, key: Any) -> Any:
    for layer, w in enumerate(ws):
        x = x + dropout(jax.random.fold_in(key, layer), jnp.tanh(x @ w))
    return (x * x).mean()


@program()
def typed_keys_split() -> Loss:
    return Loss(split_loss, (list(weights(3)), rows(), jax.random.key(0)), has_aux=True)


@program()
def raw_keys_split() -> Loss:
    return Loss(split_loss, (list(weights(3)), rows(), jax.random.PRNGKey(0)), has_aux=True)


@program()
def typed_keys_folded() -> Loss:
    return Loss(folded_loss, (list(weights(3)), rows(), jax.random.key(0)))


@program()
def keys_of_the_hardware() -> Loss:
    key = jax.random.key(0, impl="rbg")
    return Loss(split_loss, (list(weights(3)), rows(), key), has_aux=True)


@program()
def keys_of_the_hardware_unsafe() -> Loss:
    key = jax.random.key(0, impl="unsafe_rbg")
    return Loss(split_loss, (list(weights(3)), rows(), key), has_aux=True)


@program()
def a_key_closed_over() -> Loss:
    key = jax.random.key(4)
    return Loss(lambda ws, x: folded_loss(ws, x, key), (list(weights(3)), rows()))


@program()
def keys_in_the_carry_of_a_scan() -> Loss:
    def loss(ws: Any, x: Any, key: Any) -> Any:
        def body(carry: Any, w: Any) -> Any:
            h, key = carry
            key, one = jax.random.split(key)
            return (h + dropout(one, jnp.tanh(h @ w)), key), jax.random.normal(one)

        (h, key), noise = lax.scan(body, (x, key), ws)
        return (h * h).mean() + noise.sum(), (key, noise)

    return Loss(loss, (weights(4), rows(), jax.random.key(1)), has_aux=True)


@program()
def keys_given_to_a_scan() -> Loss:
    def loss(ws: Any, x: Any, key: Any) -> Any:
        def body(h: Any, xs: Any) -> Any:
            w, one = xs
            return h + dropout(one, jnp.tanh(h @ w)), None

        return (lax.scan(body, x, (ws, jax.random.split(key, len(ws))))[0] ** 2).mean()

    return Loss(loss, (weights(4), rows(), jax.random.key(1)))


@program()
def raw_keys_in_a_scan_unrolled() -> Loss:
    def loss(ws: Any, x: Any, key: Any) -> Any:
        def body(h: Any, xs: Any) -> Any:
            w, one = xs
            return h + dropout(one, jnp.tanh(h @ w)), one

        h, used = lax.scan(body, x, (ws, jax.random.split(key, len(ws))), unroll=2)
        return (h * h).mean(), used

    return Loss(loss, (weights(4), rows(), jax.random.PRNGKey(1)), has_aux=True)


@program()
def uniform_with_hidden_state() -> Uses:
    """Its draws cannot be compared; its gradient can with the draw that comes out."""

    def loss(ws: Any, x: Any) -> Any:
        masks = []
        for w in ws:
            mask = lax.rng_uniform(0.0, 1.0, x.shape)
            x = x + jnp.tanh(x @ w) * mask
            masks.append(mask)
        return (x * x).mean(), masks

    def given(ws: Any, x: Any, masks: Any) -> Any:
        for w, mask in zip(ws, masks, strict=True):
            x = x + jnp.tanh(x @ w) * mask
        return (x * x).mean()

    args = (list(weights(5)), rows())

    def use(wrap: Wrap) -> Any:
        step = jax.value_and_grad(wrap(loss, has_aux=True), has_aux=True)
        (value, masks), grads = wrap.jit(step)(*args)
        expected, right = jax.jit(jax.value_and_grad(given))(*args, masks)
        diff = [jnp.abs(g - r).max() for g, r in zip(grads, right, strict=True)]
        return abs(value - expected) < 1e-5, jnp.stack(diff).max() < 1e-5

    return Uses(use)


@program()
def every_distribution() -> Loss:
    def loss(params: Any, x: Any, key: Any) -> Any:
        keys = jax.random.split(key, 8)
        h = x @ params["w"]
        h = h + jax.random.normal(keys[0], h.shape) + jax.random.laplace(keys[1], h.shape)
        h = jnp.tanh(h) + jax.random.truncated_normal(keys[2], -1.0, 1.0, h.shape)
        picked = jax.random.categorical(keys[3], h)
        h = h[jax.random.permutation(keys[4], len(h))] * jax.random.rademacher(keys[5], h.shape)
        h = h + jax.random.gumbel(keys[6], h.shape)
        return (h**2).mean(), (picked, jax.random.poisson(keys[7], 3.0, (4,)))

    return Loss(loss, ({"w": normal(8, 8)}, rows(), jax.random.key(2)), has_aux=True)


@program()
def draws_with_gradients_of_their_own() -> Loss:
    """Samples of a gamma distribution are differentiated by their shape."""

    def loss(params: Any, key: Any) -> Any:
        shape = jnp.exp(params["a"])
        draws = jax.random.gamma(key, shape, (64, 8))
        return (jnp.tanh(draws @ params["w"]) ** 2).mean()

    return Loss(loss, ({"a": normal(8), "w": normal(8, 8)}, jax.random.key(2)), tolerance=1e-4)


@program()
def keys_under_vmap() -> Loss:
    def loss(ws: Any, xs: Any, key: Any) -> Any:
        def one(x: Any, key: Any) -> Any:
            for w in ws:
                key, here = jax.random.split(key)
                x = x + dropout(here, jnp.tanh(x @ w))
            return x

        return (jax.vmap(one)(xs, jax.random.split(key, len(xs))) ** 2).mean()

    return Loss(loss, (list(weights(3)), rows(), jax.random.key(3)))


@program()
def keys_made_from_data() -> Loss:
    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            seed = (jnp.abs(x[0, 0]) * 100).astype(jnp.uint32)
            x = x + dropout(jax.random.key(seed), jnp.tanh(x @ w))
        return (x * x).mean()

    return Loss(loss, (list(weights(3)), rows()))


@program()
def key_data_and_back() -> Loss:
    def loss(ws: Any, x: Any, key: Any) -> Any:
        for w in ws:
            data = jax.random.key_data(key)
            key = jax.random.wrap_key_data(data + jnp.uint32(1))
            x = x + dropout(key, jnp.tanh(x @ w))
        return (x * x).mean(), (key, data)

    return Loss(loss, (list(weights(3)), rows(), jax.random.key(3)), has_aux=True)


@program()
def key_in_a_branch() -> Loss:
    def loss(ws: Any, x: Any, key: Any) -> Any:
        for w in ws:
            key, one = jax.random.split(key)
            x = x + lax.cond(
                x[0, 0] > 0,
                lambda v, one: dropout(one, jnp.tanh(v)),
                lambda v, one: v * jax.random.uniform(one),
                x @ w,
                one,
            )
        return (x * x).mean(), key

    return Loss(loss, (list(weights(3)), rows(), jax.random.key(1)), has_aux=True)
