"""The flat partitioner: no block contains more than one heavy operation."""

from __future__ import annotations

from jax_hremat._partition.width import narrow_cuts
from jax_hremat._trace.graph import Graph


def partition_flat(graph: Graph) -> list[int]:
    """Cut between every two heavy operations, where the fewest bytes are handed on.

    The root program then decides about all operations at once, as in Checkmate (Jain et al., MLSys
    2020), and groups are the only regions that contain several heavy operations. For small
    programs, and as a reference for the other partitioners.
    """
    return narrow_cuts(graph)
