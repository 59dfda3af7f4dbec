"""Tied regions: which need it, and that only the cotangents change hands together."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tracing import trace_loss

from jax_hremat._emit.emit import emit_flat
from jax_hremat._partition.blocks import has_deferrable_input, make_block
from jax_hremat._plan.region import Region
from jax_hremat._trace.graph import build_graph

WIDTH = 8


def decoder_loss(weights, memory):
    """Two layers that read the same memory; each region is `memory @ w` to the product."""
    encoded = jnp.tanh(memory @ weights["encode"])
    x = jnp.sin(encoded)
    for w in weights["layers"]:
        x = x + jnp.tanh(x * 2.0) * jnp.tanh(encoded @ w)
    return jnp.sum(x)


def traced():
    rng = np.random.default_rng(0)
    draw = lambda: jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32)  # noqa: E731
    weights = {"encode": draw(), "layers": [draw(), draw()]}
    args = (weights, draw())
    program = trace_loss(decoder_loss, args)
    return program, build_graph(program), jax.tree.leaves(args)


def layer_bounds(graph):
    """First and last-plus-one operation of the second layer."""
    adds = [op.id for op in graph.operations if op.primitive == "add"]
    return adds[0] + 1, adds[1] + 1


def test_a_layer_that_reads_a_memory_made_earlier_has_a_deferrable_input():
    _, graph, _ = traced()
    start, stop = layer_bounds(graph)
    block = make_block(graph, start, stop)
    assert has_deferrable_input(graph, block, start, stop)


def test_a_run_that_only_reads_the_stream_has_none():
    _, graph, _ = traced()
    start, stop = layer_bounds(graph)
    block = make_block(graph, start, stop)
    first = graph.operations[start]
    assert first.primitive == "mul"
    assert not has_deferrable_input(graph, block, start, start + 2)


def barriers(step, inputs):
    return str(jax.make_jaxpr(step)(*inputs)).count("hremat_barrier")


@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_tied_region_ties_cotangents_and_changes_no_value(checkpointed):
    program, graph, inputs = traced()
    start, stop = layer_bounds(graph)
    loose = Region(start, stop, checkpointed=checkpointed)
    trees = [
        Region(0, len(graph.operations), children=(r,))
        for r in (loose, replace(loose, barrier=True))
    ]
    steps = [program.step(emit_flat(program, tree)) for tree in trees]
    plain = program.step(emit_flat(program, Region(0, len(graph.operations))))
    assert barriers(steps[1], inputs) == barriers(steps[0], inputs) + 1
    for step in steps:
        for a, b in zip(
            jax.tree.leaves(plain(*inputs)), jax.tree.leaves(step(*inputs)), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_cotangents_are_tied_as_sums():
    """Both layers read the memory; the barrier of the first is over the sum of its cotangents."""
    program, graph, inputs = traced()
    start, stop = layer_bounds(graph)
    of_layers = range(2 * start - stop, start), range(start, stop)
    tied = tuple(Region(r.start, r.stop, True, barrier=True) for r in of_layers)
    step = program.step(emit_flat(program, Region(0, len(graph.operations), children=tied)))
    jaxpr = jax.make_jaxpr(step)(*inputs)
    makers = {v: eqn.primitive.name for eqn in jaxpr.eqns for v in eqn.outvars}
    barriers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "hremat_barrier"]
    summed = [[makers.get(v) for v in eqn.invars].count("add_any") for eqn in barriers]
    # In the backward the second layer comes first.
    assert summed == [0, 1]


def test_a_tied_region_still_has_forward_mode():
    program, graph, inputs = traced()
    start, stop = layer_bounds(graph)
    barrier = Region(0, len(graph.operations), children=(Region(start, stop, True, barrier=True),))
    tangents = [jnp.ones_like(x) for x in inputs]
    plain = emit_flat(program, Region(0, len(graph.operations)))
    _, expected = jax.jvp(lambda *a: plain(*a)[0], inputs, tangents)
    _, got = jax.jvp(lambda *a: emit_flat(program, barrier)(*a)[0], inputs, tangents)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
