"""On eight devices of the host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from differential.program import Loss, Uses, Wrap, layers, normal, program, weights

AXES = ("data", "model")


def mesh_of(*axis_types: AxisType) -> Any:
    return jax.make_mesh((4, 2), AXES, axis_types=axis_types or (AxisType.Auto,) * 2)


def put(mesh: Any, array: Any, *spec: Any) -> Any:
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def shared(tree: Any) -> Any:
    """A step whose gradients lie as their arguments do."""
    return (None, jax.tree.map(lambda leaf: leaf.sharding, tree))


def batch() -> Any:
    return normal(64, 8, seed=1)


@program(cost="compiled", quick=True)
def data_parallel() -> Loss:
    mesh = mesh_of()
    ws = [put(mesh, w) for w in weights()]
    loss = layers(lambda x, w: jnp.tanh(x @ w))
    return Loss(loss, (ws, put(mesh, batch(), "data")), out_shardings=shared(ws))


@program(cost="compiled")
def weights_split_over_the_mesh() -> Loss:
    mesh = mesh_of()
    ws = [put(mesh, normal(2, 8, 8, seed=i), None, "model") for i in range(3)]

    def layer(x: Any, w: Any) -> Any:
        return jax.nn.gelu(x @ w[0]) @ w[1]

    args = (ws, put(mesh, batch(), "data"))
    return Loss(layers(layer), args, out_shardings=shared(ws))


@program(cost="compiled")
def constrained_inside() -> Loss:
    mesh = mesh_of()
    ws = [put(mesh, w, "model") for w in weights()]

    def layer(x: Any, w: Any) -> Any:
        w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
        y = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("data", None)))
        return jnp.tanh(y)

    args = (ws, put(mesh, batch(), "data"))
    return Loss(layers(layer), args, out_shardings=shared(ws))


@program(cost="compiled")
def mapped_by_hand() -> Loss:
    mesh = mesh_of()
    ws = [(put(mesh, normal(8, 16), None, "model"), put(mesh, normal(16, 8), "model"))] * 2

    def layer(x: Any, w: Any) -> Any:
        def own(x: Any, one: Any, two: Any) -> Any:
            return jax.lax.psum(jax.nn.gelu(x @ one) @ two, "model")

        specs = (P("data"), P(None, "model"), P("model"))
        return jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=P("data"))(x, *w)

    args = (ws, put(mesh, batch(), "data"))
    return Loss(layers(layer), args, out_shardings=shared(ws))


def _weighted(check_vma: bool) -> Loss:
    """Attention with a rule of its own, each device on its rows and columns."""
    mesh = mesh_of()
    ws = [put(mesh, normal(8, 16), None, "model")] * 3

    @jax.custom_vjp
    def attend(x: Any) -> Any:
        return jax.nn.softmax(x @ x.T) @ x

    def forward(x: Any) -> Any:
        scores = x @ x.T
        total = jax.nn.logsumexp(scores, -1, keepdims=True)
        out = jnp.exp(scores - total) @ x
        return out, (x, total, out)

    def backward(kept: Any, g: Any) -> Any:
        x, total, out = kept
        weights = jnp.exp(x @ x.T - total)
        inner = weights * (g @ x.T - (g * out).sum(-1, keepdims=True))
        return (weights.T @ g + inner @ x + inner.T @ x,)

    attend.defvjp(forward, backward)

    def layer(x: Any, w: Any) -> Any:
        def own(x: Any, w: Any) -> Any:
            return jax.lax.psum(attend(jnp.tanh(x @ w)) @ w.T, "model")

        specs = (P("data"), P(None, "model"))
        mapped = jax.shard_map(
            own, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=check_vma
        )
        return x + mapped(x, w)

    args = (ws, put(mesh, batch(), "data"))
    return Loss(layers(layer), args, out_shardings=shared(ws))


@program(cost="compiled")
def mapped_rule() -> Loss:
    return _weighted(check_vma=True)


@program(cost="compiled")
def mapped_rule_of_unchecked_types() -> Loss:
    return _weighted(check_vma=False)


@program(cost="compiled")
def mapped_in_a_scan() -> Loss:
    mesh = mesh_of()

    def loss(ws: Any, x: Any) -> Any:
        def own(x: Any, w: Any) -> Any:
            return x + jax.lax.pmean(jnp.tanh(x @ w), "model")

        def body(x: Any, w: Any) -> Any:
            specs = (P("data"), P())
            return jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=P("data"))(x, w), None

        return (jax.lax.scan(body, x, ws)[0] ** 2).mean()

    ws = put(mesh, weights())
    return Loss(loss, (ws, put(mesh, batch(), "data")), out_shardings=shared(ws))


@program(cost="compiled")
def constrained_with_plain_arguments() -> Loss:
    mesh = mesh_of()

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("data"))))

    return Loss(layers(layer), (list(weights()), batch()))


@program(cost="compiled")
def mapped_with_plain_arguments() -> Loss:
    mesh = mesh_of()

    def layer(x: Any, w: Any) -> Any:
        specs = (P("data"), P())
        return jax.shard_map(
            lambda x, w: jnp.tanh(x @ w), mesh=mesh, in_specs=specs, out_specs=P("data")
        )(x, w)

    return Loss(layers(layer), (list(weights()), batch()))


@program(cost="compiled")
def explicit_axes() -> Loss:
    mesh = mesh_of(AxisType.Explicit, AxisType.Explicit)
    ws = [put(mesh, w) for w in weights()]
    args = (ws, put(mesh, batch(), "data"))
    return Loss(layers(lambda x, w: jnp.tanh(x @ w)), args, out_shardings=shared(ws))


@program(cost="compiled")
def planned_inside_a_mapping() -> Uses:
    """Each device runs the planned loss on its rows."""
    mesh = mesh_of()
    loss = layers(lambda x, w: jnp.tanh(x @ w))

    def use(wrap: Wrap) -> Any:
        planned = wrap(loss)

        def own(ws: Any, x: Any) -> Any:
            value, grads = jax.value_and_grad(planned)(ws, x)
            return jax.lax.pmean(value, AXES), jax.lax.pmean(grads, AXES)

        mapped = jax.shard_map(own, mesh=mesh, in_specs=(P(), P(AXES)), out_specs=P())
        return wrap.jit(mapped)(list(weights()), batch())

    return Uses(use)


@program(cost="compiled")
def planned_scan_inside_a_mapping() -> Uses:
    mesh = mesh_of()

    def loss(ws: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            return x + jnp.tanh(x @ w), x.mean()

        x, means = jax.lax.scan(body, x, ws)
        return (x**2).mean() + means.sum()

    def use(wrap: Wrap) -> Any:
        planned = wrap(loss)

        def own(ws: Any, x: Any) -> Any:
            value, grads = jax.value_and_grad(planned)(ws, x)
            return jax.lax.pmean(value, AXES), jax.lax.pmean(grads, AXES)

        mapped = jax.shard_map(own, mesh=mesh, in_specs=(P(), P(AXES)), out_specs=P())
        return wrap.jit(mapped)(weights(), batch())

    return Uses(use)
