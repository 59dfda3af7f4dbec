"""What a rematerialized computation writes into is filled no earlier than it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import jit_peak_bytes, normal, plain_layers

from jax_hremat._emit.checkpoint import checkpoint
from jax_hremat._emit.destinations import with_filled_destinations
from jax_hremat._jax.jaxprs import jaxpr_consts, open_jaxpr
from jax_hremat._xla.compile import compile_flat
from jax_hremat._xla.target import Target

QUICK_COMPILE = {"xla_backend_optimization_level": 0}
NUM_LAYERS, ROWS, WIDTH = 8, 512, 64
WEIGHTS = [normal(i, WIDTH, WIDTH) / 8 for i in range(NUM_LAYERS)]
X = normal(9, ROWS, WIDTH)
CHOSEN = jnp.asarray(np.random.default_rng(10).integers(0, ROWS, 32), jnp.int32)
ARRAY_BYTES = X.size * X.itemsize

Layer = Callable[[jax.Array, jax.Array], jax.Array]


def added_to(x: jax.Array, some: jax.Array) -> jax.Array:
    return x + jnp.pad(some, ((0, len(x) - len(some)), (0, 0)))


def gathered(x: jax.Array, w: jax.Array) -> jax.Array:
    return added_to(x, jnp.tanh(x @ w)[CHOSEN])


def scattered(x: jax.Array, w: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ w)
    return x + jnp.zeros_like(h).at[CHOSEN].set(h[: len(CHOSEN)]) * h


def sliced(x: jax.Array, w: jax.Array) -> jax.Array:
    start = jnp.argmax(w[0])
    return added_to(x, jax.lax.dynamic_slice(jnp.tanh(x @ w), (start, 0), (32, WIDTH)))


def scanned(x: jax.Array, w: jax.Array) -> jax.Array:
    def step(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = jnp.tanh(carry @ w + row)
        return carry, jnp.sin(carry)

    return x + jax.lax.scan(step, jnp.zeros(WIDTH), x)[1]


def pooled(x: jax.Array, w: jax.Array) -> jax.Array:
    h = jax.nn.relu(x @ w)
    window = (2, 1)
    return x + jnp.repeat(
        jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, window, window, "SAME"), 2, 0
    )


def with_keys(x: jax.Array, w: jax.Array) -> jax.Array:
    def step(key: jax.Array, row: jax.Array) -> tuple[jax.Array, Any]:
        key, own = jax.random.split(key)
        return key, (row * jax.random.uniform(own, row.shape), own)

    rows, keys = jax.lax.scan(step, jax.random.key(0), jnp.tanh(x @ w))[1]
    return x + rows * jax.random.key_data(keys)[:, :1].astype(x.dtype) * 1e-9


LAYERS = [gathered, scattered, sliced, scanned, pooled, with_keys]


def apart(layer: Layer) -> Layer:
    return checkpoint(layer, prevent_cse=True)


def nested(layer: Layer) -> Layer:
    return apart(lambda x, w: apart(layer)(apart(layer)(x, w), w))


def twice(layer: Layer) -> Layer:
    return lambda x, w: layer(layer(x, w), w)


CASES: list[Any] = [(layer, apart, lambda layer: layer) for layer in LAYERS]
CASES += [
    (scattered, nested, twice),
    pytest.param(scanned, nested, twice, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("layer, wrap, plain", CASES)
def test_values_and_gradients_are_those_of_the_function(
    layer: Layer, wrap: Callable[[Layer], Layer], plain: Callable[[Layer], Layer]
) -> None:
    ours, theirs = (plain_layers(how(layer)) for how in (wrap, plain))
    for transform in (jax.value_and_grad, lambda f: jax.vmap(jax.grad(f), in_axes=(None, 0))):
        x = X if transform is jax.value_and_grad else jnp.stack([X, X[::-1]])
        steps = [jax.jit(transform(f), compiler_options=QUICK_COMPILE) for f in (ours, theirs)]
        results = [jax.tree.leaves(step(WEIGHTS[:2], x)) for step in steps]
        for a, b in zip(*results, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


# With JAX 0.12, some of the copies that gathers need fit where other temporaries were.
@pytest.mark.parametrize(
    "layer, part", [pytest.param(gathered, 0.4, marks=pytest.mark.slow), (scanned, 0.9)]
)
def test_no_copy_for_each_layer_is_made_at_the_start(
    layer: Layer, part: float, h200: Target
) -> None:
    ours, theirs = (plain_layers(how(layer)) for how in (apart, jax.checkpoint))
    args = jax.eval_shape(lambda: (WEIGHTS, X))

    def peak_bytes(loss: Callable[..., Any]) -> int:
        leaves, tree = jax.tree.flatten(args)
        step = lambda *flat: jax.value_and_grad(loss)(*jax.tree.unflatten(tree, flat))  # noqa: E731
        return compile_flat(step, leaves, h200).memory.peak_bytes

    # All but the copies of the layer whose turn it is.
    assert peak_bytes(ours) <= peak_bytes(theirs) - part * (NUM_LAYERS - 1) * ARRAY_BYTES


def test_a_users_own_checkpoint_is_left_to_jax() -> None:
    step = jax.jit(jax.value_and_grad(plain_layers(jax.checkpoint(scanned))))
    ours = jax.jit(jax.value_and_grad(plain_layers(apart(scanned))))
    before = step.lower(WEIGHTS, X).as_text()
    ours.lower(WEIGHTS, X)
    assert step.lower(WEIGHTS, X).as_text() == before
    assert jit_peak_bytes(ours, WEIGHTS, X) < jit_peak_bytes(step, WEIGHTS, X)


def test_each_fill_is_one_input_and_what_is_not_overwritten_has_none() -> None:
    def pulled(x: jax.Array, y: jax.Array) -> Any:
        zeros = jnp.zeros_like(x)
        ones = jnp.full_like(x, 1.5)
        counts = jnp.zeros(x.shape, jnp.int32).at[CHOSEN].add(1)
        return zeros.at[CHOSEN].add(y[CHOSEN]), ones.at[:4].set(0.0), counts, y * ones, -zeros

    closed = jax.make_jaxpr(pulled)(X, X)
    jaxpr, values = with_filled_destinations(open_jaxpr(closed), on_cpu=False)
    assert [(v.dtype.name, float(v)) for v in values] == [
        ("float32", 0.0),
        ("float32", 1.5),
        ("int32", 0.0),
    ]
    assert len(jaxpr.invars) == len(open_jaxpr(closed).invars) + 3
    consts = jaxpr_consts(closed)
    filled = jax.core.eval_jaxpr(jaxpr, consts, X, 2 * X, *values)
    for a, b in zip(filled, pulled(X, 2 * X), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_computation_without_destinations_is_unchanged() -> None:
    jaxpr = open_jaxpr(jax.make_jaxpr(lambda x: jnp.where(x > 0, x, 0.0) @ x.T)(X))
    same, values = with_filled_destinations(jaxpr, on_cpu=True)
    assert str(same) == str(jaxpr) and values == []
