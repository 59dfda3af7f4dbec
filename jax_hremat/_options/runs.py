"""Runs of operations in a block that may be worth checkpointing, ranked by an analytic model.

A run is a range of consecutive operations of a block. Checkpointed alone, with the rest of the
block plain, it drops the buffers that only its own backward reads, at the cost of recomputing them
from its inputs. The model only has to rank the good runs among the first dozen, which are compiled
and measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from jax_hremat._partition.blocks import Block
from jax_hremat._trace.graph import Graph, Operation

# Seconds of recomputation that a freed byte is worth: a sweep from "memory is nearly free" to
# "only memory counts", in multiples of the time to read the byte once.
PRICES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
_MAX_ENDPOINTS = 40
# Relative difference in bytes and in seconds below which two runs count as the same choice.
_ALIKE = 0.05
# A run is worth compiling if it frees at least this part of what the best run of the block frees.
_WORTH = 0.04


@dataclass(frozen=True, slots=True)
class Run:
    """Operations `start … stop − 1`, checkpointed alone.

    Attributes:
        start: First operation.
        stop: One past the last operation.
        freed_bytes: Bytes no longer kept between forward and backward, by the model.
        added_s: Seconds of recomputation, by the model.
        saved: Values made inside that it keeps nevertheless.
    """

    start: int
    stop: int
    freed_bytes: int
    added_s: float
    saved: tuple[int, ...] = ()

    def overlaps(self, other: Run) -> bool:
        """Whether the two runs share an operation."""
        return self.start < other.stop and other.start < self.stop


def candidate_runs(
    graph: Graph,
    block: Block,
    fewest_held: frozenset[int],
    times_s: Sequence[float],
    byte_s: float,
    count: int,
    prices: Sequence[float] = PRICES,
) -> tuple[Run, ...]:
    """The most promising runs of a block, best first.

    What XLA really keeps for a plain block lies between two bounds: the fewest values from which
    fusible operations can make the rest, and every residual of JAX's linearization. Under each
    bound and for each price of memory, the candidates are the best set of disjoint runs (weighted
    interval scheduling) and the best single runs. A run is left out if under both bounds it nearly
    equals an earlier one, or frees little compared with the best run.

    Args:
        graph: The program's graph.
        block: The block.
        fewest_held: The lower bound (`materialised_values`).
        times_s: Seconds of each operation of the program.
        byte_s: Seconds to read one byte.
        count: The most runs to return.
        prices: Prices of memory, in multiples of `byte_s` per byte.
    """
    bounds = (fewest_held, residuals(graph, block))
    all_runs = [_undominated(_all_runs(graph, block, held, times_s)) for held in bounds]
    rounds = [
        [*_best_packing(runs, price * byte_s), *_best_single(runs, price * byte_s)]
        for price in prices
        for runs in all_runs
    ]
    most = [max((run.freed_bytes for run in runs), default=0) for runs in all_runs]
    chosen: dict[Run, list[Run]] = {}
    for run in (run for place in zip_longest(*rounds) for run in place if run is not None):
        if len(chosen) == count:
            break
        bounded = [evaluate_run(graph, run.start, run.stop, held, times_s) for held in bounds]
        worthwhile = any(r.freed_bytes >= _WORTH * m for r, m in zip(bounded, most, strict=True))
        if worthwhile and not any(all(map(_alike, bounded, other)) for other in chosen.values()):
            chosen[run] = bounded
    return tuple(chosen)


def residuals(graph: Graph, block: Block) -> frozenset[int]:
    """The values that the backward of a block reads by JAX's linearization."""
    return frozenset(v for op in graph.operations[block.start : block.stop] for v in op.needs)


def _alike(a: Run, b: Run) -> bool:
    return (
        a.overlaps(b)
        and math.isclose(a.freed_bytes, b.freed_bytes, rel_tol=_ALIKE)
        and math.isclose(a.added_s, b.added_s, rel_tol=_ALIKE)
    )


def _endpoints(graph: Graph, block: Block) -> list[int]:
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


def _all_runs(
    graph: Graph, block: Block, held: frozenset[int], times_s: Sequence[float]
) -> list[Run]:
    points = _endpoints(graph, block)
    runs = []
    for i, start in enumerate(points):
        for stop in points[i + 1 :]:
            if any(op.effectful for op in graph.operations[start:stop]):
                break
            if (start, stop) == (block.start, block.stop):
                continue
            run = evaluate_run(graph, start, stop, held, times_s)
            if run.freed_bytes > 0:
                runs.append(run)
    return runs


def evaluate_run(
    graph: Graph, start: int, stop: int, held: frozenset[int], times_s: Sequence[float]
) -> Run:
    """One run with the bytes that checkpointing it frees and the seconds it adds, by the model."""
    inside = graph.operations[start:stop]
    again, frontier = _recomputed(graph, start, stop)
    freed = sum(op.opaque_bytes for op in inside)
    for op in inside:
        for v in op.outputs:
            # The backward of a reader outside the run may need the value, so the value stays.
            value = graph.values[v]
            if v in held and value.last_use < stop and not value.is_output:
                freed += value.size_bytes
    added = sum(
        graph.values[v].size_bytes
        for v in frontier
        if v not in held and graph.values[v].kind == "computed"
    )
    return Run(
        start=start,
        stop=stop,
        freed_bytes=freed - added,
        added_s=sum(times_s[e] for e in again),
    )


def saving_what_is_made_of_arguments(graph: Graph, run: Run, times_s: Sequence[float]) -> Run:
    """A run that keeps what it makes of arguments alone, such as the cast of a weight, and its
    backward reads. The same run if that is nothing."""
    again, _ = _recomputed(graph, run.start, run.stop)
    made = _made_of_arguments(graph, run.start, run.stop)
    needed = {v for op in graph.operations[run.start : run.stop] for v in op.needs}
    for op in (graph.operations[e] for e in again):
        if made.isdisjoint(op.outputs):
            needed.update(op.reads)
    saved = tuple(sorted(v for v in made & needed if graph.values[v].last_use < run.stop))
    fewer, _ = _recomputed(graph, run.start, run.stop, frozenset(saved))
    return replace(
        run,
        freed_bytes=run.freed_bytes - sum(graph.values[v].size_bytes for v in saved),
        added_s=run.added_s - sum(times_s[e] for e in again - fewer),
        saved=saved,
    )


def _recomputed(
    graph: Graph, start: int, stop: int, saved: frozenset[int] = frozenset()
) -> tuple[set[int], set[int]]:
    """The operations of a run that its backward runs again, and the values from which it does."""
    again: set[int] = set()
    frontier: set[int] = set()
    stack = [v for op in graph.operations[start:stop] for v in op.needs]
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


def _made_of_arguments(graph: Graph, start: int, stop: int) -> set[int]:
    """The values that operations of a run make of the program's arguments and nothing else."""
    made: set[int] = set()
    for op in graph.operations[start:stop]:
        read = [v for v in op.inputs if v is not None]
        if read and all(v in made or graph.values[v].kind == "argument" for v in read):
            made.update(op.outputs)
    return made


def _undominated(runs: Sequence[Run]) -> list[Run]:
    """The runs without those for which a run inside their range frees as much in no more time."""
    ordered = sorted(runs, key=lambda r: (r.stop - r.start, r.start))
    kept: list[Run] = []
    for run in ordered:
        if not any(
            k.start >= run.start
            and k.stop <= run.stop
            and k.freed_bytes >= run.freed_bytes
            and k.added_s <= run.added_s
            for k in kept
        ):
            kept.append(run)
    return kept


def _gain(run: Run, price_s: float) -> float:
    return price_s * run.freed_bytes - run.added_s


def _best_single(runs: Sequence[Run], price_s: float) -> list[Run]:
    ranked = sorted(runs, key=lambda r: (-_gain(r, price_s), r.start, r.stop))
    return [r for r in ranked if _gain(r, price_s) > 0][:3]


def _best_packing(runs: Sequence[Run], price_s: float) -> list[Run]:
    """Disjoint runs of the greatest total gain, by dynamic programming over their ends."""
    ordered = sorted(runs, key=lambda r: (r.stop, r.start))
    best: list[tuple[float, tuple[Run, ...]]] = [(0.0, ())]
    for i, run in enumerate(ordered):
        before = sum(other.stop <= run.start for other in ordered[:i])
        gain, members = best[before]
        taken = (gain + _gain(run, price_s), (*members, run))
        best.append(max(best[-1], taken, key=lambda entry: entry[0]))
    members = best[-1][1]
    return sorted(members, key=lambda r: (-_gain(r, price_s), r.start))
