"""What a part of a schedule needs and takes, the rest of it left out."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from jax_hremat._schedules.graph import Graph


def needed(
    graph: Graph, order: Sequence[int], wanted: Collection[int], stored: Collection[int] = ()
) -> tuple[int, ...]:
    """Of these computations, in order, those that must be made to have the wanted values at the
    end, given the stored ones."""
    missing = set(wanted).difference(stored)
    kept = []
    for i in reversed(order):
        if i in missing:
            missing.remove(i)
            missing.update(j for j in graph.operations[i].reads if j not in stored)
            kept.append(i)
    return tuple(reversed(kept))


def read_first(graph: Graph, order: Sequence[int], own: set[int]) -> set[int]:
    """The values of `own` that these computations read before they make them."""
    found: set[int] = set()
    made: set[int] = set()
    for i in order:
        found.update(j for j in graph.operations[i].reads if j in own and j not in made)
        made.add(i)
    return found


def read_from_others(graph: Graph, own: set[int]) -> set[int]:
    """The values that these operations read and others make."""
    return {j for i in own for j in graph.operations[i].reads} - own


def made_for_others(graph: Graph, made: Iterable[int], own: set[int]) -> set[int]:
    """Of what some of `own` make, the values that others read, and results."""
    return {i for i in made if i in graph.results or not own.issuperset(graph.readers[i])}


def time_s_of(graph: Graph, order: Sequence[int]) -> float:
    """Seconds of these computations."""
    return math.fsum(graph.operations[i].time_s for i in order)


def bytes_of(graph: Graph, values: Iterable[int]) -> int:
    """The sum of the sizes of these values."""
    return sum(graph.operations[i].output_bytes for i in values)


def peak_bytes_of(
    graph: Graph,
    order: Sequence[int],
    counted: Collection[int],
    present: Collection[int],
    ending: Collection[int],
) -> int:
    """The peak of computations in order, of the counted values, if some are there at the start and
    some stay; each of the others is dropped as early as possible."""
    last_use: dict[tuple[int, int], int] = {}
    copies = {i: 0 for i in counted}
    there: dict[int, int] = {i: 0 for i in present}
    for step, i in enumerate(order):
        for j in graph.operations[i].reads:
            if j in copies:
                last_use[j, copies[j]] = step
        if i in copies:
            copies[i] += 1
            last_use[i, copies[i]] = step
    final = {(i, copies[i]) for i in ending if i in copies}
    copies = {i: 0 for i in counted}
    memory = sum(
        graph.operations[i].output_bytes for i in there if (i, 0) in last_use or (i, 0) in final
    )
    peak = memory
    for step, i in enumerate(order):
        operation = graph.operations[i]
        if i in copies:
            copies[i] += 1
            memory += operation.output_bytes
        peak = max(peak, memory + operation.workspace_bytes)
        for j in {i, *operation.reads}:
            if j in copies and last_use.get((j, copies[j])) == step and (j, copies[j]) not in final:
                memory -= graph.operations[j].output_bytes
    return peak
