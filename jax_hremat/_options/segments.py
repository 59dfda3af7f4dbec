"""A block cut into checkpointed segments so that its backward needs little memory.

Runs that each free many bytes (`_options/runs.py`) can be long, and the backward of a long run
holds all that the run recomputes. Segments bound both: what the block keeps, and what is recomputed
at a time. The segments end where the partitioner would cut, at the narrowest position between two
heavy operations (`_partition/width.py`), but here a reduction is one of these.

Glossary
    k       bytes held for the backward that lie in no segment, or between segments
    r_i     bytes held for the backward of segment i once it is recomputed
    R       bound on all r_i, at least the bytes held between any two neighbouring ends

Program, for each R of a sweep:

    min k   over sets of disjoint segments with   r_i ≤ R

The answer is the set of least k + R. After Chen et al., "Training Deep Nets with Sublinear
Memory Cost" (arXiv:1604.06174), section 4.1, whose segments are of equal length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, starmap

from jax_hremat._options.packing import Packing
from jax_hremat._options.runs import Run, RunModel
from jax_hremat._partition.blocks import Block
from jax_hremat._partition.width import narrow_cuts, unfused_operations
from jax_hremat._trace.graph import Graph

# Ratio of one bound R to the next.
STEP = 2 ** (1 / 16)


def segments_of_least_peak(
    graph: Graph, block: Block, model: RunModel, *, at_loss: bool = False
) -> tuple[Run, ...]:
    """The disjoint segments of a block of least k + R, in program order; none if that is no less
    than the block holds without them.

    Args:
        graph: The program's graph.
        block: The block.
        model: What its runs free and add.
        at_loss: Whether the block's backward follows its forward at once. Then what is held of the
            last segment is in use anyway, and recomputing it would only be work.
    """
    ends = segment_ends(graph, block)
    every = range(block.start, block.stop)
    before = list(accumulate(map(model.held_bytes, every), initial=0))

    def held_bytes(start: int, stop: int) -> int:
        return before[stop - block.start] - before[start - block.start]

    @functools.cache
    def segment(start: int, stop: int) -> Run | None:
        """The operations as a segment; None if that may not be, or frees nothing."""
        if any(op.effectful for op in graph.operations[start:stop]):
            return None
        if at_loss and stop == block.stop:
            return Run(start, stop, held_bytes(start, stop), 0.0)
        run = model.run(start, stop)
        return run if run.freed_bytes > 0 else None

    best, least_bytes = Packing(), before[-1]
    bound = float(max(starmap(held_bytes, pairwise(ends))))
    while bound < least_bytes:
        found = _most_freed(ends, int(bound), held_bytes, segment)
        peak_bytes = before[-1] - found.freed_bytes + int(bound)
        if peak_bytes < least_bytes:
            best, least_bytes = found, peak_bytes
        bound = max(STEP * bound, bound + 1)
    return tuple(run for run in best.runs if not (at_loss and run.stop == block.stop))


def segment_ends(graph: Graph, block: Block) -> list[int]:
    """Where segments of a block may begin and end, the block's own ends among them."""
    cuts = narrow_cuts(graph, unfused_operations(graph))
    once = [op.id for op in graph.operations[block.start : block.stop] if op.effectful]
    inside = {p for p in cuts if block.start < p < block.stop}
    return sorted({block.start, *inside, *once, *(op + 1 for op in once), block.stop})


def _most_freed(
    ends: Sequence[int],
    bound_bytes: int,
    held_bytes: Callable[[int, int], int],
    segment: Callable[[int, int], Run | None],
) -> Packing:
    """The disjoint segments between given ends that free most, of equal ones in the least time,
    each of which holds at most `bound_bytes` once it is recomputed, by dynamic programming over the
    ends."""
    # best[i]: the best set up to end i.
    best = [Packing()]
    for j, stop in enumerate(ends[1:], start=1):
        here = best[-1]
        for i in reversed(range(j)):
            if held_bytes(ends[i], stop) > bound_bytes:
                break
            run = segment(ends[i], stop)
            if run is not None:
                here = max(here, best[i].extended(run), key=lambda p: (p.freed_bytes, -p.added_s))
        best.append(here)
    return best[-1]
