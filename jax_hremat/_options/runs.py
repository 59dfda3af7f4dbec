"""Runs of operations in a block that may be worth checkpointing.

A run is a range of consecutive operations of a block. Checkpointed alone, with the rest of the
block plain, it drops the buffers that only its own backward reads, at the cost of recomputing them
from its inputs. What that frees and adds follows from what each operation of the plain block takes
(`_cost/profile.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._cost.profile import Profile, Residual
from jax_hremat._options.kept import KeptBuffers
from jax_hremat._options.recomputed import endpoints, recomputed
from jax_hremat._partition.blocks import Block, made_of_arguments
from jax_hremat._partition.width import unfused_operations
from jax_hremat._trace.graph import Graph


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
        self._kept_inputs = frozenset(kept_inputs)
        self._kept = KeptBuffers(graph, block, profile, self._kept_inputs)
        self._in_one_kernel = tuple(in_one_kernel)

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
        return self._kept.total_bytes

    def held_bytes(self, operation: int) -> int:
        """Bytes of what an operation makes and the plain block keeps."""
        return self._kept.made_by_bytes(operation)

    def fusing(self, ranges: Iterable[range]) -> RunModel:
        """The same, where XLA makes one kernel of each of given ranges inside a run."""
        return RunModel(self._graph, self._block, self._profile, self._kept_inputs, ranges)

    @functools.cached_property
    def runs(self) -> Sequence[Run]:
        """The runs that free anything, each of which no other inside it equals; what a run makes of
        arguments alone, such as the cast of a weight, it may keep."""
        points = endpoints(self._graph, self._block)
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

    @property
    def lowering_most(self) -> Run | None:
        """The run that lowers the most bytes alive in the block's backward by most, in the least
        time; None if none lowers them."""
        lowered = {run: self.lowered_bytes(run) for run in self.runs}
        most = max(self.runs, key=lambda run: (lowered[run], -run.added_s), default=None)
        return most if most is not None and lowered[most] > 0 else None

    def lowered_bytes(self, run: Run) -> int:
        """By how much a run lowers the most bytes of residuals that are alive at a time in the
        block's backward. What it frees is made again when the backward comes to its last
        operation."""
        return self._most_alive_bytes - self._kept.most_alive_bytes(range(run.start, run.stop))

    @functools.cached_property
    def _most_alive_bytes(self) -> int:
        """The same of the plain block."""
        first = self._block.start
        return self._kept.most_alive_bytes(range(first, first))

    def freed_bytes(self, saved: Collection[int]) -> int:
        """Bytes that are freed if the whole block is checkpointed and keeps given values."""
        inputs_bytes = self._kept.more_bytes(self._block.inputs)
        saved_bytes = sum(self._graph.values[v].size_bytes for v in saved)
        return self.kept_bytes - inputs_bytes - saved_bytes

    def freed_bytes_of(self, plain: OptionCost, cost: OptionCost) -> int:
        """Bytes that are freed under an option of the block, by its cost and the plain one's."""
        inputs_bytes = self._kept.more_bytes([self._block.inputs[i] for i in cost.kept_inputs])
        return plain.kept_bytes - cost.kept_bytes - inputs_bytes

    def run(self, start: int, stop: int) -> Run:
        """Operations `start … stop − 1` as a run."""
        again, frontier = recomputed(self._graph, start, stop)
        freed_bytes = self._kept.within_bytes(range(start, stop))
        return Run(
            start=start,
            stop=stop,
            freed_bytes=freed_bytes - self._kept.more_bytes(frontier),
            added_s=self._added_s(range(start, stop), again),
            unwritten_bytes=sum(
                self._graph.values[v].size_bytes
                for op in self._graph.operations[start:stop]
                for v in op.outputs
                if self._graph.values[v].last_use >= stop and not self._kept.is_written(v)
            ),
        )

    def saving_what_is_made_of_arguments(self, run: Run) -> Run:
        """A run that keeps what it makes of arguments alone, such as the cast of a weight, and its
        backward reads. The same run if that is nothing."""
        graph = self._graph
        again, _ = recomputed(graph, run.start, run.stop)
        made = made_of_arguments(graph, run.start, run.stop)
        needed = {v for op in graph.operations[run.start : run.stop] for v in op.needs}
        for op in (graph.operations[e] for e in again):
            if made.isdisjoint(op.outputs):
                needed.update(op.reads)
        saved = tuple(sorted(v for v in made & needed if graph.values[v].last_use < run.stop))
        fewer, _ = recomputed(graph, run.start, run.stop, frozenset(saved))
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
