"""The buffers that a plain block keeps from its forward to its backward."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import accumulate

from jax_hremat._cost.profile import Profile, Residual
from jax_hremat._partition.blocks import Block
from jax_hremat._trace.graph import Graph


class KeptBuffers:
    """The buffers that a plain block keeps, and what else it takes to keep other values instead.

    Args:
        graph: The program's graph.
        block: The block.
        profile: What its operations take.
        inputs: The inputs of the block that are kept anyway.
    """

    def __init__(
        self, graph: Graph, block: Block, profile: Profile, inputs: Collection[int]
    ) -> None:
        self._graph = graph
        self._block = block
        self._residuals = profile.residuals
        self._writers = profile.written
        self._makers = {block.start + r.made_by for r in profile.residuals}
        self._inputs = frozenset(inputs)
        self._replaced: dict[int, frozenset[Residual]] = {}

    @property
    def total_bytes(self) -> int:
        """Their bytes."""
        return sum(r.size_bytes for r in self._residuals)

    def made_by_bytes(self, operation: int) -> int:
        """Bytes of those that an operation makes."""
        position = operation - self._block.start
        return sum(r.size_bytes for r in self._residuals if r.made_by == position)

    def within_bytes(self, operations: range) -> int:
        """Bytes of those that only operations of a range make and read."""
        positions = self._positions(operations)
        return sum(r.size_bytes for r in self._residuals if r.is_within(positions))

    def most_alive_bytes(self, run: range) -> int:
        """The most bytes of them that are alive at a time in the backward, if those within a run
        are made again when the backward comes to the run's last operation."""
        positions = self._positions(run)
        alive = [0] * (len(self._block) + 1)
        for r in self._residuals:
            begins = (positions.stop if r.is_within(positions) else len(self._block)) - 1
            alive[begins] += r.size_bytes
            alive[r.first_reader - 1] -= r.size_bytes
        # The backward runs from the last operation to the first.
        return max(accumulate(reversed(alive[: len(self._block)])), default=0)

    def more_bytes(self, values: Collection[int]) -> int:
        """How many more bytes to keep, so that given values are kept."""
        new = [v for v in values if not self._is_kept(v)]
        replaced = frozenset[Residual]().union(*map(self._replaced_by, new))
        new_bytes = sum(self._graph.values[v].size_bytes for v in new)
        return max(new_bytes - sum(r.size_bytes for r in replaced), 0)

    def is_written(self, value: int) -> bool:
        """Whether the plain block writes a value, or what is only another view of it."""
        v = self._graph.values[value]
        if v.producer is None or v.producer < self._block.start:
            return True
        if v.producer - self._block.start in self._writers:
            return True
        maker = self._graph.operations[v.producer]
        same = [u for u in maker.reads if self._graph.values[u].size_bytes == v.size_bytes]
        return maker.fusible and not maker.flops and bool(same) and self.is_written(same[0])

    def _positions(self, operations: range) -> range:
        first = self._block.start
        return range(operations.start - first, operations.stop - first)

    def _is_kept(self, value: int) -> bool:
        v = self._graph.values[value]
        if v.kind != "computed" or value in self._inputs or v.producer in self._makers:
            return True
        if v.producer is None or v.producer >= self._block.start:
            return False
        # An input that the backward of an earlier block reads is kept for that.
        before = self._graph.operations[v.producer : self._block.start]
        return any(value in op.needs for op in before)

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
            made = [r for r in self._residuals if first + r.made_by == maker]
            yield from (r for r in made if first + r.first_reader >= at)
            operation = self._graph.operations[maker]
            if operation.fusible and not made:
                new = [v for v in operation.reads if v not in seen]
                seen.update(new)
                stack += new
