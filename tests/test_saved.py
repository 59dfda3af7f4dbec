"""The leaf program against every set of values, on small random graphs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tracing import trace_loss

from jax_hremat._primitives.work import Work
from jax_hremat._solve import saved
from jax_hremat._solve.backend import Outcome, SolverConfig, Status
from jax_hremat._solve.saved import materialised_values, saved_value_sets, value_refs
from jax_hremat._trace.graph import Graph, Operation, Value, build_graph

MIB = 2**20
EXACT = SolverConfig(relative_gap=0.0)
QUICK = settings(max_examples=20, deadline=None, derandomize=True)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """One argument and up to seven operations on values of some MiB."""
    sizes, producers, operations = [4], [None], []
    for index in range(draw(st.integers(1, 7))):
        known = list(range(len(sizes)))
        # Mostly the newest value, so that the graph is deep.
        pick = st.just(known[-1]) | st.sampled_from(known)
        inputs = tuple(draw(st.lists(pick, min_size=1, max_size=2)))
        outputs = tuple(len(sizes) + k for k in range(draw(st.sampled_from([1, 1, 1, 2]))))
        sizes += [draw(st.integers(1, 8)) for _ in outputs]
        producers += [index] * len(outputs)
        needs = draw(st.sets(st.sampled_from([*inputs, *outputs]), max_size=2))
        made = operation(index, inputs, outputs, sorted(needs), draw(st.booleans()))
        # A custom rule that is one operation, and the arguments of one that was taken apart.
        opaque, spared = (
            draw(st.sampled_from([0, 0, 0, 8])),
            draw(st.sampled_from([(), inputs[:1]])),
        )
        # A maximum, or an operation that does no such thing.
        compares = draw(st.sampled_from([False, False, False, True]))
        rest = tuple(v for v in made.needs if not (compares and v in outputs))
        made = replace(made, needs=rest, compares_results=compares)
        operations.append(replace(made, opaque_bytes=opaque, spared=spared))
    return graph_of(operations, sizes, producers)


def operation(
    index: int,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    needs: Iterable[int],
    fusible: bool,
) -> Operation:
    return Operation(
        id=index,
        primitive="made_up",
        inputs=inputs,
        outputs=outputs,
        active=True,
        needs=tuple(needs),
        opaque_bytes=0,
        work=Work(),
        fusible=fusible,
        has_batch_dims=False,
        trips=1,
        once="",
        signature="",
        literals="",
        scope="",
        source="",
    )


def graph_of(operations: list[Operation], sizes: list[int], producers: list[int | None]) -> Graph:
    values = tuple(
        Value(
            id=v,
            text="",
            size_bytes=size * MIB,
            kind="argument" if producer is None else "computed",
            producer=producer,
            active=True,
            users=tuple(op.id for op in operations if v in op.inputs),
            is_output=v == len(sizes) - 1,
            is_compared=producer is not None and operations[producer].compares_results,
        )
        for v, (size, producer) in enumerate(zip(sizes, producers, strict=True))
    )
    return Graph(tuple(operations), values, (0,), (len(sizes) - 1,), (0,))


def times_of(graph: Graph) -> list[float]:
    """Different for each operation, so that few sums are equal."""
    return [(1 + op.id % 3 + 0.1 * op.id) * 1e-3 for op in graph.operations]


def recomputed(
    graph: Graph, start: int, stop: int, kept: Collection[int], *, opaque: bool = True
) -> set[int]:
    """What runs again in the backward if `kept` is kept: JAX's rule, followed backwards."""
    inside = graph.operations[start:stop]
    wanted = [v for op in inside for v in op.needs]
    again: set[int] = set()
    # A rule that keeps something that has no name makes it again, and a maximum is computed again
    # together with its input.
    stack = [op.id for op in inside if opaque and (op.opaque_bytes or op.compares_results)]
    stack += [p for v in wanted if v not in kept and (p := made_by(graph, v, start, stop)) >= 0]
    while stack:
        e = stack.pop()
        if e not in again:
            again.add(e)
            stack += [
                p
                for u in graph.operations[e].reads
                if u not in kept and (p := made_by(graph, u, start, stop)) >= 0
            ]
    return again


def made_by(graph: Graph, value: int, start: int, stop: int) -> int:
    """The operation of the stretch that makes the value, or −1."""
    producer = graph.values[value].producer
    return producer if producer is not None and start <= producer < stop else -1


def kept_sets(
    graph: Graph, start: int, stop: int, *, copies: bool = False
) -> list[tuple[int, ...]]:
    made = [
        v
        for op in graph.operations[start:stop]
        for v in op.outputs
        if copies or not op.compares_results
    ]
    return [s for n in range(len(made) + 1) for s in itertools.combinations(made, n)]


def size(graph: Graph, values: Iterable[int]) -> int:
    return sum(graph.values[v].size_bytes for v in values)


def stretches(graph: Graph) -> list[tuple[int, int]]:
    n = len(graph.operations)
    return [(0, n), (n // 3, n)]


@given(graphs(), st.integers(1, 4))
@QUICK
def test_no_set_of_values_within_the_bound_is_faster(graph: Graph, count: int) -> None:
    times = times_of(graph)
    for start, stop in stretches(graph):
        found = saved_value_sets(graph, start, stop, times, EXACT, count)
        choices = [
            (size(graph, s), sum(times[e] for e in recomputed(graph, start, stop, s)))
            for s in kept_sets(graph, start, stop)
        ]
        fullest = found[0].kept_bytes
        for step in range(count):
            bound = fullest * (count - step) / count
            best = min(time for kept, time in choices if kept <= bound)
            mine = min(a.recompute_s for a in found if a.kept_bytes <= bound)
            # A MiB counts as a nanosecond, to settle equal times.
            assert mine == pytest.approx(best, abs=1e-7)


@given(graphs())
@QUICK
def test_an_answer_says_what_jax_would_do(graph: Graph) -> None:
    times = times_of(graph)
    for start, stop in stretches(graph):
        answers = saved_value_sets(graph, start, stop, times, EXACT, 4)
        for answer in answers:
            assert set(answer.recomputed) == recomputed(graph, start, stop, answer.values)
            assert answer.recompute_s == pytest.approx(sum(times[e] for e in answer.recomputed))
            assert answer.kept_bytes == size(graph, answer.values)
            assert all(made_by(graph, v, start, stop) >= 0 for v in answer.values)
        kept = [a.kept_bytes for a in answers]
        spent = [a.recompute_s for a in answers]
        assert kept == sorted(kept, reverse=True)
        assert spent == sorted(spent)
        assert len({a.values for a in answers}) == len(answers)


@given(graphs())
@QUICK
def test_materialised_values_are_the_fewest_bytes_that_fusion_can_start_from(
    graph: Graph,
) -> None:
    for start, stop in stretches(graph):

        def enough(kept: Collection[int], start: int = start, stop: int = stop) -> bool:
            again = recomputed(graph, start, stop, kept, opaque=False)
            return all(graph.operations[e].fusible for e in again)

        held = materialised_values(graph, start, stop, EXACT)
        assert enough(held)
        least = min(size(graph, s) for s in kept_sets(graph, start, stop, copies=True) if enough(s))
        assert size(graph, held) == least


def test_keeping_its_own_output_spares_an_operation_and_what_leads_to_it() -> None:
    # Values 1 and 2 are made by operations whose derivatives read them (exponentials).
    chain = [operation(i, (i,), (i + 1,), [i + 1], True) for i in range(2)]
    graph = graph_of(chain, [4, 1, 1], [None, 0, 1])
    (answer,) = saved_value_sets(graph, 0, 2, [1e-3, 1e-3], EXACT, 1)
    assert (answer.values, answer.recomputed) == ((1, 2), ())
    # A rule that keeps more than it returns runs again, whatever is kept.
    graph = graph_of([chain[0], replace(chain[1], opaque_bytes=8)], [4, 1, 1], [None, 0, 1])
    (answer,) = saved_value_sets(graph, 0, 2, [1e-3, 1e-3], EXACT, 1)
    assert (answer.values, answer.recomputed) == ((1,), (1,))


def test_a_traced_program() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        hidden = jnp.sin(x @ w)
        return (jnp.cos(hidden @ w)).sum()

    graph = build_graph(trace_loss(loss, (jnp.ones((64, 64)), jnp.ones((256, 64)))))
    first, sine, second, cosine, _ = graph.operations
    times = [1e-3 if op.primitive == "dot_general" else 1e-5 for op in graph.operations]
    # Everything the backward reads is kept: the arguments of sine, second product and cosine.
    everything = saved_value_sets(graph, 0, len(graph.operations), times, EXACT, 3)
    assert everything[0].values == (first.outputs[0], sine.outputs[0], second.outputs[0])
    assert everything[0].recomputed == ()
    # With two thirds of the bytes the sine is made again from its argument.
    assert everything[1].values == (first.outputs[0], second.outputs[0])
    assert everything[1].recomputed == (sine.id,)
    # Fusion makes the sine, but not the products.
    held = materialised_values(graph, 0, len(graph.operations), EXACT)
    assert held == {first.outputs[0], second.outputs[0]}
    assert value_refs(graph, (second.outputs[0], first.outputs[0])) == (
        (first.id, 0),
        (second.id, 0),
    )
    assert cosine.needs == (second.outputs[0],)


def test_nothing_to_keep() -> None:
    graph = graph_of([operation(0, (0,), (1,), [0], True)], [4, 1], [None, 0])
    (answer,) = saved_value_sets(graph, 0, 1, [1e-3], EXACT, 3)
    assert (answer.values, answer.recomputed, answer.recompute_s) == ((), (), 0)


def test_a_limit_without_a_solution_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def undecided(problem: object, config: SolverConfig) -> Outcome:
        assert config == EXACT
        return Outcome(Status.UNDECIDED, float("inf"), float("inf"))

    monkeypatch.setattr(saved, "solve", undecided)
    operations = [operation(0, (0,), (1,), [1], True), operation(1, (1,), (2,), [1], False)]
    graph = graph_of(operations, [4, 4, 4], [None, 0, 1])
    assert saved_value_sets(graph, 0, 2, times_of(graph), EXACT, 3) == ()
    assert materialised_values(graph, 0, 2, EXACT) == {1, 2}
