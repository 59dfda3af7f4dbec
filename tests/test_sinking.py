"""Operations on an argument alone go to where their result is read, and nothing else changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tracing import trace_loss

from jax_hremat._jax.jaxprs import open_jaxpr
from jax_hremat._partition.blocks import partition_graph
from jax_hremat._partition.cut_points import partition_by_width
from jax_hremat._trace.graph import build_graph
from jax_hremat._trace.sinking import with_sunk_operations

WEIGHTS = [jnp.full((16, 16), 0.1 * i) for i in range(1, 7)]
X = jnp.linspace(-1, 1, 8 * 16).reshape(8, 16)


def layers(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w) + x
    return jnp.sum(x.astype(jnp.float32) ** 2)


def cast_first(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    return layers([w.astype(jnp.bfloat16).T for w in weights], x.astype(jnp.bfloat16))


def names(closed: Any) -> list[str]:
    return [eqn.primitive.name for eqn in open_jaxpr(closed).eqns]


def test_casts_before_the_first_layer_go_to_their_layers() -> None:
    program = trace_loss(cast_first, (WEIGHTS, X))
    layer = ["convert_element_type", "transpose", "dot_general", "tanh", "add"]
    # What casts the input is read twice.
    assert names(program.jaxpr)[: 1 + 2 * len(layer)] == ["convert_element_type", *layer, *layer]
    graph = build_graph(program)
    kinds = partition_graph(graph, partition_by_width).kinds
    assert len(set(kinds)) < len(WEIGHTS)


def test_what_two_operations_read_what_is_returned_and_what_reads_two_arguments_stay() -> None:
    def fun(w: jax.Array, x: jax.Array) -> Any:
        shared, returned, of_two = w.T, -w, w + x
        first = jnp.sin(x @ x.T)
        return first @ shared, first.T @ shared, returned, jnp.sum(of_two), jnp.cos(returned)

    closed = jax.make_jaxpr(fun)(WEIGHTS[0], jnp.ones((16, 16)))
    assert names(with_sunk_operations(closed)) == names(closed)


def test_it_computes_the_same_in_an_order_of_its_own_once() -> None:
    closed = jax.make_jaxpr(cast_first)(WEIGHTS, X)
    sunk = with_sunk_operations(closed)
    assert names(sunk) != names(closed) and sorted(names(sunk)) == sorted(names(closed))
    assert str(with_sunk_operations(sunk)) == str(sunk)
    flat = [*WEIGHTS, X]
    (a,), (b,) = (
        jax.core.eval_jaxpr(open_jaxpr(j), j.consts if hasattr(j, "consts") else (), *flat)
        for j in (closed, sunk)
    )
    np.testing.assert_array_equal(a, b)
    program = trace_loss(cast_first, (WEIGHTS, X))
    assert names(program.jaxpr) == names(sunk)


def test_a_long_chain_on_one_argument_is_moved_as_a_whole() -> None:
    def fun(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(3000):
            w = jnp.sin(w)
        return jnp.cos(x @ x.T) @ w

    closed = jax.make_jaxpr(fun)(WEIGHTS[0], jnp.ones((16, 16)))
    moved = names(with_sunk_operations(closed))
    assert moved[-1] == "dot_general" and set(moved[-3001:-1]) == {"sin"}
