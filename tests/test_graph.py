"""The graph of small programs: what each backward reads, what is active, bytes and flops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tracing import trace_loss

from jax_hremat._jax.sizes import size_bytes_of
from jax_hremat._trace.graph import Graph, Operation, build_graph

SQUARE = jax.ShapeDtypeStruct((4, 4), jnp.float32)
KEY = jax.eval_shape(lambda: jax.random.key(0))


def graph_of(fun: Callable[..., Any], *args: Any, argnums: Any = 0, has_aux: bool = False) -> Graph:
    return build_graph(trace_loss(fun, args or (SQUARE,), argnums=argnums, has_aux=has_aux))


def only(graph: Graph, primitive: str) -> Operation:
    (found,) = [op for op in graph.operations if op.primitive == primitive]
    return found


def needs(fun: Callable[..., Any], primitive: str, *args: Any, argnums: Any = 0) -> set[str]:
    """The needs of the one operation with this primitive: `in0`, `in1`, `out0`, …"""
    graph = graph_of(lambda *a: jnp.sum(fun(*a)), *args, argnums=argnums)
    op = only(graph, primitive)
    names = {v: f"in{i}" for i, v in enumerate(op.inputs) if v is not None}
    names |= {v: f"out{i}" for i, v in enumerate(op.outputs)}
    return {names[v] for v in op.needs}


@pytest.mark.parametrize(
    ("fun", "primitive", "expected"),
    [
        (jnp.sin, "sin", {"in0"}),
        (jnp.exp, "exp", {"out0"}),
        (jnp.tanh, "tanh", {"out0"}),
        (lambda x: x + 1.0, "add", set()),
        (lambda x: x * 2.0, "mul", set()),
        (jnp.transpose, "transpose", set()),
        (lambda x: jax.lax.reduce_precision(x, 8, 7), "reduce_precision", set()),
        (jax.nn.relu, "custom_jvp_call", {"in0"}),
        (lambda x: jax.lax.integer_pow(x, 3), "integer_pow", {"in0"}),
    ],
)
def test_needs_of_one_input(fun: Any, primitive: str, expected: set[str]) -> None:
    assert needs(fun, primitive) == expected


@pytest.mark.parametrize(
    ("argnums", "expected"), [((0, 1), {"in0", "in1"}), (0, {"in1"}), (1, {"in0"})]
)
@pytest.mark.parametrize(("fun", "primitive"), [(jnp.matmul, "dot_general"), (jnp.multiply, "mul")])
def test_a_product_reads_the_other_factor(
    fun: Any, primitive: str, argnums: Any, expected: set[str]
) -> None:
    assert needs(fun, primitive, SQUARE, SQUARE, argnums=argnums) == expected


def test_masks_are_read_through_what_they_are_made_of() -> None:
    # The mask itself is made again from what the operation reads, so no byte of it is opaque.
    # The rule for the maximum compares both inputs, before JAX 0.12 with its output, which is
    # computed again for that.
    largest = only(graph_of(lambda x, y: jnp.maximum(x, y).sum(), SQUARE, SQUARE), "max")
    assert set(largest.needs) == set(largest.inputs)
    assert largest.opaque_bytes == 0
    chosen = only(graph_of(lambda x, y: jnp.where(y > 0, x, y).sum(), SQUARE, SQUARE), "select_n")
    assert chosen.needs == (chosen.inputs[0],)
    reduced = only(graph_of(lambda x: x.max(-1).sum()), "reduce_max")
    assert set(reduced.needs) == {reduced.inputs[0]}


def test_residuals_of_a_custom_rule() -> None:
    @jax.custom_vjp
    def scaled(x: jax.Array, y: jax.Array) -> jax.Array:
        return x * y

    # One residual is the input, another is made by the rule, the last is for the cotangent of `y`.
    scaled.defvjp(
        lambda x, y: (x * y, (y, jnp.cumsum(x, 0), jnp.sin(x))),
        lambda kept, g: (g * kept[0] * kept[1], g * kept[2]),
    )

    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        return scaled(x, y).sum()

    def needs(argnums: Any) -> set[str]:
        graph = graph_of(loss, SQUARE, SQUARE, argnums=argnums)
        rule = only(graph, "custom_vjp_call")
        assert rule.opaque_bytes == 0
        producers = [graph.values[v].producer for v in rule.needs]
        return {"" if p is None else graph.operations[p].primitive for p in producers}

    assert needs(0) == {"", "cumsum"}
    assert needs(1) == {"sin"}
    assert needs((0, 1)) == {"", "cumsum", "sin"}


def test_residuals_of_a_rule_that_stays_one_operation_are_opaque() -> None:
    @jax.custom_vjp
    def scaled(x: jax.Array) -> jax.Array:
        return x * 2

    def forward(x: jax.Array) -> Any:
        jax.debug.callback(lambda: None)
        return x * 2, (x, jnp.cumsum(x, 0).astype(jnp.bfloat16))

    scaled.defvjp(forward, lambda kept, g: (g * kept[0] * kept[1],))
    op = only(graph_of(lambda x: scaled(x).sum()), "custom_vjp_call")
    assert op.needs == (op.inputs[0],)
    assert op.opaque_bytes == 4 * 4 * 2


def test_activity_follows_argnums() -> None:
    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        return (jnp.sin(x) * jnp.cos(y)).sum()

    def active(argnums: Any) -> set[str]:
        operations = graph_of(loss, SQUARE, SQUARE, argnums=argnums).operations
        return {op.primitive for op in operations if op.active}

    assert active(0) == {"sin", "mul", "reduce_sum"}
    assert active(1) == {"cos", "mul", "reduce_sum"}
    assert active((0, 1)) == {"sin", "cos", "mul", "reduce_sum"}


def test_what_only_feeds_a_stop_gradient_is_inactive() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return (jnp.tanh(x) * jax.lax.stop_gradient(jnp.exp(jnp.sin(x)))).sum()

    graph = graph_of(loss)
    for name in ("sin", "exp"):
        dead = only(graph, name)
        assert not dead.active
        assert dead.needs == ()
        assert not graph.values[dead.outputs[0]].active
    assert only(graph, "tanh").active


def test_what_only_feeds_an_auxiliary_output_is_inactive() -> None:
    graph = graph_of(lambda x: (jnp.sin(x).sum(), jnp.exp(x)), has_aux=True)
    assert only(graph, "sin").active
    assert not only(graph, "exp").active
    assert graph.values[only(graph, "exp").outputs[0]].is_output


def test_integers_and_keys_are_inactive() -> None:
    def loss(w: jax.Array, tokens: jax.Array, key: jax.Array) -> jax.Array:
        keep = jax.random.bernoulli(key, 0.5, (3, 4))
        rounded = jnp.round(w).astype(jnp.int32)
        return jnp.where(keep, w[tokens], 0.0).sum() + rounded.sum()

    graph = graph_of(loss, SQUARE, jax.ShapeDtypeStruct((3,), jnp.int32), KEY)
    inexact = ("f32", "bf16", "f16")
    assert all(v.text.startswith(inexact) for v in graph.values if v.active)
    assert all(not op.active for op in graph.operations if op.primitive.startswith("random"))
    # What is rounded to integers hands no cotangent on.
    assert not only(graph, "round").active
    gather = only(graph, "gather")
    assert gather.active
    assert set(gather.needs) <= {gather.inputs[1]}


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((3, 5), jnp.float32, 60),
        ((3, 5), jnp.bfloat16, 30),
        ((3, 5), jnp.int8, 15),
        ((3, 5), jnp.bool_, 15),
        ((3, 5), jnp.int4, 8),
        ((), jnp.float32, 4),
        ((0, 7), jnp.float32, 0),
        ((4,), jnp.complex64, 32),
        ((4,), jnp.float8_e4m3fn, 4),
    ],
)
def test_bytes_of_arrays(shape: tuple[int, ...], dtype: Any, expected: int) -> None:
    assert size_bytes_of(jax.ShapeDtypeStruct(shape, dtype)) == expected


def test_bytes_of_keys() -> None:
    assert size_bytes_of(KEY) == 8
    assert size_bytes_of(jax.ShapeDtypeStruct((5,), KEY.dtype)) == 40


def test_flops_of_products() -> None:
    def loss(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum("bij,bjk->bik", a, b).sum()

    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, 4, 5), (3, 5, 6))]
    product = only(graph_of(loss, *args), "dot_general")
    assert product.flops == 2 * 3 * 4 * 5 * 6
    assert product.has_batch_dims
    assert product.moved_bytes == 4 * (3 * 4 * 5 + 3 * 5 * 6 + 3 * 4 * 6)
    assert not product.fusible
    assert not only(graph_of(lambda a: (a @ a).sum()), "dot_general").has_batch_dims

    def convolve(image: jax.Array, kernel: jax.Array) -> jax.Array:
        dims = ("NHWC", "HWIO", "NHWC")
        conv = jax.lax.conv_general_dilated(image, kernel, (1, 1), "VALID", dimension_numbers=dims)
        return conv.sum()

    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 8, 8, 3), (3, 3, 3, 5))]
    conv = only(graph_of(convolve, *args), "conv_general_dilated")
    assert conv.flops == 2 * (2 * 6 * 6 * 5) * (3 * 3 * 3)


def test_loops_and_branches_are_atoms() -> None:
    product = 2 * 4 * 4 * 4

    def scanned(w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (jnp.sin(c @ w), None), w, length=7)[0].sum()

    scan = only(graph_of(scanned), "scan")
    assert scan.flops == 7 * (product + 16)
    # Seven carries, of which the rule keeps the argument of each sine and of each product.
    assert scan.opaque_bytes >= 7 * 64
    assert scan.active

    def branched(w: jax.Array) -> jax.Array:
        return jax.lax.cond(w[0, 0] > 0, lambda x: x @ x, jnp.sin, w).sum()

    assert only(graph_of(branched), "cond").flops == product

    def looped(w: jax.Array) -> jax.Array:
        halved = jax.lax.while_loop(
            lambda x: x[0, 0] > 1.0, lambda x: x @ x, jax.lax.stop_gradient(w)
        )
        return (w * halved).sum()

    loop = only(graph_of(looped), "while")
    assert not loop.active
    # The trip count is unknown: body and test are counted once.
    assert product <= loop.flops < 2 * product


def test_scopes_and_sources() -> None:
    def loss(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"), jax.named_scope("inner"):
            x = jnp.sin(x)
        return jnp.cos(x).sum()

    graph = graph_of(loss)
    assert only(graph, "sin").scope == "outer/inner"
    assert only(graph, "cos").scope == ""
    assert "test_graph.py" in only(graph, "sin").source


def test_inner_jits_are_opened_and_plain_python_leaves_no_trace() -> None:
    graph = graph_of(lambda x: jax.jit(lambda v: jax.jit(jnp.sin)(v) * 3.0)(x).sum())
    assert [op.primitive for op in graph.operations] == ["sin", "mul", "reduce_sum"]


def test_literals_are_recorded_but_not_in_the_signature() -> None:
    twice, thrice = (only(graph_of(lambda x, c=c: (x * c).sum()), "mul") for c in (2.0, 3.0))
    assert twice.signature == thrice.signature
    assert (twice.literals, thrice.literals) == ("2.0", "3.0")
    assert twice.inputs[1] is None
    by_value = only(graph_of(lambda x, y: (x * y).sum(), SQUARE, SQUARE), "mul")
    assert by_value.signature != twice.signature


def test_users_outputs_and_arguments() -> None:
    graph = graph_of(lambda x, y: (jnp.sin(x) * y + x).sum(), SQUARE, SQUARE)
    x, y = graph.arguments
    assert graph.differentiated == (x,)
    assert [graph.operations[u].primitive for u in graph.values[x].users] == ["sin", "add"]
    assert graph.values[x].last_use == 2
    assert (graph.values[x].kind, graph.values[x].producer) == ("argument", None)
    (loss,) = graph.outputs
    assert graph.values[loss].is_output
    assert graph.values[loss].last_use == -1
    assert [graph.values[v].active for v in (x, y)] == [True, False]
