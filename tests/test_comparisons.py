"""What is compared with its source is never kept without it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas
from tracing import emit, loss_call, trace_loss

from jax_hremat._jax.jaxprs import open_jaxpr
from jax_hremat._plan.region import Region
from jax_hremat._solve.saved import value_refs
from jax_hremat._trace.bodies import Scan, bodies_of, scan_body
from jax_hremat._trace.graph import build_graph

W, X = jnp.ones((8, 8)) / 4, jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)


def loss_of(head: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    return lambda w, x: (jnp.sin(head(jnp.tanh(x @ w))) * 2.0).mean()


def only_the_largest(y: jax.Array) -> jax.Array:
    return jnp.where(y == y.max(-1, keepdims=True), y * y, 0.0)


def above_the_third(y: jax.Array) -> jax.Array:
    return jnp.where(y >= jax.lax.top_k(y, 3)[0][:, -1:], y * y, 0.0)


def larger_half(y: jax.Array) -> jax.Array:
    left, right = jnp.split(y, 2, axis=1)
    return jnp.maximum(left, right)


def mask_inside_a_loop(y: jax.Array) -> jax.Array:
    largest = y.max(-1, keepdims=True)

    def step(total: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
        return total + jnp.where(y == largest, scale * y, 0.0), None

    return jax.lax.scan(step, y, jnp.arange(3.0))[0]


def where_kept(copy: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """What is done differently where a copy of a value equals it."""
    return lambda y: jnp.where(copy(y) == y, y * y, 3.0 * y)


def largest_around(y: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 3), (1, 1), "SAME")


def largest_so_far(y: jax.Array) -> jax.Array:
    return jax.lax.associative_scan(jnp.maximum, y, axis=1)


def largest_by_a_loop(y: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda most, row: (jnp.maximum(most, row), None), y[0], y)[0][None]


def one_of_two(y: jax.Array) -> jax.Array:
    return jax.lax.cond(y[0, 0] > 0, lambda: y[::-1], lambda: jnp.maximum(y, 0.1))


def with_a_row_of_another(y: jax.Array) -> jax.Array:
    return y.at[0].set(jnp.cos(y[0]))


def chosen(y: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask, y * y, 3.0 * y)


def above_the_median(y: jax.Array) -> jax.Array:
    return chosen(y, y >= jnp.median(y[:, :7], axis=1, keepdims=True))


def above_a_picked_element(y: jax.Array) -> jax.Array:
    picked = jax.nn.one_hot(jnp.arange(4) % 8, 8)
    return chosen(y, y >= (y * picked).sum(-1, keepdims=True))


def above_by_its_sigmoid(y: jax.Array) -> jax.Array:
    third = jax.lax.top_k(y, 3)[0][:, -1:]
    return chosen(y, jax.nn.sigmoid(y) >= jax.nn.sigmoid(third))


def largest_but_for_a_mask(y: jax.Array) -> jax.Array:
    allowed = y + jnp.where(jnp.arange(8) < 6, 0.0, -1e30)
    return chosen(y, y == allowed.max(1, keepdims=True))


def largest_as_bits(y: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(y, jnp.int32)
    return chosen(y, bits == bits.max(1, keepdims=True))


def no_less_than_the_largest(y: jax.Array) -> jax.Array:
    return chosen(y, y - y.max(1, keepdims=True) == 0.0)


def distance_from_the_median(y: jax.Array) -> jax.Array:
    return jnp.abs(y - jnp.sort(y, axis=1)[:, 3:4]) * y


def guarded_root(y: jax.Array) -> jax.Array:
    """NaN where a kept mask and a recomputed share of the largest do not agree."""
    share = jnp.abs(y) / jnp.abs(y).max(1, keepdims=True)
    inside = share < 1.0
    return jnp.where(inside, jnp.sqrt(jnp.where(inside, 1.0 - share * share, 1.0)), 0.0)


def of_largest(y: jax.Array) -> jax.Array:
    return y.max(1, keepdims=True)


def below_the_largest(y: jax.Array) -> jax.Array:
    return jnp.sqrt(of_largest(y) - y + 1e-8) * y


def share_of_the_largest(y: jax.Array) -> jax.Array:
    return jnp.arcsin(y / (jnp.abs(y).max(1, keepdims=True) + 1e-3))


def differs_from_the_largest(y: jax.Array) -> jax.Array:
    return chosen(y, (y - of_largest(y)).astype(bool))


def is_the_smallest(y: jax.Array) -> jax.Array:
    return chosen(y, y + (-y).max(1, keepdims=True) == 0.0)


def far_from_the_largest(y: jax.Array) -> jax.Array:
    return chosen(y, jnp.isfinite(1.0 / (y - of_largest(y))))


def first_of_two(y: jax.Array) -> jax.Array:
    both = jnp.stack([y, jnp.broadcast_to(of_largest(y), y.shape)])
    return chosen(y, jnp.argmax(both, axis=0) == 0)


def largest_by_a_kernel(y: jax.Array) -> jax.Array:
    def kernel(y: Any, largest: Any, out: Any) -> None:
        out[...] = jnp.where(y[...] == largest[...], 3.0, 1.0)

    @jax.custom_jvp
    def scale(y: jax.Array, largest: jax.Array) -> jax.Array:
        like = jax.ShapeDtypeStruct(y.shape, y.dtype)
        return pallas.pallas_call(kernel, out_shape=like, interpret=True)(y, largest)

    scale.defjvp(lambda primals, _: (scale(*primals), jnp.zeros_like(primals[0])))
    return scale(y, jnp.broadcast_to(of_largest(y), y.shape)) * y


@jax.custom_jvp
def _distant(y: jax.Array) -> jax.Array:
    return of_largest(y)


@_distant.defjvp
def _distant_rule(primals: Any, tangents: Any) -> Any:
    largest = _distant(*primals)
    is_largest = 1.0 - jnp.abs(jnp.sign(primals[0] - largest))
    return largest, (is_largest * tangents[0]).sum(1, keepdims=True)


def by_its_own_derivative(y: jax.Array) -> jax.Array:
    return jnp.sin(_distant(y)) * y


def largest_inside_a_loop(y: jax.Array) -> jax.Array:
    def step(total: jax.Array, one: Any) -> tuple[jax.Array, jax.Array]:
        row, largest = one
        return total, chosen(row, jnp.sin(row) == jnp.sin(largest))

    return jax.lax.scan(step, 0.0, (y, of_largest(y)))[1]


# Until JAX 0.11 the derivatives of these compare the result with an argument; from 0.12 on, the
# arguments with each other.
OF_TWO = {
    "larger of two": (larger_half, {"max"}),
    "clipped": (lambda y: jnp.clip(y, -0.3, 0.3), {"max", "min"}),
}
COMPARES_RESULT = jax.__version_info__ < (0, 12)
COMPARED = {
    "largest of each row": (lambda y: y.max(-1), {"reduce_max"}),
    "mask of the largest": (only_the_largest, {"reduce_max", "broadcast_in_dim"}),
    "mask inside a loop": (mask_inside_a_loop, {"reduce_max", "broadcast_in_dim"}),
    "mask of the top": (above_the_third, {"top_k", "slice"}),
    "rectified": (where_kept(jax.nn.relu), {"custom_jvp_call"}),
    "pooled": (where_kept(largest_around), {"reduce_window_max"}),
    "running": (where_kept(largest_so_far), {"add"}),
    "by a loop": (where_kept(largest_by_a_loop), {"scan", "broadcast_in_dim"}),
    "by a branch": (where_kept(one_of_two), {"cond"}),
    "written over": (where_kept(with_a_row_of_another), {"scatter"}),
    "with less precision": (
        where_kept(lambda y: jax.lax.reduce_precision(y, 8, 10)),
        {"reduce_precision"},
    ),
    "above the median": (above_the_median, {"add", "slice", "sort"}),
    "above a picked element": (above_a_picked_element, {"mul", "reduce_sum"}),
    "above by its sigmoid": (above_by_its_sigmoid, {"logistic", "top_k"}),
    "largest but for a mask": (largest_but_for_a_mask, {"add", "reduce_max"}),
    "largest as bits": (largest_as_bits, {"reduce_max"}),
    "no less than the largest": (no_less_than_the_largest, {"reduce_max", "broadcast_in_dim"}),
    "distance from the median": (distance_from_the_median, {"slice", "sort"}),
    "guarded root": (guarded_root, {"reduce_max", "lt"}),
    "below the largest": (below_the_largest, {"reduce_max", "broadcast_in_dim"}),
    "share of the largest": (share_of_the_largest, {"reduce_max", "broadcast_in_dim"}),
    "differs from the largest": (differs_from_the_largest, {"reduce_max", "broadcast_in_dim"}),
    "is the smallest": (is_the_smallest, {"neg", "reduce_max", "broadcast_in_dim"}),
    "far from the largest": (far_from_the_largest, {"reduce_max", "broadcast_in_dim"}),
    "first of two": (first_of_two, {"reduce_max", "broadcast_in_dim"}),
    "largest by a kernel": (largest_by_a_kernel, {"reduce_max", "broadcast_in_dim"}),
    "by its own derivative": (by_its_own_derivative, {"custom_jvp_call"}),
    "largest inside a loop": (largest_inside_a_loop, {"reduce_max", "broadcast_in_dim"}),
    **(OF_TWO if COMPARES_RESULT else {"larger of two": (larger_half, {"split"})}),
}
FREE = {
    "exponential": jnp.exp,
    "softmax": jax.nn.softmax,
    # Its derivative does not read the result.
    "running largest": lambda y: jax.lax.cummax(y, axis=1),
    "against a number": lambda y: jnp.where(y > 0.1, y, 0.0),
    "against a product": lambda y: jnp.where(y > y @ W, y, 0.0),
    "guarded by another": lambda y: jnp.log(jnp.where(X > 0.0, y * y, 1.0)),
    "normalized": lambda y: jax.nn.relu((y - y.mean(0)) * jax.lax.rsqrt(y.var(0) + 1e-5)),
    "rectified twice": lambda y: jax.nn.leaky_relu(jax.nn.relu(y)),
    "sorted": lambda y: jnp.sort(y, axis=1),
    "added to a product": lambda y: jax.nn.relu(y + jnp.tanh(y) @ W),
    "joined with a product": lambda y: jnp.sort(jnp.concatenate([y, y @ W], axis=1)),
    **({} if COMPARES_RESULT else {"clipped": OF_TWO["clipped"][0]}),
}


def compared(program: Any) -> set[tuple[int, int]]:
    graph = build_graph(program)
    return {
        (op.id, k)
        for op in graph.operations
        for k, v in enumerate(op.outputs)
        if graph.values[v].is_compared and not graph.values[v].of_constants
    }


@pytest.mark.parametrize(("head", "primitives"), COMPARED.values(), ids=COMPARED)
def test_what_is_compared_with_its_source_has_no_name(
    head: Callable[[jax.Array], jax.Array], primitives: set[str]
) -> None:
    loss = loss_of(head)
    call = loss_call(loss, (W, X))
    program = call.program
    graph = build_graph(program)
    operations = graph.operations
    found = compared(program)
    assert {operations[op].primitive for op, _ in found} >= primitives
    everything = tuple((op.id, 0) for op in operations)
    planned = emit(call, Region(0, len(operations), checkpointed=True, saved=everything))
    named = re.findall(r"name=hremat/(\d+)\.(\d+)", str(jax.make_jaxpr(jax.grad(planned))(W, X)))
    of_constants = {
        (op, 0) for op, _ in everything if graph.values[operations[op].outputs[0]].of_constants
    }
    # What chooses branches is kept all the same.
    choices = {op.inputs[0] for op in operations if op.primitive == "cond"}
    choosers = {(op, 0) for op, _ in everything if operations[op].outputs[0] in choices}
    kept = (set(everything) - found | choosers) - of_constants
    assert {(int(op), int(k)) for op, k in named} == kept
    assert jnp.allclose(jax.grad(planned)(W, X), jax.grad(loss)(W, X))


def test_values_in_a_body_may_be_of_one_origin_outside() -> None:
    program = trace_loss(loss_of(largest_inside_a_loop), (W, X))
    graph = build_graph(program)
    (scan,) = bodies_of(program, graph).values()
    assert isinstance(scan, Scan)
    body = scan.body.graph
    sines = [op for op in body.operations if op.primitive == "sin"]
    assert [body.values[op.outputs[0]].is_compared for op in sines[:2]] == [True, True]
    # The body alone does not show it.
    at = next(op.id for op in graph.operations if op.primitive == "scan")
    alone = build_graph(scan_body(open_jaxpr(program.jaxpr).eqns[at]))
    assert not any(value.is_compared for value in alone.values)


def test_what_chooses_a_branch_is_kept_though_it_is_compared() -> None:
    def head(y: jax.Array) -> jax.Array:
        z = jax.lax.cond(y.sum() > 0, jnp.sin, jnp.exp, y)
        return jnp.maximum(z, y - 10.0)

    call = loss_call(loss_of(head), (W, X))
    program = call.program
    operations = build_graph(program).operations
    choice = next(op.inputs[0] for op in operations if op.primitive == "cond")
    chooser = next(op.id for op in operations if choice in op.outputs)
    assert (chooser, 0) in compared(program)
    planned = emit(call, Region(0, len(operations), checkpointed=True))
    assert f"name=hremat/{chooser}.0" in str(jax.make_jaxpr(jax.grad(planned))(W, X))


def by_a_rule(y: jax.Array) -> jax.Array:
    """The largest of each row, by a rule that looks for it in its backward."""

    def forward(y: jax.Array) -> Any:
        largest = y.max(-1, keepdims=True)
        return largest, (y, largest)

    def backward(kept: Any, g: jax.Array) -> tuple[jax.Array]:
        y, largest = kept
        return (jnp.where(y == largest, g, 0.0),)

    pooled = jax.custom_vjp(lambda y: forward(y)[0])
    pooled.defvjp(forward, backward)
    return pooled(y) * y


def at_most_the_largest_but(y: jax.Array) -> jax.Array:
    """The derivative of the minimum compares its operands, directly or by its result."""
    return jnp.minimum(y, y.max(-1, keepdims=True))


def test_a_rule_may_compare_a_cotangent_with_what_it_kept() -> None:
    clipped = jax.custom_vjp(lambda y: jnp.sin(y))
    clipped.defvjp(
        lambda y: (jnp.sin(y), (y, jnp.abs(y))),
        lambda kept, g: (jnp.where(g > kept[1], kept[1], g) * jnp.cos(kept[0]),),
    )
    loss = loss_of(clipped)
    call = loss_call(loss, (W, X))
    operations = build_graph(call.program).operations
    everything = tuple((op.id, 0) for op in operations)
    planned = emit(call, Region(0, len(operations), checkpointed=True, saved=everything))
    assert jnp.allclose(jax.grad(planned)(W, X), jax.grad(loss)(W, X))


BY_DERIVATIVES = {
    "by a rule": (by_a_rule, {"reduce_max", "broadcast_in_dim"}),
    "of two": (at_most_the_largest_but, {"reduce_max", "broadcast_in_dim"}),
}


@pytest.mark.parametrize(("head", "primitives"), BY_DERIVATIVES.values(), ids=BY_DERIVATIVES)
def test_what_a_derivative_compares_is_kept_by_no_plan(
    head: Callable[[jax.Array], jax.Array], primitives: set[str]
) -> None:
    program = trace_loss(loss_of(head), (W, X))
    graph = build_graph(program)
    found = compared(program)
    assert {graph.operations[op].primitive for op, _ in found} >= primitives
    # The source may be kept, and what is made of it otherwise.
    assert not any(graph.operations[op].primitive == "tanh" for op, _ in found)
    made = [v for op in graph.operations for v in op.outputs]
    assert found.isdisjoint(value_refs(graph, made))


@pytest.mark.parametrize("head", FREE.values(), ids=FREE)
def test_other_values_may_be_kept(head: Callable[[jax.Array], jax.Array]) -> None:
    assert not compared(trace_loss(loss_of(head), (W, X)))
