"""Blocks: they cover the program, lie between layers, and equal layers are one kind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import plain_layers
from random_plans import QUICK, WIDTH, losses, struct
from tracing import trace_loss

from jax_hremat._partition.blocks import (
    _MAX_OPERATIONS,
    Partition,
    boundary,
    make_block,
    partition_graph,
)
from jax_hremat._partition.cut_points import partition_by_width
from jax_hremat._partition.flat import partition_flat
from jax_hremat._partition.repeats import partition_by_repeats
from jax_hremat._partition.score import partition_by_score
from jax_hremat._trace.graph import Graph, build_graph

WIDE, HIDDEN, BATCH, LENGTH = 32, 128, 4, 64


def mlp(x: jax.Array, p: dict[str, jax.Array], activation: Any = jax.nn.gelu) -> jax.Array:
    return x + activation(x @ p["in"]) @ p["out"]


def attention(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    q, k, v = (x @ p[name] for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) / 8.0)
    return x + jnp.einsum("bqk,bkd->bqd", scores, v) @ p["o"]


MLP = {"in": struct(WIDE, HIDDEN), "out": struct(HIDDEN, WIDE)}
ATTENTION = {name: struct(WIDE, WIDE) for name in "qkvo"}
LAYERS: dict[str, tuple[Callable[..., jax.Array], dict[str, Any]]] = {
    "m": (mlp, MLP),
    "s": (lambda x, p: mlp(x, p, jnp.sin), MLP),
    "a": (attention, ATTENTION),
}


def graph_of(fun: Callable[..., Any], *args: Any) -> Graph:
    return build_graph(trace_loss(fun, args))


def stack(layers: str, names: Sequence[str] | None = None) -> Graph:
    """A stack of layers: `m` an MLP, `s` one with another activation, `a` attention."""

    def loss(params: list[Any], x: jax.Array) -> jax.Array:
        for i, (layer, p) in enumerate(zip(layers, params, strict=True)):
            with jax.named_scope(names[i] if names else f"layer_{i}"):
                x = LAYERS[layer][0](x, p)
        return (x * x).mean()

    return graph_of(loss, [LAYERS[layer][1] for layer in layers], struct(BATCH, LENGTH, WIDE))


def assert_covers(graph: Graph, partition: Partition) -> None:
    blocks = partition.blocks
    assert blocks[0].start == 0
    assert blocks[-1].stop == len(graph.operations)
    assert all(a.stop == b.start for a, b in itertools.pairwise(blocks))
    assert all(len(b) > 0 for b in blocks)
    handed_on: set[int] = set()
    for block in blocks:
        computed = {v for v in block.inputs if graph.values[v].kind == "computed"}
        assert computed <= handed_on
        handed_on |= set(block.outputs)
    for kind, block in zip(partition.kinds, blocks, strict=True):
        assert blocks[kind].fingerprint == block.fingerprint
        assert kind <= blocks.index(block)
        assert partition.kinds[kind] == kind


def boundary_value(graph: Graph, position: int) -> list[str]:
    """What is made before a position and read after it."""
    return [
        v.text
        for v in graph.values
        if v.producer is not None and v.producer < position <= v.last_use
    ]


@given(losses())
@QUICK
def test_blocks_cover_any_program_in_order(loss: Any) -> None:
    graph = graph_of(loss, struct(WIDTH, WIDTH), struct(WIDTH, WIDTH))
    partition = partition_graph(graph, partition_by_width)
    assert_covers(graph, partition)
    again = partition_graph(
        graph_of(loss, struct(WIDTH, WIDTH), struct(WIDTH, WIDTH)), partition_by_width
    )
    assert again == partition


@pytest.mark.parametrize("layers", ["mmmm", "amamamam", "aaaaa", "mmsmm", "m", "a"])
def test_only_the_stream_crosses_between_blocks(layers: str) -> None:
    graph = stack(layers)
    partition = partition_graph(graph, partition_by_width)
    assert_covers(graph, partition)
    assert len(partition.blocks) >= max(1, len(layers) - 1)
    for block in partition.blocks[1:]:
        assert boundary_value(graph, block.start) == [f"f32[{BATCH},{LENGTH},{WIDE}]"]


def dense(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ w)


def residual(x: jax.Array, w: jax.Array) -> jax.Array:
    return x + jax.nn.softmax(x @ w)


@pytest.mark.parametrize("layer", [dense, residual])
def test_plain_layers_are_cut_apart_though_the_width_never_rises(layer: Any) -> None:
    graph = graph_of(plain_layers(layer), [struct(WIDE, WIDE)] * 6, struct(BATCH, WIDE))
    partition = partition_graph(graph, partition_by_width)
    assert_covers(graph, partition)
    heavy = [op.id for op in graph.operations if op.primitive == "dot_general"]
    assert all(sum(b.start <= op < b.stop for op in heavy) <= 1 for b in partition.blocks)
    for block in partition.blocks[1:]:
        assert boundary_value(graph, block.start) == [f"f32[{BATCH},{WIDE}]"]
    assert len(partition.unique) <= 5


def test_ever_narrower_layers_are_cut_apart() -> None:
    weights = [struct(256 >> i, 128 >> i) for i in range(5)]
    graph = graph_of(plain_layers(dense), weights, struct(BATCH, 256))
    assert len(partition_graph(graph, partition_by_width).blocks) >= 5


def test_plain_layers_between_others_are_cut_apart() -> None:
    def layer(x: jax.Array, w: Any) -> jax.Array:
        return mlp(x, w) if isinstance(w, dict) else dense(x, w)

    weights = [MLP, MLP, *[struct(WIDE, WIDE)] * 4, MLP, MLP]
    graph = graph_of(plain_layers(layer), weights, struct(BATCH, WIDE))
    assert len(partition_graph(graph, partition_by_width).blocks) >= 7


def test_equal_layers_are_one_kind_whatever_their_names() -> None:
    names = ["encoder", "Dense_0", "x", "block/17", "last"]
    plain, named = stack("mmmmm"), stack("mmmmm", names)
    partition = partition_graph(plain, partition_by_width)
    # The first layer reads the data, and after the last one the loss follows.
    assert partition.kinds[1:5] == (1, 1, 1, 1)
    assert partition_graph(named, partition_by_width) == partition
    assert {op.scope for op in named.operations} != {op.scope for op in plain.operations}


def test_other_layers_are_other_kinds() -> None:
    kinds = partition_graph(stack("mmmsmm"), partition_by_width).kinds
    assert kinds[1] == kinds[2] == kinds[4]
    assert kinds[3] == 3
    alternating = partition_graph(stack("mamamama"), partition_by_width).kinds
    assert alternating[1] == alternating[3] == alternating[5] == 1
    assert alternating[2] == alternating[4] == 2
    assert len(partition_graph(stack("mmmmm"), partition_by_width).unique) < 5


def test_literals_do_not_make_another_kind_but_wiring_does() -> None:
    def loss(scales: Sequence[float], shared: Sequence[bool]) -> Graph:
        def fun(ws: list[jax.Array], x: jax.Array) -> jax.Array:
            for w, scale, same in zip(ws, scales, shared, strict=True):
                hidden = jax.nn.gelu(x @ w)
                x = x + scale * ((hidden if same else x) * hidden) @ w.T
            return (x * x).mean()

        return graph_of(fun, [struct(WIDE, WIDE)] * len(scales), struct(BATCH, LENGTH, WIDE))

    equal = partition_graph(loss([1.0, 2.0, 3.0, 4.0, 5.0], [True] * 5), partition_by_width)
    assert equal.kinds[2] == equal.kinds[3]
    rewired = partition_graph(loss([1.0] * 5, [True, True, True, False, True]), partition_by_width)
    assert rewired.kinds[2] != rewired.kinds[3]


def test_skip_connections_cross_every_block_in_between() -> None:
    def loss(down: list[jax.Array], up: list[jax.Array], x: jax.Array) -> jax.Array:
        skips = []
        for w in down:
            x = jax.nn.relu(x @ w)
            skips.append(x)
        for w in up:
            x = jax.nn.relu(jnp.concatenate([x, skips.pop()], -1) @ w)
        return (x * x).mean()

    graph = graph_of(loss, [struct(64, 64)] * 3, [struct(128, 64)] * 3, struct(16, 64))
    partition = partition_graph(graph, partition_by_width)
    assert_covers(graph, partition)
    outputs = {v for b in partition.blocks for v in b.outputs}
    (last_use,) = [op.id for op in graph.operations if op.primitive == "concatenate"][-1:]
    first_skip = graph.operations[last_use].inputs[1]
    consumer = next(b for b in partition.blocks if b.start <= last_use < b.stop)
    producer = graph.values[first_skip].producer
    if not consumer.start <= producer < consumer.stop:
        assert first_skip in outputs
        assert first_skip in consumer.inputs


def test_long_skips_do_not_hide_the_layers() -> None:
    def loss(params: list[Any], x: jax.Array, w: jax.Array) -> jax.Array:
        memory = jnp.tanh(x @ w)
        for p in params:
            x = mlp(x, p)
        return (x * memory).mean()

    data = struct(BATCH, LENGTH, WIDE)
    graph = graph_of(loss, [MLP] * 12, data, struct(WIDE, WIDE))
    partition = partition_graph(graph, partition_by_width)
    assert_covers(graph, partition)
    middle = partition.kinds[3:9]
    assert len(set(middle)) == 1


@pytest.mark.parametrize(
    "fun",
    [lambda x: x.sum(), lambda x: x[0, 0], lambda x: jnp.sin(x).sum(), lambda x: (x @ x)[0, 0]],
)
def test_tiny_programs_are_one_block(fun: Callable[..., Any]) -> None:
    graph = graph_of(fun, struct(4, 4))
    partition = partition_graph(graph, partition_by_width)
    assert_covers(graph, partition)
    assert partition.kinds == (0,)


def test_blocks_of_too_many_operations_are_split() -> None:
    def loss(x: jax.Array) -> jax.Array:
        for _ in range(1000):
            x = jnp.sin(x)
        return x.sum()

    graph = graph_of(loss, struct(8))
    partition = partition_graph(graph, partition_by_width)
    assert_covers(graph, partition)
    assert max(map(len, partition.blocks)) <= _MAX_OPERATIONS
    assert min(map(len, partition.blocks)) >= _MAX_OPERATIONS // 8


def test_a_boundary_lists_arguments_inputs_and_outputs() -> None:
    graph = stack("mm")
    block = make_block(graph, 1, 5)
    assert boundary(graph, 1, 5) == (block.inputs, block.outputs)
    for v in block.inputs:
        producer = graph.values[v].producer
        assert producer is None or not 1 <= producer < 5
        assert any(v in op.inputs for op in graph.operations[1:5])
    for v in block.outputs:
        assert 1 <= graph.values[v].producer < 5
        assert graph.values[v].last_use >= 5 or graph.values[v].is_output
    with_loss = make_block(graph, 3, len(graph.operations))
    assert with_loss.outputs[-1] == graph.outputs[0]


@given(st.integers(2, 7))
@settings(max_examples=6, deadline=None)
def test_more_equal_layers_need_no_more_kinds(num_layers: int) -> None:
    assert len(partition_graph(stack("m" * num_layers), partition_by_width).unique) <= 3


PARTITIONERS = [partition_by_width, partition_by_repeats, partition_by_score, partition_flat]


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@QUICK
@given(data=st.data())
def test_every_partitioner_covers_the_program_once(partitioner, data) -> None:
    graph = graph_of(data.draw(losses()), struct(WIDTH, WIDTH), struct(WIDTH, WIDTH))
    partition = partition_graph(graph, partitioner)
    edges = [partition.blocks[0].start, *(b.stop for b in partition.blocks)]
    assert edges == sorted(set(edges))
    assert (edges[0], edges[-1]) == (0, len(graph.operations))
    assert partition == partition_graph(graph, partitioner)


def layers_with_ends(num_layers: int) -> Graph:
    """Equal layers of two products between different first and last operations."""

    def loss(w: Any, x: Any) -> Any:
        x = jnp.sin(x @ w)
        for _ in range(num_layers):
            x = x + jnp.tanh(jax.nn.softmax(x @ w) @ w.T)
        return jnp.exp(x).mean()

    return graph_of(loss, struct(8, 8), struct(16, 8))


def test_repeats_are_found_and_cut_once_each() -> None:
    partition = partition_graph(layers_with_ends(9), partition_by_repeats)
    common = max(partition.kinds.count(k) for k in partition.unique)
    assert common >= 8
    assert len(partition.blocks) <= 12


def test_the_flat_partition_has_one_heavy_operation_a_block() -> None:
    graph = layers_with_ends(4)
    partition = partition_graph(graph, partition_flat)
    heavy = [
        sum(op.primitive == "dot_general" for op in graph.operations[b.start : b.stop])
        for b in partition.blocks
    ]
    assert max(heavy) == 1 and sum(heavy) == 9


def test_merging_by_score_stops_when_few_are_left() -> None:
    graph = layers_with_ends(40)
    merged = partition_graph(graph, partition_by_score)
    flat = partition_graph(graph, partition_flat)
    assert len(flat.blocks) > 80 >= 2 * len(merged.blocks)
    assert {b.start for b in merged.blocks} <= {b.start for b in flat.blocks}


def test_a_partitioner_outside_the_program_is_told() -> None:
    with pytest.raises(ValueError, match="cuts at 1000, .* return positions from 0"):
        partition_graph(layers_with_ends(1), lambda graph: [3, 1000])
