"""Arguments that are no arrays, odd structures, methods, settings that change, odd losses."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import sparse

import jax_hremat
from differential.program import Loss, Uses, Wrap, layered, layers, normal, program, rows, weights

LOSS = layers(lambda x, w: jnp.tanh(x @ w))


@program()
def python_scalars() -> Uses:
    def loss(ws: Any, x: Any, scale: Any, shift: Any) -> Any:
        for w in ws:
            x = x + jnp.tanh(x @ w) * scale
        return (x * x).mean() + shift

    def use(wrap: Wrap) -> Any:
        planned = wrap(loss)
        args = (list(weights()), rows())
        step = jax.value_and_grad(planned)
        return step(*args, 0.5, 1), step(*args, 0.25, 2), step(*args, scale=0.5, shift=True)

    return Uses(use)


@program()
def python_scalars_in_a_jit() -> Loss:
    def loss(params: Any, x: Any) -> Any:
        for w in params["ws"]:
            x = x + jnp.tanh(x @ w) * params["scale"]
        return (x * x).mean() * params["weight"]

    return Loss(loss, ({"ws": list(weights()), "scale": 0.5, "weight": 2.0}, rows()))


@program()
def flags_and_texts() -> Uses:
    def loss(ws: Any, x: Any, train: bool, activation: str = "tanh") -> Any:
        for w in ws:
            x = x + getattr(jnp, activation)(x @ w) * (0.5 if train else 1.0)
        return (x * x).mean()

    def use(wrap: Wrap) -> Any:
        planned = wrap(loss)

        @partial(wrap.jit, static_argnums=2, static_argnames="activation")
        def step(ws: Any, x: Any, train: bool, activation: str = "tanh") -> Any:
            return jax.value_and_grad(planned)(ws, x, train, activation=activation)

        args = (list(weights()), rows())
        return step(*args, True), step(*args, False), step(*args, True, activation="sin")

    return Uses(use)


@program()
def functions_as_arguments() -> Uses:
    def loss(ws: Any, x: Any, function: Any) -> Any:
        for w in ws:
            x = x + function(x @ w)
        return (x * x).mean()

    def use(wrap: Wrap) -> Any:
        planned = wrap(loss)
        args = (list(weights()), rows())
        return [jax.value_and_grad(planned)(*args, f) for f in (jnp.tanh, jnp.sin, jnp.tanh)]

    return Uses(use)


@program()
def settings_that_change() -> Uses:
    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = x + jnp.tanh(x @ w)
        return (x * x).mean()

    def use(wrap: Wrap) -> Any:
        planned = wrap(loss)
        texts = []
        for precision in ("float32", "bfloat16", "float32"):
            with jax.default_matmul_precision(precision):
                text = wrap.jit(planned).lower(list(weights()), rows()).as_text()
            texts.append(text.count("HIGHEST") > 0)
        wrap.jit(jax.value_and_grad(planned))(list(weights()), rows())
        return texts

    return Uses(use)


@program()
def a_closure_that_changes() -> Uses:
    def use(wrap: Wrap) -> Any:
        config = {"scale": 0.5}

        def loss(ws: Any, x: Any) -> Any:
            for w in ws:
                x = x + jnp.tanh(x @ w) * config["scale"]
            return (x * x).mean()

        planned, seen = wrap(loss), []
        for scale in (0.5, 2.0):
            config["scale"] = scale
            seen.append(jax.value_and_grad(planned)(list(weights()), rows()))
        return seen

    return Uses(use)


@program()
def a_method() -> Uses:
    def use(wrap: Wrap) -> Any:
        class Model:
            def __init__(self, scale: float) -> None:
                self.scale = scale

            def loss(self, ws: Any, x: Any) -> Any:
                return LOSS(ws, x) * self.scale

        Model.planned = wrap(Model.loss, argnums=1)
        args = (list(weights()), rows())
        step = wrap.jit(jax.value_and_grad(Model(2.0).planned))
        other = wrap.jit(jax.value_and_grad(Model(3.0).planned))
        return step(*args), other(*args)

    return Uses(use)


@program()
def a_bound_method_and_a_partial() -> Uses:
    class Model:
        def loss(self, scale: Any, ws: Any, x: Any) -> Any:
            return LOSS(ws, x) * scale

    def use(wrap: Wrap) -> Any:
        bound = wrap(Model().loss, argnums=(1,))
        part = wrap(partial(LOSS, list(weights())))
        args = (list(weights()), rows())
        return (
            wrap.jit(jax.value_and_grad(bound, 1))(jnp.float32(2.0), *args),
            wrap.jit(jax.value_and_grad(part))(rows()),
        )

    return Uses(use)


@program()
def a_loss_of_no_operations() -> Loss:
    return Loss(lambda w: w, (jnp.float32(2.0),))


@program()
def a_loss_of_one_operation() -> Loss:
    return Loss(lambda w: w.sum(), (normal(64, 8),))


@program()
def a_loss_that_is_its_auxiliary() -> Loss:
    def loss(ws: Any, x: Any) -> Any:
        value = LOSS(ws, x)
        return value, (value, x, ws[0], value, 3, jnp.arange(3))

    return Loss(loss, (list(weights()), rows()), has_aux=True)


@program()
def arguments_of_odd_structures() -> Loss:
    Pair = namedtuple("Pair", "one two")

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Layer:
        w: Any
        name: str = dataclasses.field(metadata={"static": True}, default="layer")

    def loss(params: Any, batch: Any, *, mask: Any) -> Any:
        x = batch["x"][0]
        for layer in params.one:
            x = x + jnp.tanh(x @ layer.w) * len(layer.name)
        for w in params.two.values():
            x = x + jnp.sin(x @ w)
        return (x * x).mean(where=mask), {"empty": (), "none": None, "out": Layer(x)}

    ws = weights(4)
    params = Pair([Layer(ws[0], "a"), Layer(ws[1], "bc")], OrderedDict(z=ws[2], a=ws[3]))
    batch = {"x": (rows(), None), "unused": normal(5)}
    return Loss(loss, (params, batch), {"mask": rows() > 0}, has_aux=True)


@program()
def arrays_of_numpy() -> Loss:
    args = ([np.asarray(w) for w in weights()], np.asarray(rows()))
    return Loss(LOSS, args)


@program()
def shapes_that_change() -> Uses:
    def use(wrap: Wrap) -> Any:
        step = wrap.jit(jax.value_and_grad(wrap(LOSS)))
        return [step(list(weights(n)), rows(b)) for n, b in ((2, 16), (3, 16), (2, 32), (2, 16))]

    return Uses(use)


@program()
def scalars_and_empty_arrays() -> Loss:
    def loss(params: Any, x: Any) -> Any:
        x = x * params["scale"] + params["none"].sum()
        return (jnp.tanh(x) ** 2).mean() + jnp.concatenate([params["none"], x[:, 0]]).sum()

    params = {"scale": jnp.float32(0.5), "none": jnp.zeros((0,))}
    return Loss(loss, (params, rows()))


@program()
def branches_by_platform() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        return lax.platform_dependent(
            x @ w, cpu=jnp.tanh, cuda=lambda v: jnp.tanh(v) + 0.0, default=jnp.sin
        )

    return layered(layer)


@program()
def branches_by_platform_under_vmap() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        def row(v: Any) -> Any:
            return lax.platform_dependent(v, cpu=jnp.tanh, default=jnp.sin)

        return jax.vmap(row)(x @ w)

    return layered(layer)


@program()
def sparse_parameters() -> Uses:
    def loss(w: Any, x: Any) -> Any:
        for _ in range(3):
            x = x + jnp.tanh(sparse.bcoo_dot_general(
                w, x, dimension_numbers=(((1,), (0,)), ((), ()))
            ))  # fmt: skip
        return (x * x).mean()

    def use(wrap: Wrap) -> Any:
        matrix = np.asarray(normal(64, 64)) * (np.asarray(normal(64, 64, seed=3)) > 0.5)
        w = sparse.BCOO.fromdense(jnp.asarray(matrix))
        value, grads = wrap.jit(sparse.value_and_grad(wrap(loss)))(w, rows())
        return value, grads.data, grads.indices

    return Uses(use)


@program()
def sparse_constants() -> Loss:
    matrix = np.asarray(normal(64, 64)) * (np.asarray(normal(64, 64, seed=3)) > 0.5)
    w = sparse.BCOO.fromdense(jnp.asarray(matrix))
    return layered(lambda x, v: jnp.tanh(w @ x @ v))


@program()
def numpy_integers_as_budgets() -> Uses:
    def use(wrap: Wrap) -> Any:
        def planner(fun: Any, budget: Any, **options: Any) -> Any:
            exact = isinstance(budget, int)
            return jax_hremat.hremat(fun, budget=np.int64(budget) if exact else budget, **options)

        step = wrap.jit(jax.value_and_grad(wrap(LOSS, planner)))
        return step(list(weights()), rows())

    return Uses(use)


@program()
def donated_arguments() -> Uses:
    def use(wrap: Wrap) -> Any:
        planned = wrap(LOSS)

        def step(ws: Any, x: Any) -> Any:
            return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(planned)(ws, x))

        jitted, ws = wrap.jit(step, donate_argnums=0), list(weights())
        for _ in range(3):
            ws = jitted(ws, rows())
        return ws

    return Uses(use)
