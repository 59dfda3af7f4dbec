"""What a region makes of arguments alone is made no earlier than what else it reads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import SymbolicZero
from tracing import emit, loss_call, trace_loss

from jax_hremat._emit.emit import emit_flat
from jax_hremat._jax.jaxprs import open_jaxpr
from jax_hremat._partition.blocks import made_of_arguments, makes_of_arguments
from jax_hremat._plan.region import Region
from jax_hremat._trace.graph import Graph, build_graph
from jax_hremat._trace.trace import Program
from jax_hremat._xla.compile import compile_flat
from jax_hremat._xla.hlo.liveness import buffer_timeline
from jax_hremat._xla.hlo.parse import parse_hlo
from jax_hremat._xla.target import Target

NUM_LAYERS, TOKENS, WIDTH, INNER = 6, 4096, 512, 2048
CAST_BYTES = 2 * WIDTH * INNER
UP, DOWN = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((WIDTH, INNER), (INNER, WIDTH)))
ARGS = ([(UP, UP, DOWN)] * NUM_LAYERS, jax.ShapeDtypeStruct((TOKENS, WIDTH), "bfloat16"))


def loss(weights: list[tuple[jax.Array, ...]], x: jax.Array) -> jax.Array:
    total = jnp.zeros(())
    for layer in weights:
        gate, up, down = (w.astype(x.dtype) for w in layer)
        x = x + (jax.nn.silu(x @ gate) * (x @ up)) @ down
        total = total + jnp.mean(x.astype(jnp.float32) ** 2)
    return total


def is_cast_of_argument(graph: Graph, operation: int) -> bool:
    op = graph.operations[operation]
    (read,) = op.inputs[:1] or (None,)
    is_cast = op.primitive == "convert_element_type"
    return is_cast and read is not None and graph.values[read].kind == "argument"


def layers_of(program: Program) -> list[tuple[int, int]]:
    graph = build_graph(program)
    casts = [op.id for op in graph.operations if is_cast_of_argument(graph, op.id)]
    firsts = casts[::3]
    return list(zip(firsts, [*firsts[1:], len(graph.operations)], strict=True))


def root_of(program: Program, *, checkpointed: bool = True, late: bool = False) -> Region:
    """Each layer plain, or checkpointed with its products saved."""
    eqns = open_jaxpr(program.jaxpr).eqns
    children = []
    for start, stop in layers_of(program):
        products = [i for i in range(start, stop) if eqns[i].primitive.name == "dot_general"]
        saved = tuple((i, 0) for i in products) if checkpointed else ()
        children.append(Region(start, stop, checkpointed, saved, late_arguments=late))
    return Region(0, program.num_operations, children=tuple(children))


def test_casts_of_weights_are_not_made_at_the_start(h200: Target) -> None:
    program = trace_loss(loss, ARGS)

    def most_casts(*, late: bool) -> int:
        """How many casts of weights are alive at once, at most."""
        flat = emit_flat(program, root_of(program, late=late))
        text = compile_flat(program.step(flat), program.in_avals, h200).hlo_text
        timeline = buffer_timeline(parse_hlo(text))
        live = map(timeline.live_at, range(timeline.num_positions))
        return max(sum(b.nbytes == CAST_BYTES for b in buffers) for buffers in live)

    assert most_casts(late=False) > 2.5 * NUM_LAYERS
    assert most_casts(late=True) <= 6


def test_values_and_gradients_stay_and_no_cotangent_passes_a_barrier() -> None:
    small = jax.tree.map(lambda a: jax.ShapeDtypeStruct([n // 16 for n in a.shape], a.dtype), ARGS)
    args = jax.tree.map(lambda a: jnp.full(a.shape, 0.01, a.dtype), small)
    program = trace_loss(loss, args)
    flat = jax.tree.leaves(args)
    plain = jax.jit(program.step(emit_flat(program, root_of(program, checkpointed=False))))(*flat)
    for checkpointed in (False, True):
        root = root_of(program, checkpointed=checkpointed, late=True)
        step = program.step(emit_flat(program, root))
        for a, b in zip(*map(jax.tree.leaves, (plain, jax.jit(step)(*flat))), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-6)
        # One for each layer but the first, which reads arguments alone.
        assert str(jax.make_jaxpr(step)(*flat)).count("hremat_barrier") == NUM_LAYERS - 1


def test_which_ranges_make_something_of_arguments() -> None:
    program = trace_loss(loss, ARGS)
    graph = build_graph(program)
    first, *others = layers_of(program)
    # The first layer reads nothing that was made before it.
    assert not makes_of_arguments(graph, *first)
    assert all(makes_of_arguments(graph, a, b) for a, b in others)
    # After its last cast, nothing in a layer is made of weights alone.
    for start, stop in others:
        down = max(i for i in range(start, stop) if is_cast_of_argument(graph, i))
        assert makes_of_arguments(graph, down - 1, stop)
        assert not makes_of_arguments(graph, down + 1, stop)


def test_weights_that_are_only_moved_make_nothing() -> None:
    def loss(weights: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
        for product, scale in weights:
            x = jnp.tanh(x @ product.T) * scale
        return x.sum()

    weights = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((8,), "float32")
    graph = build_graph(trace_loss(loss, ([weights] * 2, jax.ShapeDtypeStruct((4, 8), "float32"))))
    moved = [op for op in graph.operations if op.is_view]
    assert {op.primitive for op in moved} == {"transpose", "broadcast_in_dim"}
    second = [op.id for op in graph.operations if op.primitive == "transpose"][1]
    made = made_of_arguments(graph, second, len(graph.operations))
    assert made.issuperset(graph.operations[second].outputs)
    assert not makes_of_arguments(graph, second, len(graph.operations))


@jax.custom_jvp
def scaled(value: jax.Array, weight: jax.Array) -> jax.Array:
    return value * weight


@functools.partial(scaled.defjvp, symbolic_zeros=True)
def _scaled_rule(primals: Any, tangents: Any) -> Any:
    if not isinstance(tangents[1], SymbolicZero):
        raise TypeError("the weight may not be differentiated")
    return scaled(*primals), tangents[0] * primals[1]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("barrier", ["late_arguments", "barrier"])
def test_rules_are_told_no_tangents_that_barriers_made(barrier: str, checkpointed: bool) -> None:
    def loss(weight: jax.Array, scale: jax.Array) -> jax.Array:
        made = jnp.tanh(weight @ scale)
        return (scaled(made, scale) * jnp.sin(made)).sum()

    weight, scale = jnp.full((4, 4), 0.3), jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)
    call = loss_call(loss, (weight, scale))
    stop = call.program.num_operations
    inner = Region(2, stop, checkpointed, **{barrier: True})
    for root in (inner, Region(0, stop, checkpointed=True, children=(inner,))):
        planned = emit(call, Region(0, stop, children=(root,)))

        def gradient(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
            return lambda w: jax.grad(f)(w, scale)

        np.testing.assert_allclose(gradient(planned)(weight), gradient(loss)(weight), rtol=1e-6)
        again = jax.grad(jax.checkpoint(planned))(weight, scale)
        np.testing.assert_allclose(again, gradient(loss)(weight), rtol=1e-6)
        for f in (loss, planned):
            jax.jvp(lambda w, f=f: f(w, scale), (weight,), (weight,))
        second = [jax.jvp(gradient(f), (weight,), (weight,))[1] for f in (loss, planned)]
        np.testing.assert_allclose(*second, rtol=1e-5, atol=1e-6)
