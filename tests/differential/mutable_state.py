"""References, checks, callbacks: what happens beside the values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify, io_callback

from differential.program import Log, Loss, Uses, Wrap, layered, program, rows, weights


@program()
def a_reference_inside_the_loss() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        total = jax.new_ref(jnp.zeros_like(x))
        for _ in range(2):
            total[...] += jnp.tanh(x @ w)
        return total[...]

    return layered(layer)


@program()
def a_reference_in_a_loop() -> Loss:
    def loss(ws: Any, x: Any) -> Any:
        kept = jax.new_ref(jnp.zeros((len(ws),)))

        def body(i: Any, h: Any) -> Any:
            h = h + jnp.tanh(h @ ws[i])
            kept[i] = h.mean()
            return h

        h = lax.fori_loop(0, len(ws), body, x)
        return (h * h).mean(), kept[...]

    return Loss(loss, (weights(), rows()), has_aux=True)


@program()
def checks_of_all_operations_around_it() -> Uses:
    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = x + jnp.tanh(x @ w) / x.max()
        return jnp.log(x.min() + 10.0) + (x * x).mean()

    def use(wrap: Wrap) -> Any:
        planned, seen = wrap(loss), []
        for scale in (1.0, 0.0):
            checked = checkify.checkify(jax.value_and_grad(planned), errors=checkify.float_checks)
            error, out = wrap.jit(checked)(list(weights()), rows() * scale)
            seen.append((error.get() is None, out))
        return seen

    return Uses(use)


@program()
def checks_inside_it() -> Uses:
    """Checks made functional in the loss; what they found comes out.

    Planned where it is used: `checkify` numbers its checks anew each time that a function is
    traced, so that a plan made before is refused.
    """

    def loss(ws: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            checkify.check(jnp.all(x < 1.0), "too large")
            return x + jnp.tanh(x @ w)

        worst = jnp.bool_(False)
        for w in ws:
            error, x = checkify.checkify(layer)(x, w)
            worst |= jnp.stack([jnp.any(v) for v in jax.tree.leaves(error._pred)]).any()
        return (x * x).mean(), worst

    def use(wrap: Wrap) -> Any:
        step = wrap.jit(jax.value_and_grad(wrap(loss, has_aux=True), has_aux=True))
        return step(list(weights()), rows())

    return Uses(use)


@program(quick=True)
def debug_callbacks() -> Loss:
    log = Log()

    def layer(x: Any, w: Any) -> Any:
        y = jnp.tanh(x @ w)
        jax.debug.callback(log, y.mean())
        return y

    return layered(layer, effects=log.taken)


@program()
def debug_callbacks_in_a_scan() -> Loss:
    log = Log()

    def loss(ws: Any, x: Any) -> Any:
        def body(h: Any, xs: Any) -> Any:
            index, w = xs
            h = h + jnp.tanh(h @ w)
            jax.debug.callback(log, index, h.mean())
            return h, None

        return (lax.scan(body, x, (jnp.arange(len(ws)), ws))[0] ** 2).mean()

    return Loss(loss, (weights(), rows()), effects=log.taken)


@program()
def debug_callback_in_a_branch() -> Loss:
    log = Log()

    def layer(x: Any, w: Any) -> Any:
        def note(v: Any) -> Any:
            jax.debug.callback(log, v.mean())
            return jnp.tanh(v)

        return lax.cond(x[0, 0] > 0, note, jnp.sin, x @ w)

    return layered(layer, effects=log.taken)


@program()
def pure_callbacks() -> Loss:
    """A host function with a rule of its own."""

    @jax.custom_jvp
    def sine(v: Any) -> Any:
        shape = jax.ShapeDtypeStruct(v.shape, v.dtype)
        return jax.pure_callback(np.sin, shape, v, vmap_method="expand_dims")

    sine.defjvp(lambda p, t: (sine(*p), jnp.cos(p[0]) * t[0]))
    return layered(lambda x, w: sine(x @ w))


@program()
def io_callbacks() -> Uses:
    """Effects that count: each is run as often as in the original."""
    log = Log()

    def loss(ws: Any, x: Any) -> Any:
        for index, w in enumerate(ws):
            x = x + jnp.tanh(x @ w)
            io_callback(log, None, index, lax.stop_gradient(x).mean())
        return (x * x).mean()

    def use(wrap: Wrap) -> Any:
        out = wrap.jit(jax.value_and_grad(wrap(loss)))(list(weights()), rows())
        jax.block_until_ready(out)
        jax.effects_barrier()
        return out, len(log.entries)

    return Uses(use, effects=log.taken)


@program()
def inspected_shardings_and_names() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        with jax.named_scope("layer"):
            y = jax.named_call(lambda v: jnp.tanh(v @ w), name="inner")(x)
        return jax.ad_checkpoint.checkpoint_name(y, "out")

    return layered(layer)
