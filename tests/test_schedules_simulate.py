"""The simulator of schedules, against cases worked by hand, and where drops are put."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.random_graphs import KINDS, random_graph
from jax_hremat._schedules.graph import Graph, Operation
from jax_hremat._schedules.schedule import (
    Compute,
    Drop,
    Schedule,
    Step,
    with_drops,
    without_unread,
)
from jax_hremat._schedules.simulate import simulate, without_recompute
from jax_hremat._shared.errors import InvalidScheduleError

# a (4 bytes) is read by b (2) and by d (1); b is read by c (8, and 16 of workspace); c by d.
GRAPH = Graph(
    (
        Operation(name="a", time_s=1.0, output_bytes=4),
        Operation(name="b", time_s=2.0, output_bytes=2, reads=(0,)),
        Operation(name="c", time_s=4.0, output_bytes=8, reads=(1,), workspace_bytes=16),
        Operation(name="d", time_s=8.0, output_bytes=1, reads=(0, 2)),
    ),
    constant_bytes=100,
)
A, B, C, D = range(4)


def test_without_recompute() -> None:
    schedule = without_recompute(GRAPH)
    assert schedule.steps == (
        Compute(A), Compute(B), Compute(C), Drop(B), Compute(D), Drop(A), Drop(C),
    )  # fmt: skip
    run = simulate(GRAPH, schedule)
    assert run.memory_bytes == (104, 106, 114, 112, 113, 109, 101)
    # While c is computed: a, b, c and the workspace.
    assert (run.peak_bytes, run.peak_step, run.peak_operation) == (130, 2, C)
    assert run.time_s == 15.0
    assert run.num_computations == 4


def test_a_value_computed_again() -> None:
    schedule = with_drops(GRAPH, [A, B, C, A, D])
    assert schedule.steps == (
        Compute(A), Compute(B), Drop(A), Compute(C), Drop(B), Compute(A), Compute(D), Drop(A),
        Drop(C),
    )  # fmt: skip
    run = simulate(GRAPH, schedule)
    assert run.memory_bytes == (104, 106, 102, 110, 108, 112, 113, 109, 101)
    # While c is computed: b, c and the workspace.
    assert (run.peak_bytes, run.peak_step) == (126, 3)
    assert (run.time_s, run.num_computations) == (16.0, 5)
    assert schedule.order == (A, B, C, A, D)


def test_the_output_is_there_before_anything_is_freed() -> None:
    graph = Graph(
        (
            Operation(name="a", time_s=1.0, output_bytes=10),
            Operation(name="b", time_s=1.0, output_bytes=10, reads=(0,)),
        )
    )
    assert simulate(graph, without_recompute(graph)).peak_bytes == 20


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([Compute(B)], "step 0 computes 'b', and 'a' is not there"),
        ([Compute(A), Compute(A)], "step 1 computes 'a', whose value is there already"),
        ([Compute(A), Drop(B)], "step 1 drops the value of 'b', which is not there"),
        ([Compute(A), Compute(B), Drop(A), Drop(A)], "step 3 drops the value of 'a'"),
        ([Compute(4)], "the graph has 4 operations"),
        ([Drop(-1)], "the graph has 4 operations"),
        ([Compute(A)], "after all 1 steps, 'd' is not there"),
        ([Compute(A), Compute(B), Drop(A), Drop(B), Compute(D)], "'a', 'c' are not there"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(steps: list[Step], message: str) -> None:
    with pytest.raises(InvalidScheduleError, match=message):
        simulate(GRAPH, Schedule(tuple(steps)))


def test_computations_that_nothing_reads() -> None:
    assert without_unread(GRAPH, [A, B, A, B, C, C, A, D]) == (A, B, C, A, D)
    # A value that is computed and not read is dropped at once.
    assert with_drops(GRAPH, [A, A, B]).steps[:2] == (Compute(A), Drop(A))


@given(st.sampled_from(sorted(KINDS)), st.integers(2, 8), st.integers(0, 1000), st.randoms())
def test_drops_are_as_early_as_possible(kind: str, size: int, seed: int, rng: object) -> None:
    graph = random_graph(kind, size, seed)
    order = _order_with_repetitions(graph, rng)
    schedule = with_drops(graph, order)
    run = simulate(graph, schedule)
    assert schedule.order == tuple(order)
    fewer = without_unread(graph, order)
    assert simulate(graph, with_drops(graph, fewer)).peak_bytes <= run.peak_bytes
    # No drop can go before the computation it follows, or the value would be missing.
    steps = list(schedule.steps)
    for k, step in enumerate(steps[1:], 1):
        if isinstance(step, Drop) and isinstance(steps[k - 1], Compute):
            earlier = [*steps[: k - 1], step, steps[k - 1], *steps[k + 1 :]]
            with pytest.raises(InvalidScheduleError):
                simulate(graph, Schedule(tuple(earlier)))


def _order_with_repetitions(graph: Graph, rng: object) -> list[int]:
    assert hasattr(rng, "random")
    order: list[int] = []
    for i in range(len(graph)):
        order.append(i)
        if rng.random() < 0.3:
            order.append(rng.randrange(i + 1))
    return order
