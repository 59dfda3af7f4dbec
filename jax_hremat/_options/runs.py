"""Runs of operations in a block that may be worth checkpointing.

A run is a range of consecutive operations of a block. Checkpointed alone, with the rest of the
block plain, it drops the buffers that only its own backward reads, at the cost of recomputing them
from its inputs. What that frees and adds follows from what each operation of the plain block takes
(`_cost/profile.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._cost.profile import Profile, Residual
from jax_hremat._partition.blocks import Block
from jax_hremat._partition.width import unfused_operations
from jax_hremat._trace.graph import Graph, Operation

_MAX_ENDPOINTS = 40


@dataclass(frozen=True, slots=True)
class Run:
    """Operations `start … stop − 1`, checkpointed alone.

    Attributes:
        start: First operation.
        stop: One past the last operation.
        freed_bytes: Bytes no longer kept between forward and backward.
        added_s: Seconds of recomputation.
        saved: Values made inside that it keeps nevertheless.
        unwritten_bytes: Bytes of the values that it makes and later operations read, and that the
            plain block does not write. XLA may have to write them if the run is recomputed.
    """

    start: int
    stop: int
    freed_bytes: int
    added_s: float
    saved: tuple[int, ...] = ()
    unwritten_bytes: int = 0


class RunModel:
    """What checkpointed runs of a block free and add, by what the operations of the plain block
    take.

    A buffer that the run makes is freed if the backward of no operation after the run reads it.
    What the run's own backward is recomputed from is kept, if it is not anyway; it takes the place
    of buffers that it is made of and that only later operations read.

    A kept buffer between operations that XLA fuses keeps XLA from making one kernel of them: it
    computes what goes before the buffer and what comes after it in two kernels, each of which reads
    the input, as with the sums of a softmax. Where nothing is kept inside, one kernel may take as
    long as the longest of them, and what only the backward of these operations reads, its own
    kernels may recompute on the way. Whether XLA does so depends on the operations (it does where
    it reduces rows, not where it reduces columns), which only a compiled option tells.

    Args:
        graph: The program's graph.
        block: The block.
        profile: What its operations take.
        kept_inputs: The inputs of the block that are kept anyway.
        in_one_kernel: The ranges of which XLA makes one kernel inside a run; by default, none.
    """

    def __init__(
        self,
        graph: Graph,
        block: Block,
        profile: Profile,
        kept_inputs: Collection[int],
        in_one_kernel: Iterable[range] = (),
    ) -> None:
        self._graph = graph
        self._block = block
        self._profile = profile
        self._makers = {block.start + r.made_by for r in profile.residuals}
        self._kept_inputs = frozenset(kept_inputs)
        self._in_one_kernel = tuple(in_one_kernel)
        self._replaced: dict[int, frozenset[Residual]] = {}

    @property
    def times_s(self) -> Mapping[int, float]:
        """Seconds of each operation of the block."""
        return {self._block.start + i: t for i, t in enumerate(self._profile.forward_s)}

    @property
    def forward_s(self) -> float:
        """Seconds of the block's forward."""
        return sum(self._profile.forward_s)

    @property
    def kept_bytes(self) -> int:
        """Bytes that the plain block keeps."""
        return sum(r.size_bytes for r in self._profile.residuals)

    def held_bytes(self, operation: int) -> int:
        """Bytes of what an operation makes and the plain block keeps."""
        position = operation - self._block.start
        return sum(r.size_bytes for r in self._profile.residuals if r.made_by == position)

    def fusing(self, ranges: Iterable[range]) -> RunModel:
        """The same, where XLA makes one kernel of each of given ranges inside a run."""
        return RunModel(self._graph, self._block, self._profile, self._kept_inputs, ranges)

    @functools.cached_property
    def runs(self) -> Sequence[Run]:
        """The runs that free anything, each of which no other inside it equals; what a run makes of
        arguments alone, such as the cast of a weight, it may keep."""
        points = _endpoints(self._graph, self._block)
        found = []
        for i, start in enumerate(points):
            for stop in points[i + 1 :]:
                if any(op.effectful for op in self._graph.operations[start:stop]):
                    break
                if (start, stop) != (self._block.start, self._block.stop):
                    run = self.run(start, stop)
                    if run.freed_bytes > 0:
                        found.append(run)
        found = _undominated(found)
        return tuple(dict.fromkeys([*found, *map(self.saving_what_is_made_of_arguments, found)]))

    def maybe_in_one_kernel(self, least_s: float) -> list[range]:
        """The ranges of which XLA may make one kernel, those first that would save most; one that
        would save less than `least_s` is left out."""
        saved_s = {}
        for one in self._fusible:
            times_s = self._times_s(one)
            if len(one) < len(self._block):
                saved_s[one] = float(times_s.sum() - times_s.max(initial=0.0))
        return sorted((r for r, s in saved_s.items() if s > least_s), key=lambda r: -saved_s[r])

    def lowered_bytes(self, run: Run) -> int:
        """By how much a run lowers the most bytes of residuals that are alive at a time in the
        block's backward. What it frees is made again when the backward comes to its last
        operation."""
        first = self._block.start
        operations = range(run.start - first, run.stop - first)
        return self._most_alive_when_plain_bytes - self._most_alive_bytes(operations)

    @functools.cached_property
    def _most_alive_when_plain_bytes(self) -> int:
        return self._most_alive_bytes(range(0))

    def _most_alive_bytes(self, run: range) -> int:
        alive = [0] * (len(self._block) + 1)
        for r in self._profile.residuals:
            begins = (run.stop if r.is_within(run) else len(self._block)) - 1
            alive[begins] += r.size_bytes
            alive[r.first_reader - 1] -= r.size_bytes
        # The backward runs from the last operation to the first.
        return max(accumulate(reversed(alive[: len(self._block)])), default=0)

    def freed_bytes(self, saved: Collection[int]) -> int:
        """Bytes that are freed if the whole block is checkpointed and keeps given values."""
        inputs_bytes = self._bytes_to_keep(self._block.inputs)
        saved_bytes = sum(self._graph.values[v].size_bytes for v in saved)
        return self.kept_bytes - inputs_bytes - saved_bytes

    def freed_bytes_of(self, plain: OptionCost, cost: OptionCost) -> int:
        """Bytes that are freed under an option of the block, by its cost and the plain one's."""
        inputs_bytes = self._bytes_to_keep([self._block.inputs[i] for i in cost.kept_inputs])
        return plain.kept_bytes - cost.kept_bytes - inputs_bytes

    def run(self, start: int, stop: int) -> Run:
        """Operations `start … stop − 1` as a run."""
        again, frontier = _recomputed(self._graph, start, stop)
        operations = range(start - self._block.start, stop - self._block.start)
        freed = (r for r in self._profile.residuals if r.is_within(operations))
        return Run(
            start=start,
            stop=stop,
            freed_bytes=sum(r.size_bytes for r in freed) - self._bytes_to_keep(frontier),
            added_s=self._added_s(range(start, stop), again),
            unwritten_bytes=sum(
                self._graph.values[v].size_bytes
                for op in self._graph.operations[start:stop]
                for v in op.outputs
                if self._graph.values[v].last_use >= stop and not self._is_written(v)
            ),
        )

    def saving_what_is_made_of_arguments(self, run: Run) -> Run:
        """A run that keeps what it makes of arguments alone, such as the cast of a weight, and its
        backward reads. The same run if that is nothing."""
        graph = self._graph
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
            added_s=self._added_s(range(run.start, run.stop), fewer),
            saved=saved,
        )

    def _added_s(self, run: range, again: set[int]) -> float:
        """Seconds that a run adds whose backward runs given operations again."""
        fused = [r for r in self._in_one_kernel if run.start <= r.start and r.stop <= run.stop]
        added_s = self._times_s(sorted(again.difference(*fused))).sum()
        for one in fused:
            inside = sorted(again.intersection(one))
            times_s = self._times_s(one)
            added_s -= times_s.sum() - times_s.max(initial=0.0)
            if self._are_written(inside, set(run).difference(one), again):
                added_s += self._times_s(inside).max(initial=0.0)
        return float(added_s)

    def _are_written(self, made: Iterable[int], others: Set[int], again: Set[int]) -> bool:
        """Whether results of operations that are run again are read by others of the same run: by
        their backward, or since they are run again too."""
        operations = self._graph.operations
        results = {v for op in made for v in operations[op].outputs}
        read = {v for op in others for v in operations[op].needs}
        read.update(v for op in others & again for v in operations[op].reads)
        return not results.isdisjoint(read)

    @functools.cached_property
    def _fusible(self) -> list[range]:
        """The longest ranges of operations without one that XLA fuses with nothing, such as a
        matrix product, or that must run exactly once."""
        graph, first, last = self._graph, self._block.start, self._block.stop
        unfused = unfused_operations(graph, reductions=False)
        once = (op.id for op in graph.operations[first:last] if op.effectful)
        alone = sorted({*(i for i in unfused if first <= i < last), *once})
        begins = [first, *(i + 1 for i in alone)]
        return [*filter(len, map(range, begins, [*alone, last]))]

    def _times_s(self, operations: Iterable[int]) -> np.ndarray:
        return np.array([self._profile.forward_s[e - self._block.start] for e in operations])

    def _bytes_to_keep(self, values: Collection[int]) -> int:
        """How many more bytes to keep, so that given values are kept."""
        new = [v for v in values if not self._is_kept(v)]
        replaced = frozenset[Residual]().union(*map(self._replaced_by, new))
        more_bytes = sum(self._graph.values[v].size_bytes for v in new)
        return max(more_bytes - sum(r.size_bytes for r in replaced), 0)

    def _is_kept(self, value: int) -> bool:
        v = self._graph.values[value]
        if v.kind != "computed" or value in self._kept_inputs or v.producer in self._makers:
            return True
        if v.producer is None or v.producer >= self._block.start:
            return False
        # An input that the backward of an earlier block reads is kept for that.
        before = self._graph.operations[v.producer : self._block.start]
        return any(value in op.needs for op in before)

    def _is_written(self, value: int) -> bool:
        """Whether the plain block writes a value, or what is only another view of it."""
        v = self._graph.values[value]
        if v.producer is None or v.producer < self._block.start:
            return True
        if v.producer - self._block.start in self._profile.written:
            return True
        maker = self._graph.operations[v.producer]
        same = [u for u in maker.reads if self._graph.values[u].size_bytes == v.size_bytes]
        return maker.fusible and not maker.flops and bool(same) and self._is_written(same[0])

    def _replaced_by(self, value: int) -> frozenset[Residual]:
        """The buffers that need not be kept if a value is: fusible operations make it of them, and
        only later ones read them."""
        if value not in self._replaced:
            self._replaced[value] = frozenset(self._find_replaced(value))
        return self._replaced[value]

    def _find_replaced(self, value: int) -> Iterator[Residual]:
        first = self._block.start
        at = self._graph.values[value].producer
        stack, seen = [value], {value}
        while stack:
            maker = self._graph.values[stack.pop()].producer
            if at is None or maker is None or maker < first:
                continue
            made = [r for r in self._profile.residuals if first + r.made_by == maker]
            yield from (r for r in made if first + r.first_reader >= at)
            operation = self._graph.operations[maker]
            if operation.fusible and not made:
                new = [v for v in operation.reads if v not in seen]
                seen.update(new)
                stack += new


def profile_of_held(
    graph: Graph, block: Block, held: frozenset[int], times_s: Sequence[float]
) -> Profile:
    """The profile of a block that is not compiled by itself, if its backward reads given values."""
    residuals = []
    for position, op in enumerate(graph.operations[block.start : block.stop]):
        if op.opaque_bytes:
            residuals.append(Residual(op.opaque_bytes, position, position, position))
        for v in held.intersection(op.outputs):
            value = graph.values[v]
            last = block.stop if value.is_output else value.last_use
            residual = Residual(value.size_bytes, position, position, last - block.start)
            residuals.append(residual)
    operations = graph.operations[block.start : block.stop]
    written = frozenset(i for i, op in enumerate(operations) if not op.fusible)
    return Profile(tuple(residuals), tuple(times_s[block.start : block.stop]), written)


def needed_values(graph: Graph, block: Block) -> frozenset[int]:
    """The values that the backward of a block reads by JAX's linearization."""
    return frozenset(v for op in graph.operations[block.start : block.stop] for v in op.needs)


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
    """The runs without those for which a run inside their range frees as much in no more time, and
    leaves no more results unwritten."""
    ordered = sorted(runs, key=lambda r: (r.stop - r.start, r.start))
    kept: list[Run] = []
    for run in ordered:
        if not any(
            k.start >= run.start
            and k.stop <= run.stop
            and k.freed_bytes >= run.freed_bytes
            and k.added_s <= run.added_s
            and k.unwritten_bytes <= run.unwritten_bytes
            for k in kept
        ):
            kept.append(run)
    return kept
