"""The fastest persistent schedule of a chain, by dynamic programming."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_hremat._schedules.graph import Graph
from jax_hremat._schedules.line import line_of
from jax_hremat._schedules.persistent import Persistent, check_count, segments_of
from jax_hremat._schedules.simulate import simulate, without_recompute
from jax_hremat._schedules.strategy import Family


@dataclass(frozen=True, slots=True)
class Rotor(Family):
    """The fastest persistent schedule for every size of memory.

    A graph that is no chain is made one of segments, cut where all of its forward passes through
    one value; within a segment everything that its backward reads is kept. A graph without such
    values is one segment, of which nothing can be recomputed.

    Memory is counted in units, and sizes are rounded up to units, so schedules may take less than
    was counted, never more. A unit is the `slots`-th part of the peak without recomputation, or the
    greatest common divisor of all sizes if that is larger. Where it is, on a chain where every
    backward reads what its forward reads, no persistent schedule within the peak is faster.

    Attributes:
        slots: Units of memory in the peak without recomputation.
        max_segments: Longer chains are refused; with the default of slots, so many take about 3 GB.

    Raises:
        SolverError: The graph has too many segments.
    """

    name = "rotor"
    summary = "fastest persistent schedule of a chain, by dynamic program"
    source = (
        'Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: "Optimal checkpointing for '
        'heterogeneous chains", 2019 (the recursion is in `persistent.py`)'
    )
    leaves_out = (
        "schedules that are not persistent; offloading; of a graph that is no chain, choices "
        "inside a segment"
    )

    slots: int = 500
    max_segments: int = 1000

    def orders(self, graph: Graph) -> Iterator[Sequence[int]]:
        segments = segments_of(line_of(graph))
        check_count(segments, self.max_segments)
        options = [(segment.keeping,) for segment in segments]
        yield range(len(graph))
        yield from Persistent(graph, segments, options, unit_bytes(graph, self.slots)).orders()


def unit_bytes(graph: Graph, slots: int) -> int:
    """The unit in which the peak without recomputation is at most so many units; at least the
    greatest common divisor of all sizes, which loses nothing."""
    peak_bytes = simulate(graph, without_recompute(graph)).peak_bytes - graph.constant_bytes
    sizes = (size for o in graph.operations for size in (o.output_bytes, o.workspace_bytes))
    return max(1, math.gcd(*sizes), -(-peak_bytes // slots))
