"""The barrier that no platform drops: a recompute is never merged with the first run."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import normal

from jax_hremat._emit.barrier import barrier
from jax_hremat._emit.checkpoint import checkpoint
from tests.programs import jit_peak_bytes

WEIGHTS = [normal(i, 16, 16) / 4 for i in range(9)]
X = normal(9, 512, 16)


def plain(fun: Callable[..., Any]) -> Callable[..., Any]:
    return fun


def apart(fun: Callable[..., Any]) -> Callable[..., Any]:
    return checkpoint(fun, prevent_cse=True)


def dense(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sin(jnp.tanh(x @ w)) + x


def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
    image = x.reshape(2, 16, 16, 16)
    kernel = jnp.broadcast_to(w, (3, 3, 16, 16)) / 9
    dims = ("NHWC", "HWIO", "NHWC")
    made = jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=dims)
    return jnp.sin(jnp.tanh(made)).reshape(x.shape) + x


def attended(x: jax.Array, w: jax.Array) -> jax.Array:
    tokens = x.reshape(16, 32, 16)
    scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", tokens @ w, tokens))
    return jnp.einsum("bts,bsd->btd", scores, tokens).reshape(x.shape) + x


def scanned(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, _: (dense(x, w), None), x, None, length=4)[0]


def step_of(layer: Callable[..., Any], wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients of nine layers, checkpointed by threes, the innermost ones again."""

    def loss(weights: Any, x: Any) -> Any:
        for start in range(0, 9, 3):
            group = weights[start : start + 3]
            x = wrap(lambda x, *group: reduce(wrap(layer), group, x))(x, *group)
        return (x * x).mean()

    return jax.value_and_grad(loss)


@pytest.mark.parametrize("layer", [dense, convolved, attended])
def test_a_recompute_saves_memory_without_any_option(layer: Callable[..., Any]) -> None:
    steps = [jax.jit(step_of(layer, wrap)) for wrap in (plain, apart)]
    peaks = [jit_peak_bytes(step, WEIGHTS, X) for step in steps]
    assert peaks[1] < 0.7 * peaks[0]
    for a, b in zip(*(jax.tree.leaves(step(WEIGHTS, X)) for step in steps), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("layer", [dense, scanned])
def test_it_is_what_barriers_that_are_kept_make_of_it(layer: Callable[..., Any]) -> None:
    option = {"xla_disable_hlo_passes": "cse_barrier_expander"}
    steps = [
        jax.jit(step_of(layer, apart)),
        jax.jit(step_of(layer, jax.checkpoint), compiler_options=option),
    ]
    ours, jaxs = (jit_peak_bytes(step, WEIGHTS, X) for step in steps)
    if layer is scanned:
        # What scans write into would all be made at the start of the step.
        assert ours < 0.25 * jaxs
    else:
        # Where XLA keeps barriers by itself, it looks at them a little differently.
        assert abs(ours - jaxs) <= 0.02 * jaxs
    for a, b in zip(*(jax.tree.leaves(step(WEIGHTS, X)) for step in steps), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)


def test_a_checkpoint_of_the_users_own_is_left_to_jax() -> None:
    text = jax.jit(step_of(dense, jax.checkpoint)).lower(WEIGHTS, X).as_text()
    assert "optimization_barrier" in text and "hremat" not in text


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(axis_type: AxisType) -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data")))
        steps = [jax.jit(step_of(dense, wrap)) for wrap in (plain, apart)]
        peaks = [jit_peak_bytes(step, WEIGHTS, x) for step in steps]
        assert peaks[1] < 0.8 * peaks[0]
        for a, b in zip(*(jax.tree.leaves(step(WEIGHTS, x)) for step in steps), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)


def test_in_a_shard_map() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def sharded(wrap: Callable[..., Any]) -> Callable[..., Any]:
        def local(weights: Any, x: Any) -> Any:
            return jax.lax.pmean(step_of(dense, wrap)(weights, x)[0], "data")

        specs = (P(), P("data"))
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()))

    np.testing.assert_allclose(sharded(apart)(WEIGHTS, X), sharded(plain)(WEIGHTS, X), rtol=1e-6)


@pytest.mark.parametrize("platforms", [["cuda"], ["cpu", "cuda"]])
def test_other_platforms_get_xlas_own(platforms: list[str]) -> None:
    for step in (step_of(dense, apart), lambda weights, x: barrier([*weights, x])):
        exported = export.export(jax.jit(step), platforms=platforms)(WEIGHTS, X)
        text = exported.mlir_module()
        assert "optimization_barrier" in text and "call @hremat_barrier" not in text


def test_the_barrier_is_the_identity_under_every_transformation() -> None:
    def ours(x: jax.Array, y: jax.Array) -> jax.Array:
        a, b = barrier([jnp.sin(x), y * x])
        return (a * b).sum()

    def theirs(x: jax.Array, y: jax.Array) -> jax.Array:
        return (jnp.sin(x) * (y * x)).sum()

    x, y = X[:4], X[4:8]
    for transform in (jax.jit, jax.grad, jax.hessian, jax.jacfwd, jax.vmap):
        np.testing.assert_allclose(transform(ours)(x, y), transform(theirs)(x, y), rtol=1e-6)
    np.testing.assert_allclose(
        jax.jvp(ours, (x, y), (y, x))[1], jax.jvp(theirs, (x, y), (y, x))[1], rtol=1e-6
    )
    key = jax.random.key(0)
    _, kept = jax.jit(lambda x, k: barrier([x, k]))(x, key)
    assert (jax.random.key_data(kept) == jax.random.key_data(key)).all()
    assert barrier([]) == []
