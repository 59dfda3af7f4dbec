"""Schedules: operations computed and values dropped, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax_hremat._schedules.graph import Graph
from jax_hremat._schedules.parts import needed


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute an operation, for the first time or again; its value is there afterwards."""

    operation: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Free the memory of an operation's value."""

    operation: int


Step = Compute | Drop


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is computed and dropped, in order.

    Attributes:
        steps: Which operations are computed and which values dropped; operations are named by their
            position in the graph.
        bound_s: No schedule among those that the strategy chooses from is faster within the peak
            that was asked for; None if the strategy proves nothing.
    """

    steps: tuple[Step, ...]
    bound_s: float | None = None

    @property
    def order(self) -> tuple[int, ...]:
        """The operations in the order in which they are computed, repetitions included."""
        return tuple(step.operation for step in self.steps if isinstance(step, Compute))


def with_drops(graph: Graph, order: Sequence[int], *, bound_s: float | None = None) -> Schedule:
    """The schedule that computes the operations in this order and drops each value as early as
    possible: after it is read for the last time before it is computed again, or at once if it is
    not read. Results stay after they are computed for the last time.

    Whether every operation finds what it reads is not checked: `simulate` does.
    """
    drops: list[list[int]] = [[] for _ in order]
    # The last step at which the value that is there is made or read.
    last_use: dict[int, int] = {}
    for step, i in enumerate(order):
        for j in graph.operations[i].reads:
            last_use[j] = step
        if i in last_use:
            drops[last_use[i]].append(i)
        last_use[i] = step
    results = set(graph.results)
    for i, step in last_use.items():
        if i not in results:
            drops[step].append(i)
    steps: list[Step] = []
    for i, dropped in zip(order, drops, strict=True):
        steps.append(Compute(i))
        steps += [Drop(j) for j in sorted(dropped)]
    return Schedule(tuple(steps), bound_s)


def without_unread(graph: Graph, order: Sequence[int]) -> tuple[int, ...]:
    """The order without computations of values that nothing reads before they are computed
    again or the schedule ends, unless they are results."""
    return needed(graph, order, graph.results)
