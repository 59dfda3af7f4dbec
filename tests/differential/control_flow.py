"""Loops and branches, with every flag."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from differential.program import Loss, layered, normal, program, rows, weights


def cell(h: Any, w: Any) -> Any:
    h = h + jnp.tanh(h @ w)
    return h, jnp.sin(h).sum()


def over_layers(**flags: Any) -> Loss:
    """A scan over layers, with the scan's flags, after a layer of its own."""

    def loss(ws: Any, x: Any) -> Any:
        h, sums = lax.scan(cell, jnp.sin(x @ ws[0]), ws, **flags)
        return (h * h).mean() + (sums * jnp.arange(len(ws))).sum() * 1e-2

    return Loss(loss, (weights(6), rows()))


@program()
def scan_plain() -> Loss:
    return over_layers()


@program()
def scan_reverse() -> Loss:
    return over_layers(reverse=True)


@program()
def scan_unrolled_by_two() -> Loss:
    return over_layers(unroll=2)


@program()
def scan_unrolled_by_what_does_not_divide() -> Loss:
    return over_layers(unroll=4)


@program()
def scan_unrolled_whole() -> Loss:
    return over_layers(unroll=True)


@program()
def scan_reverse_unrolled() -> Loss:
    return over_layers(reverse=True, unroll=3)


@program()
def scan_transposed_apart() -> Loss:
    return over_layers(_split_transpose=True)


@program()
def scan_with_a_carry_of_many_types() -> Loss:
    def body(carry: Any, w: Any) -> Any:
        h, count, key, low, flag = carry
        key, one = jax.random.split(key)
        h = jnp.where(flag, h + jnp.tanh(h @ w), h) + jax.random.normal(one, h.shape)
        low = low + h.mean(0).astype(jnp.bfloat16)
        return (h, count + 1, key, low, ~flag), (count, h.max())

    def loss(ws: Any, x: Any, key: Any) -> Any:
        start = (x, jnp.int8(0), key, jnp.zeros(x.shape[1], jnp.bfloat16), jnp.bool_(True))
        (h, count, key, low, flag), ys = lax.scan(body, start, ws)
        return (h * h).mean() + low.astype(jnp.float32).sum(), (count, key, flag, ys)

    return Loss(loss, (weights(6), rows(), jax.random.key(3)), has_aux=True, tolerance=2e-2)


@program()
def scan_without_inputs() -> Loss:
    def loss(ws: Any, x: Any) -> Any:
        h, sums = lax.scan(lambda h, _: cell(h, ws[0]), x, None, length=7)
        return (h * h).mean() + sums.sum() * 1e-2

    return Loss(loss, (weights(1), rows()))


@program()
def scan_of_no_steps() -> Loss:
    def loss(ws: Any, x: Any) -> Any:
        h, sums = lax.scan(cell, jnp.sin(x @ ws[0]), ws[:0])
        return (jnp.tanh(h @ ws[1]) ** 2).mean() + sums.sum()

    return Loss(loss, (weights(2), rows()))


@program()
def scan_of_one_step() -> Loss:
    def loss(ws: Any, x: Any) -> Any:
        h, sums = lax.scan(cell, jnp.sin(x @ ws[0]), ws[:1])
        return (jnp.tanh(h @ ws[1]) ** 2).mean() + sums.sum() * 1e-2

    return Loss(loss, (weights(2), rows()))


@program()
def scan_in_a_scan() -> Loss:
    def loss(ws: Any, x: Any) -> Any:
        def outer(h: Any, group: Any) -> Any:
            h, sums = lax.scan(cell, h, group, reverse=True)
            return jnp.sin(h), sums.sum()

        h, sums = lax.scan(outer, x, ws.reshape(2, 3, *ws.shape[1:]))
        return (h * h).mean() + sums.sum() * 1e-2

    return Loss(loss, (weights(6), rows()))


@program()
def scan_of_three_levels() -> Loss:
    def level(depth: int) -> Any:
        if depth == 0:
            return cell
        inner = level(depth - 1)

        def body(h: Any, group: Any) -> Any:
            h, sums = lax.scan(inner, h, group)
            return h * 0.9, sums.sum()

        return body

    def loss(ws: Any, x: Any) -> Any:
        h, total = level(3)(x, ws.reshape(2, 2, 2, *ws.shape[1:]))
        return (h * h).mean() + total * 1e-2

    return Loss(loss, (weights(8), rows()))


@program()
def scan_of_a_pytree() -> Loss:
    def body(carry: Any, xs: Any) -> Any:
        h = jnp.tanh(carry["h"] @ xs["in"]) @ xs["out"][0] + carry["h"]
        return {"h": h, "none": None, "sum": carry["sum"] + h.mean()}, (h[0], ())

    def loss(params: Any, x: Any) -> Any:
        carry, (firsts, _) = lax.scan(body, {"h": x, "none": None, "sum": 0.0}, params)
        return carry["sum"] + (firsts**2).sum(), carry

    params = {"in": normal(5, 8, 16), "out": (normal(5, 16, 8),)}
    return Loss(loss, (params, rows()), has_aux=True)


@program()
def scan_that_stacks_what_it_makes() -> Loss:
    def loss(w: Any, xs: Any) -> Any:
        _, hs = lax.scan(lambda h, x: (jnp.tanh(h @ w + x),) * 2, jnp.zeros((4, 8)), xs)
        return (jnp.cos(hs) * hs).mean(), hs[-1]

    return Loss(loss, (normal(8, 8), normal(24, 4, 8)), has_aux=True)


@program()
def scan_whose_first_carry_is_weak() -> Loss:
    def loss(w: Any, xs: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            return total + (jnp.tanh(x @ w) ** 2).mean(), total

        total, sums = lax.scan(body, 0.0, xs)
        return total, sums

    return Loss(loss, (normal(8, 8), normal(12, 16, 8)), has_aux=True)


@program()
def scan_of_constants_closed_over() -> Loss:
    scale = normal(8, seed=5)

    def loss(ws: Any, x: Any) -> Any:
        def body(h: Any, w: Any) -> Any:
            return h + jnp.tanh(h @ w) * scale, None

        return (lax.scan(body, x, ws)[0] ** 2).mean()

    return Loss(loss, (weights(6), rows()))


@program()
def scan_with_its_own_checkpoint() -> Loss:
    def loss(ws: Any, x: Any) -> Any:
        policy = jax.checkpoint_policies.dots_saveable
        h, sums = lax.scan(jax.checkpoint(cell, prevent_cse=False, policy=policy), x, ws)
        return (h * h).mean() + sums.sum() * 1e-2

    return Loss(loss, (weights(6), rows()))


@program()
def scan_with_a_branch_in_it() -> Loss:
    def body(h: Any, xs: Any) -> Any:
        index, w = xs
        branches = [jnp.tanh, jnp.sin, lambda v: v * v * 0.1]
        return h + lax.switch(index % 3, branches, h @ w), None

    def loss(ws: Any, x: Any) -> Any:
        return (lax.scan(body, x, (jnp.arange(len(ws)), ws))[0] ** 2).mean()

    return Loss(loss, (weights(6), rows()))


@program(quick=True)
def cond_of_arrays() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        return lax.cond(x.sum() > 0, lambda v: jnp.tanh(v @ w) @ w, lambda v: jnp.sin(v) * v, x)

    return layered(layer)


@program()
def cond_with_branches_of_unequal_cost() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        def deep(v: Any) -> Any:
            for _ in range(4):
                v = jnp.tanh(v @ w) + v
            return v

        return lax.cond(x[0, 0] > 0, deep, lambda v: v, x)

    return layered(layer)


@program()
def cond_without_operands() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        return lax.cond(w[0, 0] > 0, lambda: jnp.tanh(x @ w), lambda: jnp.zeros_like(x))

    return layered(layer)


@program()
def cond_in_a_cond() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        def inner(v: Any) -> Any:
            return lax.cond(v[0, 0] > 0, jnp.sin, lambda u: jnp.tanh(u @ w), v)

        return lax.cond(x.mean() > 0, inner, lambda v: inner(-v) * 2, x @ w)

    return layered(layer)


@program()
def switch_of_five() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        index = (jnp.abs(w).sum() * 7).astype(jnp.int32) % 5
        functions = [jnp.sin, jnp.cos, jnp.tanh, lambda v: v @ w, lambda v: jnp.exp(-v * v)]
        return lax.switch(index, functions, x @ w)

    return layered(layer)


@program()
def cond_on_a_batch_under_vmap() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        def row(v: Any) -> Any:
            return lax.cond(v[0] > 0, lambda u: jnp.tanh(u @ w), lambda u: u * u, v)

        return jax.vmap(row)(x)

    return layered(layer)


@program(quick=True)
def while_loop_ahead() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        size = lax.stop_gradient(jnp.abs(x @ w).sum())
        scale = lax.while_loop(lambda s: s > 1.0, lambda s: s / 2, size)
        return jnp.tanh(x @ w) * scale

    return layered(layer)


@program()
def fori_loop_of_known_length() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        return lax.fori_loop(0, 3, lambda i, v: jnp.tanh(v @ w) * (i + 1) * 0.3 + v, x)

    return layered(layer)


@program()
def fori_loop_of_traced_length() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        count = (jnp.abs(w).sum()).astype(jnp.int32) % 4
        root = lax.fori_loop(0, count, lambda i, v: v * 0.5, lax.stop_gradient(x))
        return jnp.tanh(x @ w) + root

    return layered(layer)


@program()
def while_loop_in_forward_mode() -> Loss:
    """A loop of unknown length may be differentiated forward inside the loss."""

    def layer(x: Any, w: Any) -> Any:
        def root(v: Any) -> Any:
            return lax.while_loop(lambda u: jnp.abs(u).max() > 0.1, lambda u: u * 0.5, v)

        slope = jax.jvp(root, (lax.stop_gradient(x),), (jnp.ones_like(x),))[1]
        return jnp.tanh(x @ w) * slope

    return layered(layer)


@program()
def associative_scan() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        gate = jax.nn.sigmoid(x @ w)

        def combine(a: Any, b: Any) -> Any:
            return a[0] * b[0], a[1] * b[0] + b[1]

        return lax.associative_scan(combine, (gate, jnp.tanh(x)))[1]

    return layered(layer)


@program()
def associative_scan_reversed() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        return lax.associative_scan(jnp.multiply, jnp.cos(x @ w * 0.1), reverse=True, axis=1)

    return layered(layer)


@program()
def map_over_rows() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        return lax.map(lambda v: jnp.tanh(v @ w) * v.sum(), x)

    return layered(layer)


@program()
def map_in_batches() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        return lax.map(lambda v: jnp.tanh(v @ w) * v.sum(), x, batch_size=24)

    return layered(layer)


@program()
def lstm_by_hand() -> Loss:
    def loss(params: Any, xs: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            h, c = state
            i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ params["w"] + params["b"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((4, 8))
        (h, c), hs = lax.scan(step, (zeros, zeros), xs)
        return (h * c).sum() + (hs**2).mean()

    params = {"w": normal(16, 32), "b": normal(32)}
    return Loss(loss, (params, normal(20, 4, 8)))


@program()
def newton_steps_in_a_scan() -> Loss:
    def loss(ws: Any, x: Any) -> Any:
        def energy(v: Any) -> Any:
            return (jnp.tanh(v @ ws[0]) ** 2).sum() + 0.5 * ((v - x) ** 2).sum()

        def step(v: Any, _: Any) -> Any:
            return v - 0.1 * jax.grad(energy)(v), energy(v)

        v, energies = lax.scan(step, jnp.zeros_like(x), None, length=5)
        return energies.mean() + (v**2).mean()

    return Loss(loss, (weights(1), rows()))


@program()
def reduce_with_a_function_of_ones_own() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        highest = lax.reduce(x @ w, -jnp.inf, lax.max, (1,))
        return jnp.tanh(x @ w) * lax.stop_gradient(highest)[:, None]

    return layered(layer)


@program()
def jitted_functions_in_each_other() -> Loss:
    @jax.jit
    def inner(v: Any, w: Any) -> Any:
        return jnp.tanh(v @ w)

    @partial(jax.jit, static_argnames="times", inline=True)
    def layer(x: Any, w: Any, times: int = 2) -> Any:
        for _ in range(times):
            x = inner(x, w)
        return x

    return layered(layer)
