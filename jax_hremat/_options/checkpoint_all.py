"""A whole region checkpointed, except operations that must run exactly once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jax_hremat._plan.region import Region
from jax_hremat._trace.graph import Graph

Wrap = Callable[[int, int], Region]


def checkpoint_all(graph: Graph, region: Region, wrap: Wrap) -> Region:
    """The plain region under one `jax.checkpoint`. If some of its operations must run exactly once,
    the ranges before, between and after them are each under one `jax.checkpoint`.

    Args:
        graph: The program's graph.
        region: The plain region; its children stay as they are.
        wrap: Makes the checkpointed region of operations `start … stop − 1`.
    """
    operations = graph.operations[region.start : region.stop]
    once = [op.id for op in operations if op.effectful]
    edges = [region.start, *(edge for op in once for edge in (op, op + 1)), region.stop]
    parts: list[Region] = []
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        inside = tuple(c for c in region.children if start <= c.start and c.stop <= stop)
        between = graph.operations[start:stop]
        if not once or any(op.needs or op.opaque_bytes for op in between):
            parts.append(replace(wrap(start, stop), children=inside))
    if not once:
        return parts[0]
    parts += [child for child in region.children if child.start in once]
    return replace(region, children=tuple(sorted(parts, key=lambda part: part.start)))
