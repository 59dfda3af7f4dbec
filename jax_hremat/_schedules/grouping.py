"""How the places of a line are grouped into parts, and parts into larger ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jax_hremat._schedules.graph import Graph
from jax_hremat._schedules.line import Line
from jax_hremat._schedules.parts import bytes_of, made_for_others, read_from_others


@dataclass(frozen=True, slots=True)
class Node:
    """The places of a line from `start` up to `stop`, as one part, and the parts inside it."""

    start: int
    stop: int
    children: tuple[Node, ...] = ()


class Partitioner(Protocol):
    """A way to group; like a strategy, it is a value."""

    def __call__(
        self, graph: Graph, line: Line, max_parts: int, max_children: int
    ) -> tuple[Node, ...]:
        """At most `max_parts` parts of a line, each of which holds at most `max_children` parts, or
        none if it is not divided further."""
        ...


@dataclass(frozen=True, slots=True)
class ByScore:
    """Make the group with the largest score a part, then the next: minus the bytes of the values
    that pass into and out of it, times a power of its number of operations.

    Attributes:
        power: Of the number of operations; with 0, bytes alone count.
    """

    power: float = 0.5

    def __call__(
        self, graph: Graph, line: Line, max_parts: int, max_children: int
    ) -> tuple[Node, ...]:
        def score(start: int, stop: int) -> float:
            forward = line.forward[start:stop]
            own = {*forward, *(i for place in line.backward[start:stop] for i in place)}
            into = {i for i in read_from_others(graph, own) if not line.is_backward[i]}
            passing_bytes = bytes_of(graph, into | made_for_others(graph, forward, own))
            return -passing_bytes * (stop - start) ** self.power

        return _grouped(line, max_parts, max_children, score)


@dataclass(frozen=True, slots=True)
class Randomly:
    """Make a group drawn at random a part, then the next.

    Attributes:
        seed: Equal seeds group equally.
    """

    seed: int

    def __call__(
        self, graph: Graph, line: Line, max_parts: int, max_children: int
    ) -> tuple[Node, ...]:
        rng = random.Random(self.seed)
        return _grouped(line, max_parts, max_children, lambda start, stop: rng.random())


@dataclass(frozen=True, slots=True)
class Equally:
    """Divide the line into parts of equally many places, each of these again, and so on."""

    def __call__(
        self, graph: Graph, line: Line, max_parts: int, max_children: int
    ) -> tuple[Node, ...]:
        return _divided(_smallest(line), max_parts, max_children)


def _smallest(line: Line) -> list[Node]:
    """The parts between neighbouring cuts."""
    ends = (0, *line.cuts, len(line.forward))
    return [Node(a, b) for a, b in itertools.pairwise(ends)]


def _divided(nodes: Sequence[Node], max_parts: int, max_children: int) -> tuple[Node, ...]:
    if len(nodes) <= max_parts:
        return tuple(nodes)
    ends = [len(nodes) * k // max_parts for k in range(max_parts + 1)]
    groups = [nodes[a:b] for a, b in itertools.pairwise(ends)]
    return tuple(
        group[0]
        if len(group) == 1
        else Node(group[0].start, group[-1].stop, _divided(group, max_children, max_children))
        for group in groups
    )


def _grouped(
    line: Line, max_parts: int, max_children: int, score: Callable[[int, int], float]
) -> tuple[Node, ...]:
    """Group neighbours, those with the largest score first."""
    nodes = _smallest(line)
    while len(nodes) > max_parts:
        nodes = _one_level(nodes, max_parts, max_children, score)
    return tuple(nodes)


def _one_level(
    nodes: Sequence[Node], max_parts: int, max_children: int, score: Callable[[int, int], float]
) -> list[Node]:
    """Group each node at most once, until there are few enough."""

    def order(group: tuple[int, int]) -> tuple[float, int]:
        a, b = group
        return score(nodes[a].start, nodes[b - 1].stop), a

    groups = [
        (a, b)
        for a in range(len(nodes))
        for b in range(a + 2, min(a + max_children, len(nodes)) + 1)
    ]
    count = len(nodes)
    taken: set[int] = set()
    chosen: dict[int, int] = {}
    for a, b in sorted(groups, key=order, reverse=True):
        if count > max_parts and taken.isdisjoint(range(a, b)):
            taken.update(range(a, b))
            chosen[a] = b
            count -= b - a - 1
    return _merged(nodes, chosen)


def _merged(nodes: Sequence[Node], groups: dict[int, int]) -> list[Node]:
    """The nodes, with those from each key of `groups` up to its value as one."""
    found: list[Node] = []
    a = 0
    while a < len(nodes):
        b = groups.get(a)
        if b is None:
            found.append(nodes[a])
        else:
            found.append(Node(nodes[a].start, nodes[b - 1].stop, tuple(nodes[a:b])))
        a = a + 1 if b is None else b
    return found
