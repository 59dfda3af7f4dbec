"""What the backward of a checkpointed range of operations runs again, and where such a range may
begin and end."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from jax_hremat._partition.blocks import Block
from jax_hremat._trace.graph import Graph, Operation

_MAX_ENDPOINTS = 40


def endpoints(graph: Graph, block: Block) -> list[int]:
    """Positions before and after each operation that XLA does not fuse away, or that must run
    exactly once."""
    points = {block.start, block.stop}
    operations = graph.operations[block.start : block.stop]
    points.update(end for op in operations if op.on_path and not op.fusible for end in _ends(op))
    if len(points) > _MAX_ENDPOINTS:
        heavy = sorted(points, key=lambda p: -_weight(graph, block, p))[:_MAX_ENDPOINTS]
        points = {block.start, block.stop, *heavy}
    points.update(end for op in operations if op.effectful for end in _ends(op))
    return sorted(points)


def _ends(op: Operation) -> tuple[int, int]:
    return op.id, op.id + 1


def _weight(graph: Graph, block: Block, position: int) -> int:
    around = graph.operations[max(block.start, position - 1) : position + 1]
    return sum(op.moved_bytes for op in around if not op.fusible)


def recomputed(
    graph: Graph, start: int, stop: int, saved: Collection[int] = ()
) -> tuple[set[int], set[int]]:
    """The operations of a run that its backward runs again, and the values from which it does."""
    needs = (v for op in graph.operations[start:stop] for v in op.needs)
    return run_again(graph, start, stop, needs, saved)


def run_again(
    graph: Graph, start: int, stop: int, wanted: Iterable[int], saved: Collection[int]
) -> tuple[set[int], set[int]]:
    """The operations of a range that are run again to make values, and the values from which they
    are: the saved ones that are read, and those that the range does not make."""
    again: set[int] = set()
    frontier: set[int] = set()
    stack = list(wanted)
    seen: set[int] = set()
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        producer = graph.values[v].producer
        if producer is None or v in saved or not start <= producer < stop:
            frontier.add(v)
            continue
        again.add(producer)
        stack.extend(graph.operations[producer].reads)
    return again, frontier
