"""Derivative rules of a user's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from differential.program import Loss, layered, normal, program, rows, weights


@program(quick=True)
def jvp_of_one_argument() -> Loss:
    @jax.custom_jvp
    def softplus(v: Any) -> Any:
        return jnp.log1p(jnp.exp(v))

    softplus.defjvp(lambda p, t: (softplus(*p), jax.nn.sigmoid(p[0]) * t[0] * 0.9))
    return layered(lambda x, w: softplus(x @ w))


@program()
def jvps_of_each_argument() -> Loss:
    @jax.custom_jvp
    def product(v: Any, w: Any) -> Any:
        return jnp.sin(v @ w)

    product.defjvps(
        lambda t, ans, v, w: (t @ w) * jnp.cos(v @ w), lambda t, ans, v, w: (v @ t) * (1 - ans)
    )
    return layered(product)


@program()
def jvp_with_static_arguments() -> Loss:
    @partial(jax.custom_jvp, nondiff_argnums=(0, 2))
    def powered(function: Any, v: Any, times: int) -> Any:
        return function(v) ** times

    @powered.defjvp
    def rule(function: Any, times: int, primals: Any, tangents: Any) -> Any:
        (v,), (t,) = primals, tangents
        return powered(function, v, times), times * function(v) * t

    return layered(lambda x, w: powered(jnp.tanh, x @ w, 2))


@program()
def jvp_with_symbolic_zeros() -> Loss:
    @jax.custom_jvp
    def scaled(v: Any, by: Any) -> Any:
        return jnp.tanh(v) * by

    def rule(primals: Any, tangents: Any) -> Any:
        v, by = primals
        t, t_by = tangents
        out = jnp.tanh(v) * by
        moved = (1 - jnp.tanh(v) ** 2) * by * t
        if not isinstance(t_by, SymbolicZero):
            moved = moved + jnp.tanh(v) * t_by
        return out, moved

    scaled.defjvp(rule, symbolic_zeros=True)
    return layered(lambda x, w: scaled(x @ w, 0.7))


@program()
def vjp_with_clipped_gradient() -> Loss:
    @jax.custom_vjp
    def clipped(v: Any) -> Any:
        return jnp.sin(v) * v

    def forward(v: Any) -> Any:
        return clipped(v), (jnp.cos(v), v)

    def backward(kept: Any, g: Any) -> Any:
        return (jnp.clip(g * kept[0] * kept[1], -1e-3, 1e-3),)

    clipped.defvjp(forward, backward)
    return layered(lambda x, w: clipped(x @ w))


@program()
def vjp_with_static_arguments() -> Loss:
    @partial(jax.custom_vjp, nondiff_argnums=(1, 2))
    def layer(v: Any, function: Any, config: Any) -> Any:
        return function(v) * config["scale"]

    def forward(v: Any, function: Any, config: Any) -> Any:
        return layer(v, function, config), v

    def backward(function: Any, config: Any, v: Any, g: Any) -> Any:
        return (jax.vjp(function, v)[1](g)[0] * config["scale"] * 0.5,)

    layer.defvjp(forward, backward)
    return layered(lambda x, w: layer(x @ w, jnp.tanh, {"scale": 0.7, "name": "a"}))


@program()
def vjp_with_symbolic_zeros() -> Loss:
    @jax.custom_vjp
    def product(v: Any, w: Any) -> Any:
        return jnp.tanh(v @ w)

    def forward(v: Any, w: Any) -> Any:
        return product(v.value, w.value), (v.value, w.value, w.perturbed)

    def backward(kept: Any, g: Any) -> Any:
        v, w, perturbed = kept
        if isinstance(g, SymbolicZero):
            return None, None
        g = g * (1 - jnp.tanh(v @ w) ** 2)
        return g @ w.T, (v.T @ g if perturbed else None)

    product.defvjp(forward, backward, symbolic_zeros=True)
    constant = normal(8, 8, seed=9)
    return layered(lambda x, w: product(product(x, w), constant))


@program()
def vjp_optimized_for_remat() -> Loss:
    @jax.custom_vjp
    def norm(v: Any) -> Any:
        return v * lax.rsqrt((v * v).mean(-1, keepdims=True) + 1e-3)

    def forward(v: Any) -> Any:
        inverse = lax.rsqrt((v * v).mean(-1, keepdims=True) + 1e-3)
        return v * inverse, (v, inverse)

    def backward(kept: Any, g: Any) -> Any:
        v, inverse = kept
        return (g * inverse - v * inverse**3 * (g * v).mean(-1, keepdims=True),)

    norm.defvjp(forward, backward, optimize_remat=True)
    return layered(lambda x, w: norm(jnp.tanh(x @ w)))


@program()
def vjp_made_inside_the_loss() -> Loss:
    """The rule closes over what the layer computes on."""

    def layer(x: Any, w: Any) -> Any:
        @jax.custom_vjp
        def scaled(v: Any, by: Any) -> Any:
            return jnp.sin(v) * by

        scaled.defvjp(
            lambda v, by: (scaled(v, by), (v, by)),
            lambda kept, g: (g * jnp.cos(kept[0]) * kept[1] * 0.5, (g * jnp.sin(kept[0])).sum()),
        )
        return scaled(x @ w, jnp.abs(w).mean())

    return layered(layer)


@program()
def vjp_in_a_vjp() -> Loss:
    @jax.custom_vjp
    def inner(v: Any) -> Any:
        return jnp.tanh(v)

    inner.defvjp(lambda v: (jnp.tanh(v), v), lambda v, g: (g * jnp.exp(-v * v),))

    @jax.custom_vjp
    def outer(v: Any) -> Any:
        return inner(inner(v))

    def backward(kept: Any, g: Any) -> Any:
        return (0.5 * kept(g)[0],)

    outer.defvjp(lambda v: jax.vjp(lambda u: inner(inner(u)), v), backward)
    return layered(lambda x, w: outer(x @ w))


@program()
def jvp_in_a_vjp_in_a_scan() -> Loss:
    @jax.custom_jvp
    def soft(v: Any) -> Any:
        return jnp.log1p(jnp.exp(v))

    soft.defjvp(lambda p, t: (soft(*p), jax.nn.sigmoid(p[0]) * t[0]))

    @jax.custom_vjp
    def layer(v: Any, w: Any) -> Any:
        return soft(v @ w)

    def backward(kept: Any, g: Any) -> Any:
        v, w = kept
        g = g * jax.nn.sigmoid(v @ w)
        return g @ w.T, v.T @ g

    layer.defvjp(lambda v, w: (layer(v, w), (v, w)), backward)

    def loss(ws: Any, x: Any) -> Any:
        h, sums = lax.scan(lambda h, w: (0.5 * layer(h, w) + h, h.mean()), x, ws)
        return (h * h).mean() + sums.sum()

    return Loss(loss, (weights(5) * 0.3, rows()))


@program()
def vjp_that_keeps_integers() -> Loss:
    @jax.custom_vjp
    def best(v: Any) -> Any:
        return v.max(-1)

    def forward(v: Any) -> Any:
        return v.max(-1), (v.argmax(-1), jnp.zeros((0, v.shape[-1])))

    def backward(kept: Any, g: Any) -> Any:
        index, shape = kept
        return (jax.nn.one_hot(index, shape.shape[-1]) * g[:, None],)

    best.defvjp(forward, backward)
    return layered(lambda x, w: jnp.tanh(x @ w) * best(x @ w)[:, None])


@program()
def vjp_of_an_integer_argument() -> Loss:
    @jax.custom_vjp
    def look_up(table: Any, index: Any) -> Any:
        return table[index]

    def forward(table: Any, index: Any) -> Any:
        return table[index], (jnp.zeros((table.shape[0], 0)), index)

    def backward(kept: Any, g: Any) -> Any:
        shape, index = kept
        return jnp.zeros((shape.shape[0], g.shape[1])).at[index].add(g), None

    look_up.defvjp(forward, backward)

    def loss(params: Any, index: Any) -> Any:
        x = look_up(params["table"], index)
        for w in params["ws"]:
            x = x + jnp.tanh(x @ w)
        return (x * x).mean()

    params = {"table": normal(5, 8), "ws": list(weights())}
    return Loss(loss, (params, jnp.arange(64) % 5))


@program(quick=True)
def straight_through_rounding() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        v = jnp.tanh(x @ w)
        return v + lax.stop_gradient(jnp.round(v * 8) / 8 - v)

    # Where a fusion moves a value over the edge, an eighth changes hands.
    return layered(layer)


@program()
def custom_gradient_of_a_closure() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        @jax.custom_gradient
        def reversed_gradient(v: Any) -> Any:
            return v, lambda g: -0.5 * g

        return jnp.tanh(reversed_gradient(x) @ w)

    return layered(layer)


@program()
def closure_converted() -> Loss:
    """A rule over a function that closes over traced values."""

    def layer(x: Any, w: Any) -> Any:
        def inside(v: Any) -> Any:
            return jnp.tanh(v @ w)

        function, consts = jax.closure_convert(inside, x)

        @partial(jax.custom_vjp, nondiff_argnums=(0,))
        def twice(function: Any, v: Any, *consts: Any) -> Any:
            return function(function(v, *consts), *consts)

        def forward(function: Any, v: Any, *consts: Any) -> Any:
            return twice(function, v, *consts), (v, consts)

        def backward(function: Any, kept: Any, g: Any) -> Any:
            v, consts = kept
            _, pull = jax.vjp(lambda v, *c: function(function(v, *c), *c), v, *consts)
            return pull(g)

        twice.defvjp(forward, backward)
        return twice(function, x, *consts)

    return layered(layer)


@program()
def linear_call_transposed_by_hand() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        def forward(w: Any, v: Any) -> Any:
            return v @ w

        def transposed(w: Any, g: Any) -> Any:
            return g @ w.T

        out = jax.custom_derivatives.linear_call(forward, transposed, lax.stop_gradient(w), x)
        return jnp.tanh(out) * jnp.sin(x @ w)

    return layered(layer)


@program()
def fixed_point_by_the_implicit_function() -> Loss:
    def settle(w: Any, x: Any) -> Any:
        return lax.while_loop(
            lambda s: s[1] < 30, lambda s: (jnp.tanh(s[0] @ w * 0.2 + x), s[1] + 1), (x, 0)
        )[0]

    @jax.custom_vjp
    def fixed(w: Any, x: Any) -> Any:
        return settle(w, x)

    def forward(w: Any, x: Any) -> Any:
        z = settle(w, x)
        return z, (w, x, z)

    def backward(kept: Any, g: Any) -> Any:
        w, x, z = kept
        pull = jax.vjp(lambda v: jnp.tanh(v @ w * 0.2 + x), z)[1]
        u = lax.fori_loop(0, 30, lambda _, u: g + pull(u)[0], g)
        return jax.vjp(lambda w, x: jnp.tanh(z @ w * 0.2 + x), w, x)[1](u)

    fixed.defvjp(forward, backward)
    return layered(lambda x, w: fixed(w, x))


@program()
def a_users_checkpoint_around_rules() -> Loss:
    @jax.custom_vjp
    def rule(v: Any) -> Any:
        return jnp.tanh(v)

    rule.defvjp(lambda v: (jnp.tanh(v), v), lambda v, g: (g * jnp.exp(-v * v),))
    policy = jax.checkpoint_policies.nothing_saveable
    return layered(jax.checkpoint(lambda x, w: rule(rule(x @ w)), policy=policy))
