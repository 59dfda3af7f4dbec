"""Transformations around a planned function, and inside it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from differential.program import Loss, Uses, Wrap, layers, normal, program, rows, weights

LOSS = layers(lambda x, w: jnp.tanh(x @ w))
ARGS = (weights(3), rows(16))


def using(transform: Any, *args: Any, loss: Any = LOSS, **options: Any) -> Uses:
    """`transform` of the planned loss, jitted."""
    return Uses(lambda wrap: wrap.jit(transform(wrap(loss)))(*args), **options)


@program(quick=True)
def vmap_of_grad() -> Uses:
    """Gradients of each example."""
    return using(lambda f: jax.vmap(jax.value_and_grad(f), (None, 0)), weights(3), normal(6, 4, 8))


@program()
def grad_of_vmap() -> Uses:
    def mean(f: Any) -> Any:
        return jax.value_and_grad(lambda w, x: jax.vmap(f, (None, 0))(w, x).mean())

    return using(mean, weights(3), normal(6, 4, 8))


@program()
def vmap_over_models() -> Uses:
    return using(lambda f: jax.vmap(jax.value_and_grad(f)), normal(4, 3, 8, 8), normal(4, 6, 8))


@program()
def vmap_of_vmap_of_grad() -> Uses:
    def both(f: Any) -> Any:
        return jax.vmap(jax.vmap(jax.grad(f), (None, 0)), (0, None))

    return using(both, normal(2, 3, 8, 8), normal(3, 4, 8))


@program()
def jvp() -> Uses:
    return using(lambda f: lambda w, x: jax.jvp(f, (w, x), (jnp.cos(w), jnp.sin(x))), *ARGS)


@program()
def linearize() -> Uses:
    def transform(f: Any) -> Any:
        def both(w: Any, x: Any) -> Any:
            out, linear = jax.linearize(f, w, x)
            return out, linear(w, x), linear(jnp.sin(w), x)

        return both

    return using(transform, *ARGS)


@program(quick=True)
def hessian_vector_forward_over_reverse() -> Uses:
    def product(f: Any) -> Any:
        return lambda w, x: jax.jvp(lambda w: jax.grad(f)(w, x), (w,), (jnp.cos(w),))

    return using(product, *ARGS, tolerance=1e-4)


@program()
def hessian_vector_reverse_over_reverse() -> Uses:
    def product(f: Any) -> Any:
        return lambda w, x: jax.grad(lambda w: (jax.grad(f)(w, x) * jnp.cos(w)).sum())(w)

    return using(product, *ARGS, tolerance=1e-4)


@program()
def hessian() -> Uses:
    return using(jax.hessian, normal(2, 3, 3), normal(4, 3), tolerance=1e-4)


@program()
def jacobian_by_rows() -> Uses:
    return using(lambda f: jax.jacrev(lambda w, xs: jax.vmap(f, (None, 0))(w, xs)), weights(2),
                 normal(3, 4, 8))  # fmt: skip


@program()
def jacobian_by_columns() -> Uses:
    return using(jax.jacfwd, normal(2, 3, 3), normal(4, 3))


@program()
def pullback_used_twice() -> Uses:
    def twice(f: Any) -> Any:
        def both(w: Any, x: Any) -> Any:
            out, pull = jax.vjp(f, w, x)
            return out, pull(jnp.float32(1.0)), pull(jnp.float32(-2.0))

        return both

    return using(twice, *ARGS)


@program()
def planned_inside_a_checkpoint() -> Uses:
    return using(lambda f: jax.value_and_grad(jax.checkpoint(f)), *ARGS)


@program()
def planned_inside_a_scan() -> Uses:
    """A step over microbatches."""

    def total(f: Any) -> Any:
        def accumulated(w: Any, xs: Any) -> Any:
            def add(grads: Any, x: Any) -> Any:
                value, more = jax.value_and_grad(f)(w, x)
                return grads + more, value

            return jax.lax.scan(add, jnp.zeros_like(w), xs)

        return accumulated

    return using(total, weights(3), normal(4, 8, 8))


@program()
def planned_inside_a_branch_and_a_loop() -> Uses:
    def guarded(f: Any) -> Any:
        def step(w: Any, x: Any) -> Any:
            def update(w: Any) -> Any:
                return w - 0.1 * jax.grad(f)(w, x)

            w = jax.lax.cond(x.sum() > 0, update, lambda w: w, w)
            return jax.lax.fori_loop(0, 3, lambda _, w: update(w), w)

        return step

    return using(guarded, *ARGS)


@program()
def planned_in_a_planned() -> Uses:
    def use(wrap: Wrap) -> Any:
        inner = wrap(LOSS)

        def outer(w: Any, x: Any) -> Any:
            return inner(w, jnp.sin(x @ w[0])) * 2 + inner(w, x[::-1])

        return wrap.jit(jax.value_and_grad(wrap(outer)))(*ARGS)

    return Uses(use)


@program()
def planned_without_a_jit() -> Uses:
    return Uses(lambda wrap: jax.value_and_grad(wrap(LOSS))(weights(2), rows(8)))


@program()
def planned_under_disabled_jit() -> Uses:
    def use(wrap: Wrap) -> Any:
        planned = wrap(LOSS)
        wrap.jit(jax.value_and_grad(planned))(weights(1), rows(8))
        with jax.disable_jit():
            return jax.value_and_grad(planned)(weights(1), rows(8))

    return Uses(use)


@program()
def gradients_inside_the_loss() -> Loss:
    """A penalty on the gradient with respect to the input."""

    def loss(ws: Any, x: Any) -> Any:
        value, slope = jax.value_and_grad(lambda x: LOSS(ws, x))(x)
        return value + ((jnp.linalg.norm(slope, axis=-1) - 1) ** 2).mean()

    return Loss(loss, (list(weights(3)), rows(16)), tolerance=1e-4)


@program()
def vmap_inside_the_loss() -> Loss:
    def loss(ws: Any, x: Any) -> Any:
        return jax.vmap(lambda row: LOSS(ws, row[None]), spmd_axis_name=None)(x).mean()

    return Loss(loss, (list(weights(3)), rows()))


@program()
def collectives_over_a_vmapped_axis() -> Loss:
    def loss(ws: Any, x: Any) -> Any:
        def one(row: Any) -> Any:
            for w in ws:
                row = row + jnp.tanh(row @ w)
                row = row - jax.lax.pmean(row, "batch")
                row = row + jax.lax.psum(row, "batch") * jax.lax.axis_index("batch")
            return (row**2).sum()

        return jax.vmap(one, axis_name="batch")(x).mean()

    return Loss(loss, (list(weights(3)), rows(16)))


@program()
def several_arguments_differentiated() -> Loss:
    def loss(w: Any, scale: Any, x: Any) -> Any:
        for one in w:
            x = x + jnp.tanh(x @ one) * scale
        return (x * x).mean()

    return Loss(loss, (weights(3), jnp.float32(0.5), rows()), argnums=(0, 2, 1))


@program()
def inputs_only_differentiated() -> Loss:
    return Loss(lambda ws, x: LOSS(ws, x), (weights(3), rows()), argnums=-1)


@program()
def gradient_stopped_in_places() -> Loss:
    def loss(params: Any, x: Any) -> Any:
        target = LOSS(jax.lax.stop_gradient(params["slow"]), x)
        x = x + jax.lax.stop_gradient(jnp.tanh(x @ params["fast"][0]))
        return (LOSS(params["fast"], x) - target) ** 2 + (params["unused"] * 0).sum()

    params = {"fast": weights(3), "slow": weights(2) * 0.5, "unused": normal(4)}
    return Loss(loss, (params, rows()))
