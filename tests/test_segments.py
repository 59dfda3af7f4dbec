"""Segments of a block: the best there are, nothing that must run once inside them, and memory that
runs of many freed bytes do not save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from random_plans import QUICK, WIDTH, losses, struct
from test_runs import attention, graph_of

import jax_hremat
from jax_hremat._options.runs import Run, RunModel, needed_values, profile_of_held
from jax_hremat._options.segments import STEP, segment_ends, segments_of_least_peak
from jax_hremat._partition.blocks import Block, make_block
from jax_hremat._trace.graph import Graph
from jax_hremat._xla.compile import memory_stats


def whole(graph: Graph) -> Block:
    return make_block(graph, 0, len(graph.operations))


def residuals(graph: Graph, start: int, stop: int) -> int:
    """Bytes of the residuals of JAX's linearization that some operations make."""
    operations = graph.operations[start:stop]
    needed = {v for op in graph.operations for v in op.needs}
    made = sum(graph.values[v].size_bytes for op in operations for v in op.outputs if v in needed)
    return made + sum(op.opaque_bytes for op in operations)


def model(graph: Graph, block: Block) -> RunModel:
    times = [1.0] * len(graph.operations)
    held = needed_values(graph, block)
    return RunModel(graph, block, profile_of_held(graph, block, held, times), held)


def segments(graph: Graph, block: Block, *, at_loss: bool = False) -> tuple[Run, ...]:
    return segments_of_least_peak(graph, block, model(graph, block), at_loss=at_loss)


def held_with(graph: Graph, block: Block, chosen: Sequence[Run]) -> int:
    """k + R, or what the block holds without segments."""
    if not chosen:
        return residuals(graph, block.start, block.stop)
    ends = segment_ends(graph, block)
    kept = residuals(graph, block.start, block.stop) - sum(run.freed_bytes for run in chosen)
    again = [residuals(graph, run.start, run.stop) for run in chosen]
    return kept + max([*again, *(residuals(graph, *pair) for pair in pairwise(ends))])


def all_sets(graph: Graph, ends: Sequence[int]) -> Iterator[tuple[Run, ...]]:
    """All sets of disjoint segments between ends that free anything."""
    if len(ends) < 2:
        yield ()
        return
    yield from all_sets(graph, ends[1:])
    for j in range(1, len(ends)):
        run = model(graph, whole(graph)).run(ends[0], ends[j])
        if run.freed_bytes > 0:
            yield from ((run, *rest) for rest in all_sets(graph, ends[j:]))


@given(losses())
@QUICK
def test_no_set_of_segments_holds_less(loss: Any) -> None:
    graph = graph_of(loss, struct(WIDTH, WIDTH), struct(WIDTH, WIDTH))
    block = whole(graph)
    found = segments(graph, block)
    assert all(a.stop <= b.start for a, b in pairwise(found))
    ends = segment_ends(graph, block)
    if len(ends) > 9:  # There are too many sets to look at all.
        block = make_block(graph, 0, ends[8])
        found, ends = segments(graph, block), ends[:9]
    least = min(held_with(graph, block, chosen) for chosen in all_sets(graph, ends))
    assert held_with(graph, block, found) <= STEP * least + 1


def deep_chain() -> Graph:
    def loss(ws: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        for w in ws:
            x = jnp.tanh(x @ w)
        return (x * x).sum()

    return graph_of(loss, [struct(8, 8)] * 16, struct(64, 8))


def test_a_deep_chain_is_held_in_few_of_its_layers() -> None:
    graph = deep_chain()
    found = segments(graph, whole(graph))
    assert 3 <= len(found) <= 6
    plain = residuals(graph, 0, len(graph.operations))
    assert held_with(graph, whole(graph), found) < plain / 2


def test_what_must_run_once_is_in_no_segment() -> None:
    graph = attention(effect=True)
    found = segments(graph, whole(graph))
    assert found
    for run in found:
        assert not any(op.effectful for op in graph.operations[run.start : run.stop])


def test_at_the_loss_the_last_segment_is_left_as_it_is() -> None:
    graph = deep_chain()
    elsewhere = segments(graph, whole(graph))
    at_loss = segments(graph, whole(graph), at_loss=True)
    assert at_loss and at_loss[-1].stop < elsewhere[-1].stop
    # What is left is no more than is recomputed at a time.
    left = residuals(graph, at_loss[-1].stop, len(graph.operations))
    assert left <= max(residuals(graph, run.start, run.stop) for run in elsewhere) * STEP


@pytest.mark.slow
def test_a_hidden_markov_model_takes_less_than_with_checkpoints_by_hand() -> None:
    """`associative_scan` is one block. Its combine function makes large values; wherever a run
    of it begins or ends, either little is freed or much is recomputed at a time."""

    def combine(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.nn.logsumexp(a[..., :, :, None] + b[..., None, :, :], axis=-2)

    def loss(f: Any) -> Any:
        def forward(transition: jax.Array, emission: jax.Array) -> jax.Array:
            return -jax.nn.logsumexp(jax.lax.associative_scan(f, transition + emission)[-1])

        return forward

    args = (struct(16, 16), struct(31, 8, 1, 16))
    by_hand = jax.jit(jax.value_and_grad(loss(jax.checkpoint(combine))))
    # Without this, XLA:CPU 0.10.2 merges what is recomputed with the first run.
    options = {"xla_disable_hlo_passes": "cse_barrier_expander"}
    hand = memory_stats(by_hand.lower(*args).compile(compiler_options=options))
    plan = jax_hremat.plan_remat(loss(combine), budget=hand.peak_bytes, target="cpu", effort="low")(
        *args
    )
    assert plan.certificate.peak_bytes <= hand.peak_bytes < 0.6 * plan.baseline_peak_bytes


@pytest.mark.parametrize("at_loss", [False, True])
def test_an_empty_program_has_no_segments(at_loss: bool) -> None:
    graph = graph_of(lambda x: x.sum(), struct(4))
    assert segments(graph, whole(graph), at_loss=at_loss) == ()
