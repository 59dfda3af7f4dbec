"""Candidate runs: inside their block, never around an effect, the same every time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import given
from jax.experimental import io_callback
from random_plans import QUICK, WIDTH, losses, struct
from tracing import trace_loss

from jax_hremat._cost.profile import Profile, Residual
from jax_hremat._options.runs import Run, RunModel, profile_of_held
from jax_hremat._partition.blocks import Block, make_block, partition_graph
from jax_hremat._partition.cut_points import partition_by_width
from jax_hremat._trace.graph import Graph, Operation, build_graph

BYTE_S = 1e-12


def graph_of(fun: Any, *args: Any) -> Graph:
    return build_graph(trace_loss(fun, args))


def attention(effect: bool = False) -> Graph:
    """Three layers of attention; with `effect`, a callback in the middle of the second."""

    def layer(x: jax.Array, w: jax.Array, noisy: bool) -> jax.Array:
        scores = jnp.einsum("qd,kd->qk", x @ w, x)
        if noisy:
            io_callback(lambda _: None, None, jax.lax.stop_gradient(scores[0, 0]))
        return x + jax.nn.softmax(scores) @ x @ w

    def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        for i, w in enumerate(ws):
            x = layer(x, w, effect and i == 1)
        return (x * x).mean()

    return graph_of(loss, [struct(16, 16)] * 3, struct(128, 16))


def model_of(graph: Graph, block: Block) -> RunModel:
    # A GPU's ratio of flops to bytes: 100 flops in the time of a byte.
    times = [
        BYTE_S * (op.flops / 100 + (0 if op.fusible else op.moved_bytes)) for op in graph.operations
    ]
    held = frozenset(v for op in graph.operations if not op.fusible for v in op.outputs)
    return RunModel(graph, block, profile_of_held(graph, block, held, times), held)


def runs_of(graph: Graph, block: Block) -> list[Run]:
    return [*model_of(graph, block).runs]


def assert_sound(graph: Graph, block: Block, runs: Sequence[Run]) -> None:
    assert len({(r.start, r.stop, r.saved) for r in runs}) == len(runs)
    for run in runs:
        assert block.start <= run.start < run.stop <= block.stop
        assert (run.start, run.stop) != (block.start, block.stop)
        assert not any(op.effectful for op in graph.operations[run.start : run.stop])
        assert run.freed_bytes > 0 or run.saved
        assert run.added_s >= 0


@given(losses())
@QUICK
def test_runs_lie_in_their_block(loss: Any) -> None:
    graph = graph_of(loss, struct(WIDTH, WIDTH), struct(WIDTH, WIDTH))
    whole = make_block(graph, 0, len(graph.operations))
    for block in (whole, *partition_graph(graph, partition_by_width).blocks):
        runs = runs_of(graph, block)
        assert_sound(graph, block, runs)
        assert runs == runs_of(graph, block)


def test_runs_never_hold_an_effect() -> None:
    graph = attention(effect=True)
    (effect,) = [op.id for op in graph.operations if op.effectful]
    whole = make_block(graph, 0, len(graph.operations))
    runs = runs_of(graph, whole)
    assert_sound(graph, whole, runs)
    # There is something worth checkpointing on either side.
    assert any(r.stop <= effect for r in runs)
    assert any(r.start > effect for r in runs)


def test_the_attention_core_is_among_the_candidates() -> None:
    graph = attention()
    whole = make_block(graph, 0, len(graph.operations))
    products = [op.id for op in graph.operations if op.primitive == "dot_general"]
    # In each layer: x w, scores, scores x, … w. The core is from the second to the third.
    first, last = products[1], products[2]
    assert any(r.start <= first and last <= r.stop for r in runs_of(graph, whole))


def test_another_copy_of_a_layer_has_the_same_runs() -> None:
    graph = attention()
    partition = partition_graph(graph, partition_by_width)
    places: dict[int, list[Block]] = {}
    for kind, block in zip(partition.kinds, partition.blocks, strict=True):
        places.setdefault(kind, []).append(block)
    for blocks in places.values():
        for a, b in itertools.pairwise(blocks):
            relative = [
                [(r.start - block.start, r.stop - block.start) for r in runs_of(graph, block)]
                for block in (a, b)
            ]
            assert relative[0] == relative[1]


def test_what_a_run_frees_and_costs_by_hand() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        first = x @ w
        second = jnp.sin(first)
        third = jnp.cos(second)
        return (third @ w).sum()

    graph = graph_of(loss, struct(8, 8), struct(4, 8))
    product, sine, cosine, last, _ = graph.operations
    size = 4 * 8 * 4
    times = [1.0, 2.0, 4.0, 8.0, 16.0]
    whole = make_block(graph, 0, len(graph.operations))

    def run(start: Operation, stop: Operation, *held: Operation) -> tuple[int, float]:
        values = frozenset(op.outputs[0] for op in held)
        model = RunModel(graph, whole, profile_of_held(graph, whole, values, times), values)
        assert model.kept_bytes == len(held) * size
        assert [model.held_bytes(op.id) for op in graph.operations] == [
            size * (op in held) for op in graph.operations
        ]
        found = model.run(start.id, stop.id + 1)
        return found.freed_bytes, found.added_s

    # Sine and cosine checkpointed: the argument of the cosine is dropped and recomputed from
    # that of the sine, which is held anyway. The result, which the product after the run reads,
    # stays.
    assert run(sine, cosine, product, sine, cosine) == (size, times[sine.id])
    # With both products in it everything goes, and all but the last is made again.
    assert run(product, last, product, sine, cosine) == (3 * size, sum(times[:3]))
    # Where the argument of the sine would not be held otherwise, it now is: nothing is won.
    assert run(sine, cosine, sine) == (0, times[sine.id])
    # The argument of the cosine takes the place of that of the sine, if nothing before reads that.
    for first_reader, freed in ((product.id, 0), (sine.id, size)):
        argument = Residual(size, product.id, first_reader, cosine.id)
        kept = (argument, Residual(size, cosine.id, last.id, last.id))
        profile = Profile(kept, (0.0,) * 5, frozenset())
        model = RunModel(graph, whole, profile, ())
        assert model.run(cosine.id, last.id + 1).freed_bytes == freed


def test_what_a_run_adds_if_xla_makes_one_kernel_of_it_by_hand() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        first = x @ w
        scaled = first * first.sum(1, keepdims=True)
        return (scaled @ w).sum()

    graph = graph_of(loss, struct(8, 8), struct(4, 8))
    names = [op.primitive for op in graph.operations]
    product, reduced, last = 0, names.index("reduce_sum"), names.index("dot_general", 1)
    scaled = last - 1
    assert names[scaled] == "mul" and reduced == product + 1 and names[last + 1 :] == ["reduce_sum"]
    times = [0.0] * len(names)
    times[product], times[reduced], times[scaled], times[last] = 8.0, 2.0, 3.0, 16.0
    whole = make_block(graph, 0, len(graph.operations))
    profile = profile_of_held(graph, whole, frozenset(), times)

    def added(start: int, stop: int, *, in_one_kernel: bool) -> float:
        fused = [range(reduced, last)] if in_one_kernel else []
        return RunModel(graph, whole, profile, (), fused).run(start, stop).added_s

    # Of what lies between the products, the sum is recomputed; in one kernel it is made with the
    # rest, in the forward and in the backward.
    assert added(reduced, last, in_one_kernel=False) == times[reduced]
    assert added(reduced, last, in_one_kernel=True) == -times[reduced]
    # With the product before it too, which no kernel is shared with.
    assert added(product, last, in_one_kernel=False) == times[product] + times[reduced]
    assert added(product, last, in_one_kernel=True) == times[product] - times[reduced]
    # The backward of the product after it reads the scaled values, which must be written again.
    both = times[reduced] + times[scaled]
    assert added(reduced, last + 1, in_one_kernel=False) == both
    assert added(reduced, last + 1, in_one_kernel=True) == times[scaled] - times[reduced]
    # Of a part of what XLA could fuse, nothing is known.
    assert added(reduced + 1, last + 1, in_one_kernel=True) == times[scaled]
    model = RunModel(graph, whole, profile, ())
    assert model.maybe_in_one_kernel(1.0) == [range(reduced, last)]
    assert model.maybe_in_one_kernel(times[reduced]) == []


def test_a_run_lowers_the_peak_of_the_backward_by_hand() -> None:
    graph = attention()
    whole = make_block(graph, 0, len(graph.operations))
    # Alive in the backward: 4 and 8 from its begin, the 4 up to operation 5, the 8 up to 2.
    kept = (Residual(4, 4, 5, 6), Residual(8, 1, 2, 3))
    profile = Profile(kept, (0.0,) * len(whole), frozenset())
    model = RunModel(graph, whole, profile, ())

    def lowered(start: int, stop: int) -> int:
        return model.lowered_bytes(Run(start, stop, 0, 0.0))

    # Made again at operation 3, when the 4 are read no more.
    assert lowered(1, 4) == 4
    # Made again at operation 5, and at 6.
    assert lowered(1, 6) == lowered(1, 7) == 0
    # The 8 are read by operation 3, which is not in the run.
    assert lowered(1, 3) == 0
    # A run begins and ends where values may be kept: here none that does lowers the peak.
    assert model.lowering_most is None
    later = Profile((Residual(4, 20, 21, 22), Residual(8, 1, 2, 3)), profile.forward_s, frozenset())
    model = RunModel(graph, whole, later, ())
    most = model.lowering_most
    assert most is not None
    assert model.lowered_bytes(most) == 4 == max(map(model.lowered_bytes, model.runs))


def test_a_run_may_keep_what_it_makes_of_arguments_alone_by_hand() -> None:
    def loss(w: jax.Array, u: jax.Array, x: jax.Array) -> jax.Array:
        first = x @ w
        return jnp.sin(jnp.tanh(first) @ jnp.exp(jnp.cos(w) * u)).sum()

    graph = graph_of(loss, struct(8, 8), struct(8, 8), struct(4, 8))
    names = [op.primitive for op in graph.operations]
    assert names == ["dot_general", "tanh", "cos", "mul", "exp", "dot_general", "sin", "reduce_sum"]
    times = [float(2**i) for i in range(len(names))]
    tanh, exp, product = names.index("tanh"), names.index("exp"), 5
    whole = make_block(graph, 0, len(graph.operations))
    model = RunModel(graph, whole, profile_of_held(graph, whole, frozenset(), times), ())
    run = model.run(tanh, product + 1)
    saving = model.saving_what_is_made_of_arguments(run)
    made = [graph.operations[i].outputs[0] for i in range(tanh + 1, exp + 1)]
    assert set(saving.saved) <= set(made)
    assert graph.operations[exp].outputs[0] in saving.saved
    assert (saving.start, saving.stop) == (run.start, run.stop)
    # Nothing is made again but the hyperbolic tangent, which depends on the data.
    assert saving.added_s == times[tanh]
    assert saving.freed_bytes == run.freed_bytes - len(saving.saved) * 8 * 8 * 4
    # The product before the run is of the data: this run makes nothing of arguments alone.
    run = model.run(tanh, tanh + 1)
    assert model.saving_what_is_made_of_arguments(run) == run
